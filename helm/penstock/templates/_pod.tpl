{{/* Parts that every pod and container shares. */}}
{{- define "penstock.podSecurity" -}}
serviceAccountName: {{ include "penstock.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.securityContext.runAsUser }}
  runAsGroup: {{ .Values.securityContext.runAsGroup }}
  fsGroup: {{ .Values.securityContext.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "penstock.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* include "penstock.spread" (list . "gateway" .Values.gateway.spreadOver): spreads the pods of a component evenly over each domain. */}}
{{- define "penstock.spread" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- with index . 2 -}}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "penstock.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* include "penstock.budget" (list . "gateway" "label: value" "maxUnavailable: 1"): bounds how many pods with the label may
be evicted at once. */}}
{{- define "penstock.budget" -}}
{{- $root := index . 0 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "penstock.fullname" $root }}-{{ index . 1 }}
  labels: {{- include "penstock.labels" $root | nindent 4 }}
spec:
  {{ index . 3 }}
  # A pod that is not healthy may always be evicted.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "penstock.selector" $root | nindent 6 }}
      {{ index . 2 }}
{{- end -}}

{{- define "penstock.checksums" -}}
checksum/config: {{ include "penstock.config" . | sha256sum }}
{{- end -}}

{{/* Logs are JSON. Caches go to /tmp, since the root file system is read-only. */}}
{{- define "penstock.env" -}}
- {name: PENSTOCK_LOG, value: json}
- {name: HOME, value: /tmp}
{{- end -}}

{{/* include "penstock.redisArgs" (list . "gateway"): the process's Redis user, as a JSON list of arguments. The URL and the
path of the password file are in the run's configuration. */}}
{{- define "penstock.redisArgs" -}}
{{- $external := (first .).Values.externalRedis -}}
{{- $user := ternary (last .) $external.username (first .).Values.redis.enabled -}}
{{- ternary (list (printf "--redis.username=%s" $user)) list (ne $user "") | toJson -}}
{{- end -}}

{{- define "penstock.hasRedisPassword" -}}
{{- if or .Values.redis.enabled .Values.externalRedis.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "penstock.redisMount" -}}
{{- if include "penstock.hasRedisPassword" . }}
- {name: redis-password, mountPath: /etc/penstock/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/* include "penstock.redisVolume" (list . "gateway"): the password of the role's Redis user, as the file `password`. */}}
{{- define "penstock.redisVolume" -}}
{{- $root := first . -}}
{{- $external := $root.Values.externalRedis -}}
{{- if include "penstock.hasRedisPassword" $root }}
- name: redis-password
  secret:
    secretName: {{ ternary (include "penstock.secretName" $root) $external.existingSecret $root.Values.redis.enabled }}
    defaultMode: 0440
    items:
      - {key: {{ ternary (printf "redis-%s-password" (last .)) $external.key $root.Values.redis.enabled }}, path: password}
{{- end }}
{{- end -}}

{{- define "penstock.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "penstock.secretName" . }}, key: ray-token}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- define "penstock.mounts" -}}
- {name: config, mountPath: /etc/penstock/run.yaml, subPath: run.yaml, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: runs, mountPath: /runs}
{{- end -}}

{{/* The claims of `storage` with the input of a run: models and data. An image may contain them instead. */}}
{{- define "penstock.inputMounts" -}}
{{- range $name, $claim := pick .Values.storage "models" "data" }}
{{- if $claim.existingClaim }}
- {name: {{ $name }}, mountPath: {{ $claim.mountPath }}, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.inputVolumes" -}}
{{- range $name, $claim := pick .Values.storage "models" "data" }}
{{- if $claim.existingClaim }}
- {name: {{ $name }}, persistentVolumeClaim: {claimName: {{ $claim.existingClaim }}, readOnly: true}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.modelMounts" -}}
{{- include "penstock.inputMounts" . }}
- {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* include "penstock.keysVolume" (list . "cluster-key"): mounts these keys of the Secret, and no others. */}}
{{- define "penstock.keysVolume" -}}
- name: keys
  secret:
    secretName: {{ include "penstock.secretName" (first .) }}
    defaultMode: 0440
    items:
      {{- range rest . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end -}}

{{/* The Secret with keys and passwords: yours, or the one that the chart makes. */}}
{{- define "penstock.secretName" -}}
{{- .Values.secretName | default (printf "%s-keys" (include "penstock.fullname" .)) -}}
{{- end -}}

{{/* The Secret with the gateway's certificate. */}}
{{- define "penstock.tlsSecret" -}}
{{- .Values.gateway.tls.secretName | default (printf "%s-gateway-tls" (include "penstock.fullname" .)) -}}
{{- end -}}

{{/* include "penstock.trainingVolumes" (list . "8Gi"): config, scratch, the run's folder, models and shared memory. */}}
{{- define "penstock.trainingVolumes" -}}
{{- $root := first . -}}
{{- $name := include "penstock.fullname" $root -}}
- {name: config, configMap: {name: {{ $name }}-config}}
- {name: tmp, emptyDir: {}}
- {name: runs, persistentVolumeClaim: {claimName: {{ $root.Values.storage.runs.existingClaim | default (printf "%s-runs" $name) }}}}
{{- include "penstock.inputVolumes" $root }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ last . }}}}
{{- end -}}
