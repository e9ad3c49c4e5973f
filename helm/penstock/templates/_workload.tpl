{{/* What every workload has in common: pod options, queue labels, budgets. */}}

{{/* include "penstock.options" (list . .Values.gateway): the pod options of a workload as JSON. Options of podDefaults hold where
the workload sets none; mappings are merged. */}}
{{- define "penstock.options" -}}
{{- $own := last . -}}
{{- $options := dict -}}
{{- range $key, $default := (first .).Values.podDefaults -}}
{{- $value := get $own $key -}}
{{- if kindIs "map" $default -}}
{{- $value = mustMergeOverwrite (deepCopy $default) (deepCopy ($value | default dict)) -}}
{{- else -}}
{{- $value = $value | default $default -}}
{{- end -}}
{{- $_ := set $options $key $value -}}
{{- end -}}
{{- $options | toJson -}}
{{- end -}}

{{/* include "penstock.workload" (dict "root" . "options" .Values.gateway "pod" TEXT "ends" true): the pod template TEXT with the
workload's pod options. The first container is the one that the options mean. `ends`: the pod is that of a Job, which ends with
its first container, so its sidecars are init containers that run on. */}}
{{- define "penstock.workload" -}}
{{- $options := include "penstock.options" (list .root .options) | fromJson -}}
{{- $pod := fromYaml .pod -}}
{{- with $pod.Error }}{{ fail (printf "a pod of the chart is not YAML: %s" .) }}{{ end -}}
{{- $spec := $pod.spec -}}
{{- $container := first $spec.containers -}}
{{- $_ := set $pod.metadata "labels" (merge $pod.metadata.labels $options.podLabels) -}}
{{- with merge ($pod.metadata.annotations | default dict) $options.podAnnotations }}{{ $_ := set $pod.metadata "annotations" . }}{{ end -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "serviceAccountName" "resourceClaims" -}}
{{- with get $options $field }}{{ $_ := set $spec $field . }}{{ end -}}
{{- end -}}
{{- with concat ($spec.topologySpreadConstraints | default list) $options.topologySpreadConstraints }}{{ $_ := set $spec "topologySpreadConstraints" . }}{{ end -}}
{{- with concat ($spec.volumes | default list) $options.extraVolumes }}{{ $_ := set $spec "volumes" . }}{{ end -}}
{{- with concat ($container.volumeMounts | default list) $options.extraVolumeMounts }}{{ $_ := set $container "volumeMounts" . }}{{ end -}}
{{- with concat ($container.env | default list) $options.env }}{{ $_ := set $container "env" . }}{{ end -}}
{{- with $options.envFrom }}{{ $_ := set $container "envFrom" . }}{{ end -}}
{{- $resources := mustMergeOverwrite ($container.resources | default dict) $options.extraResources -}}
{{- with $options.resourceClaims -}}
{{- $claims := list -}}
{{- range . }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- $_ := set $container "resources" $resources -}}
{{- $security := include "penstock.containerSecurity" .root | fromYaml -}}
{{- $init := $spec.initContainers | default list -}}
{{- range $options.initContainers }}{{ $init = append $init (merge . (deepCopy $security)) }}{{ end -}}
{{- $containers := $spec.containers -}}
{{- $ends := .ends -}}
{{- range $options.sidecars -}}
{{- $sidecar := merge . (deepCopy $security) -}}
{{- if $ends }}{{ $init = append $init (merge (dict "restartPolicy" "Always") $sidecar) }}{{ else }}{{ $containers = append $containers $sidecar }}{{ end -}}
{{- end -}}
{{- $_ := set $spec "containers" $containers -}}
{{- with $init }}{{ $_ := set $spec "initContainers" . }}{{ end -}}
{{- $_ := set $pod "spec" (mustMergeOverwrite $spec $options.podSpec) -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* Labels of Kueue on a workload that Kueue admits by itself. With kueue.wholeRun only the AppWrapper has them. */}}
{{- define "penstock.queueLabels" -}}
{{- if and .Values.kueue.queueName (not .Values.kueue.wholeRun) }}{{ include "penstock.kueueLabels" . }}{{ end -}}
{{- end -}}

{{- define "penstock.kueueLabels" -}}
kueue.x-k8s.io/queue-name: {{ .Values.kueue.queueName }}
{{- with .Values.kueue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- end -}}

{{/* Not empty if the workloads are parts of the AppWrapper of kueue.yaml. */}}
{{- define "penstock.isWrapped" -}}
{{- if and .Values.kueue.queueName .Values.kueue.wholeRun }}yes{{ end -}}
{{- end -}}

{{/* include "penstock.spread" (list . "label: value" .Values.gateway.spreadOver): spreads pods with the labels evenly over each
domain. */}}
{{- define "penstock.spread" -}}
{{- $root := index . 0 -}}
{{- $label := index . 1 -}}
{{- with index . 2 -}}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "penstock.selector" $root | nindent 8 }}
        {{ $label }}
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

{{/* include "penstock.liveReplicas" (list . "StatefulSet" NAME): the field `replicas` of a workload that an autoscaler scales: as
many as it has, because Helm would otherwise set it to the default of 1 when autoscaling is turned on. Nothing if it does not
exist, or if the chart is rendered without a cluster. */}}
{{- define "penstock.liveReplicas" -}}
{{- $live := lookup "apps/v1" (index . 1) (first .).Release.Namespace (last .) -}}
{{- if $live }}replicas: {{ $live.spec.replicas | int }}{{ end -}}
{{- end -}}
