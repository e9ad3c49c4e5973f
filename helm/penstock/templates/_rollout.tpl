{{/* include "penstock.rolloutPod" (list . POOL): the pod of a rollout server, or of the first node of one. */}}
{{- define "penstock.rolloutPod" -}}
{{- $root := first . -}}
{{- $pool := last . -}}
{{- $startSeconds := dig "rollout" "start_timeout_s" 600 $root.Values.config | float64 -}}
metadata:
  labels: {{- include "penstock.poolLabels" . | nindent 4 }}
  annotations: {{- include "penstock.checksum" (list $root "rollout") | nindent 4 }}
spec:
  {{- include "penstock.podSecurity" $root | nindent 2 }}
  {{- include "penstock.spread" (list $root $pool.label $pool.spreadOver) | nindent 2 }}
  # On SIGTERM the server gives its prompts back and leaves the fleet.
  terminationGracePeriodSeconds: {{ $pool.grace }}
  {{- include "penstock.downloads" (list $root "model" "data") | nindent 2 }}
  containers:
    - name: rollout
      image: {{ include "penstock.image" (list $root ($pool.image | default "rollout")) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      {{- if gt (int $pool.nodes) 1 }}
      # The engine's workers are Ray actors on all nodes of the server. It starts when every node has joined.
      command:
        - /bin/sh
        - -ec
        - |
          ray start --head --port=6379 --node-ip-address="$POD_IP" --disable-usage-stats
          timeout "$START_SECONDS" python3 -c '
          import os, time, ray
          ray.init(address="auto")
          while sum(node["Alive"] for node in ray.nodes()) < int(os.environ["LWS_GROUP_SIZE"]): time.sleep(1)'
          exec penstock "$@"
        - rollout
      {{- else }}
      command: [penstock]
      {{- end }}
      # The learner connects to this address, so it is the pod's own and not 0.0.0.0.
      args:
        - rollout
        - --config=/etc/penstock/run.yaml
        - --server-id=$(POD_NAME)
        - --rollout.host=$(POD_IP)
        {{- range include "penstock.redisArgs" (list $root "rollout") | fromJsonArray }}
        - {{ . }}
        {{- end }}
        {{- range include "penstock.poolArguments" $pool | fromJsonArray }}
        - {{ . | squote }}
        {{- end }}
      env:
        {{- include "penstock.env" $root | nindent 8 }}
        {{- include "penstock.tokenEnv" $root | nindent 8 }}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if gt (int $pool.nodes) 1 }}
        {{- include "penstock.rayEnv" $root | nindent 8 }}
        - {name: START_SECONDS, value: {{ ceil $startSeconds | toString | quote }}}
        {{- else }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
      ports:
        - {name: weights, containerPort: 7070}
        - {name: metrics, containerPort: 9100}
      # If the model takes too long to load, the server ends before the probe fails, and logs why.
      startupProbe:
        httpGet: {path: /startupz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ add (ceil (divf $startSeconds 10)) 6 }}
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        timeoutSeconds: 5
      resources: {{- include "penstock.poolResources" . | nindent 8 }}
      {{- include "penstock.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        {{- include "penstock.mounts" $root | nindent 8 }}
        {{- include "penstock.modelMounts" $root | nindent 8 }}
        {{- include "penstock.keysMount" $root | nindent 8 }}
        {{- include "penstock.certificatesMount" $root | nindent 8 }}
        {{- include "penstock.redisMount" $root | nindent 8 }}
  volumes:
    {{- include "penstock.trainingVolumes" (list $root $pool.shmSize) | nindent 4 }}
    {{- include "penstock.keysVolume" (list $root "cluster-key") | nindent 4 }}
    {{- include "penstock.certificatesVolume" $root | nindent 4 }}
    {{- include "penstock.redisVolume" (list $root "rollout") | nindent 4 }}
{{- end -}}

{{/* include "penstock.rolloutWorkerPod" (list . POOL): the pod of a further node of a server. */}}
{{- define "penstock.rolloutWorkerPod" -}}
{{- $root := first . -}}
{{- $pool := last . -}}
metadata:
  labels: {{- include "penstock.poolLabels" . | nindent 4 }}
    penstock/engine-worker: "true"
spec:
  {{- include "penstock.podSecurity" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ $pool.grace }}
  {{- include "penstock.downloads" (list $root "model" "data") | nindent 2 }}
  containers:
    - name: engine-worker
      image: {{ include "penstock.image" (list $root ($pool.image | default "rollout")) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      # It leaves when the first node does: LeaderWorkerSet starts all nodes of a server again if one of them ends.
      command:
        - /bin/sh
        - -ec
        - |
          trap 'exit 143' TERM
          timeout "$START_SECONDS" sh -c 'until ray health-check --address "$LWS_LEADER_ADDRESS:6379"; do sleep 2; done' & wait $!
          exec ray start --address="$LWS_LEADER_ADDRESS:6379" --node-ip-address="$POD_IP" --block --disable-usage-stats
      env:
        {{- include "penstock.env" $root | nindent 8 }}
        {{- include "penstock.tokenEnv" $root | nindent 8 }}
        {{- include "penstock.rayEnv" $root | nindent 8 }}
        - {name: START_SECONDS, value: {{ dig "rollout" "start_timeout_s" 600 $root.Values.config | float64 | ceil | toString | quote }}}
      resources: {{- include "penstock.poolResources" . | nindent 8 }}
      {{- include "penstock.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        {{- include "penstock.mounts" $root | nindent 8 }}
        {{- include "penstock.modelMounts" $root | nindent 8 }}
  volumes:
    {{- include "penstock.trainingVolumes" (list $root $pool.shmSize) | nindent 4 }}
{{- end -}}

{{- define "penstock.poolLabels" -}}
{{- $root := first . -}}
{{- $pool := last . -}}
{{ include "penstock.labels" $root }}
app.kubernetes.io/component: rollout
{{- with $pool.name }}
penstock/pool: {{ . }}
{{- end }}
{{- if $pool.spot }}
penstock/spot: "true"
{{- end }}
{{- end -}}

{{- define "penstock.poolResources" -}}
{{- $root := first . -}}
{{- $pool := last . -}}
{{- $limits := dict -}}
{{- if $pool.gpus }}{{ $limits = dict "limits" (dict ($pool.gpuResource | default $root.Values.gpuResource) (int $pool.gpus)) }}{{ end -}}
{{- mustMergeOverwrite (deepCopy $pool.resources) $limits | toYaml -}}
{{- end -}}

{{/* include "penstock.poolWorkload" (list . POOL): the StatefulSet of a pool, or a LeaderWorkerSet if a server has several nodes. */}}
{{- define "penstock.poolWorkload" -}}
{{- $root := first . -}}
{{- $pool := last . -}}
{{- $isSpread := gt (int $pool.nodes) 1 -}}
{{- $pod := include "penstock.workload" (dict "root" $root "options" $pool "pod" (include "penstock.rolloutPod" .)) -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $isSpread }}
kind: {{ ternary "LeaderWorkerSet" "StatefulSet" $isSpread }}
metadata:
  name: {{ $pool.fullname }}
  labels: {{- include "penstock.poolLabels" . | nindent 4 }}
    {{- include "penstock.queueLabels" $root | nindent 4 }}
spec:
  {{- if $pool.autoscaling.enabled }}
  {{- if not $isSpread }}{{ include "penstock.liveReplicas" (list $root "StatefulSet" $pool.fullname) | nindent 2 }}{{ end }}
  {{- else }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  {{- if $isSpread }}
  startupPolicy: LeaderCreated
  rolloutStrategy: {type: RollingUpdate, rollingUpdateConfiguration: {maxUnavailable: 1}}
  leaderWorkerTemplate:
    size: {{ $pool.nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate: {{- $pod | nindent 6 }}
    workerTemplate: {{- include "penstock.workload" (dict "root" $root "options" $pool "pod" (include "penstock.rolloutWorkerPod" .)) | nindent 6 }}
  {{- else }}
  serviceName: {{ include "penstock.fullname" $root }}-rollout
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "penstock.selector" $root | nindent 6 }}
      app.kubernetes.io/component: rollout
      {{- with $pool.name }}
      penstock/pool: {{ . }}
      {{- end }}
  template: {{- $pod | nindent 4 }}
  {{- end }}
{{- end -}}
