{{/* Parts that every pod and container shares. */}}
{{- define "penstock.podSecurity" -}}
serviceAccountName: {{ include "penstock.serviceAccount" . }}
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

{{/* The volumes with the input of a run: models, data, small files, and the token of the Hugging Face Hub. An image may contain models and data
instead. */}}
{{- define "penstock.inputMounts" -}}
{{- if include "penstock.modelsVolume" . }}
- {name: models, mountPath: {{ .Values.storage.models.mountPath }}, readOnly: true}
{{- end }}
{{- if or .Values.storage.data.existingClaim .Values.storage.data.source }}
- {name: data, mountPath: {{ .Values.storage.data.mountPath }}, readOnly: true}
{{- end }}
{{- if .Values.files }}
- {name: files, mountPath: /etc/penstock/files, readOnly: true}
{{- end }}
{{- include "penstock.tokenMount" . }}
{{- end -}}

{{- define "penstock.inputVolumes" -}}
{{- with include "penstock.modelsVolume" . }}
{{ . }}
{{- end }}
{{- if .Values.storage.data.source }}
- {name: data, emptyDir: {sizeLimit: {{ .Values.storage.data.size }}}}
{{- else if .Values.storage.data.existingClaim }}
- {name: data, persistentVolumeClaim: {claimName: {{ .Values.storage.data.existingClaim }}, readOnly: true}}
{{- end }}
{{- if .Values.files }}
- {name: files, configMap: {name: {{ include "penstock.fullname" . }}-files}}
{{- end }}
{{- include "penstock.tokenVolume" . }}
{{- end -}}

{{/* The volume of models: a claim of yours, the claim that modelDownload fills, or one of the pod itself. */}}
{{- define "penstock.modelsVolume" -}}
{{- $download := .Values.modelDownload -}}
{{- if and $download.source (eq $download.into "pod") -}}
- {name: models, emptyDir: {sizeLimit: {{ $download.size }}}}
{{- else if $download.source -}}
- {name: models, persistentVolumeClaim: {claimName: {{ include "penstock.modelsClaim" . }}}}
{{- else if .Values.storage.models.existingClaim -}}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.storage.models.existingClaim }}, readOnly: true}}
{{- end -}}
{{- end -}}

{{- define "penstock.modelsClaim" -}}
{{- .Values.modelDownload.existingClaim | default (printf "%s-models" (include "penstock.fullname" .)) -}}
{{- end -}}

{{/* The token of the Hugging Face Hub is a file: Hugging Face's library reads the path from HF_TOKEN_PATH. */}}
{{- define "penstock.tokenMount" -}}
{{- if .Values.huggingFace.tokenSecret }}
- {name: huggingface, mountPath: /etc/penstock/huggingface, readOnly: true}
{{- end }}
{{- end -}}

{{- define "penstock.tokenVolume" -}}
{{- with .Values.huggingFace }}
{{- if .tokenSecret }}
- name: huggingface
  secret:
    secretName: {{ .tokenSecret }}
    defaultMode: 0440
    items: [{key: {{ .tokenKey }}, path: token}]
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.tokenEnv" -}}
{{- if .Values.huggingFace.tokenSecret }}
- {name: HF_TOKEN_PATH, value: /etc/penstock/huggingface/token}
{{- end }}
{{- end -}}

{{- define "penstock.modelMounts" -}}
{{- include "penstock.inputMounts" . }}
{{- if .Values.storage.cache.existingClaim }}
- {name: cache, mountPath: {{ .Values.storage.cache.mountPath }}}
{{- end }}
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
{{- include "penstock.providerVolume" (first .) }}
{{- end -}}

{{- define "penstock.keysMount" -}}
- {name: keys, mountPath: /etc/penstock/keys, readOnly: true}
{{- if .Values.secretProviderClass }}
- {name: secret-provider, mountPath: /etc/penstock/secret-provider, readOnly: true}
{{- end }}
{{- end -}}

{{/* The certificate of the run's processes, with `tls`. */}}
{{- define "penstock.certificatesVolume" -}}
{{- if .Values.tls.enabled }}
- name: certificates
  secret:
    secretName: {{ include "penstock.secretName" . }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end -}}

{{- define "penstock.certificatesMount" -}}
{{- if .Values.tls.enabled }}
- {name: certificates, mountPath: /etc/penstock/certificates, readOnly: true}
{{- end }}
{{- end -}}

{{/* The Secrets Store driver makes the Secret of secretName as soon as a pod mounts its volume. */}}
{{- define "penstock.providerVolume" -}}
{{- with .Values.secretProviderClass }}
- name: secret-provider
  csi: {driver: secrets-store.csi.k8s.io, readOnly: true, volumeAttributes: {secretProviderClass: {{ . }}}}
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

{{/* Not empty if the gateway's certificate has public names only. It does not name the Service then. */}}
{{- define "penstock.hasPublicCertificate" -}}
{{- with .Values -}}
{{- if and .gateway.tls.enabled .certManager.enabled .certManager.publicNamesOnly (not .gateway.tls.secretName) }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* The first public name of the gateway. */}}
{{- define "penstock.publicName" -}}
{{- first .Values.gateway.httpRoute.hostnames | default .Values.gateway.ingress.host -}}
{{- end -}}

{{/* include "penstock.trainingVolumes" (list . "8Gi"): config, scratch, the run's folder, models and shared memory. */}}
{{- define "penstock.trainingVolumes" -}}
{{- $root := first . -}}
{{- $name := include "penstock.fullname" $root -}}
- {name: config, configMap: {name: {{ $name }}-config}}
- {name: tmp, emptyDir: {}}
- {name: runs, persistentVolumeClaim: {claimName: {{ $root.Values.storage.runs.existingClaim | default (printf "%s-runs" $name) }}}}
{{- include "penstock.inputVolumes" $root }}
{{- with $root.Values.storage.cache.existingClaim }}
- {name: cache, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ last . }}}}
{{- end -}}
