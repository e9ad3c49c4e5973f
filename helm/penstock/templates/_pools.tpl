{{/* The pools of rollout servers, as a JSON list: `rollout` itself, or each of rollout.pools with the settings of `rollout` where it
sets none. Each has `name` (empty for `rollout` itself), `fullname`, `label` (a selector), `engine`, `nodes` and `grace` besides
its settings. */}}
{{- define "penstock.pools" -}}
{{- $root := . -}}
{{- $common := omit .Values.rollout "pools" "http" -}}
{{- $base := printf "%s-rollout" (include "penstock.fullname" .) -}}
{{- $pools := list -}}
{{- range .Values.rollout.pools | default (list (dict "name" "")) -}}
{{- $spot := .spot | default false -}}
{{- $pool := mustMergeOverwrite (deepCopy $common) (deepCopy .) -}}
{{- /* The names of a StatefulSet's pods and revisions are labels, which have at most 63 characters. */ -}}
{{- $_ := set $pool "fullname" (ternary (include "penstock.bounded" (list (printf "%s-%s" $base .name) 52)) $base (ne .name "")) -}}
{{- $_ := set $pool "label" (ternary (printf "penstock/pool: %s" .name) "app.kubernetes.io/component: rollout" (ne .name "")) -}}
{{- $_ := set $pool "engine" (mustMergeOverwrite (deepCopy (dig "rollout" "engine" (dict) $root.Values.config)) (deepCopy (.engine | default dict))) -}}
{{- $_ := set $pool "ownEngine" (deepCopy (.engine | default dict)) -}}
{{- $_ := set $pool "nodes" ($pool.nodes | default 1 | int) -}}
{{- if gt (int $pool.nodes) 1 -}}
{{- $_ := set $pool.ownEngine "extra" (mustMergeOverwrite (dict "distributed_executor_backend" "ray") ($pool.engine.extra | default dict)) -}}
{{- end -}}
{{- /* A node of a spot pool is gone 30 s after its notice on some clouds; prompts are given back in seconds. */ -}}
{{- if and $spot (not .drainSeconds) }}{{ $_ := set $pool "drainSeconds" (min 10 (int $common.drainSeconds)) }}{{ end -}}
{{- $_ := set $pool "grace" (add $pool.drainSeconds 15) -}}
{{- if $spot -}}
{{- $taints := list (dict "key" "cloud.google.com/gke-spot" "operator" "Exists" "effect" "NoSchedule") (dict "key" "kubernetes.azure.com/scalesetpriority" "operator" "Equal" "value" "spot" "effect" "NoSchedule") -}}
{{- $_ := set $pool "tolerations" (concat ($pool.tolerations | default list) $taints) -}}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Not empty if a server has several nodes. */}}
{{- define "penstock.hasSpreadServers" -}}
{{- range include "penstock.pools" . | fromJsonArray }}{{ if gt (int .nodes) 1 }}yes{{ end }}{{ end -}}
{{- end -}}

{{/* include "penstock.poolArguments" POOL: the engine settings of a pool that differ from config.rollout, as a JSON list of
arguments. */}}
{{- define "penstock.poolArguments" -}}
{{- $arguments := list -}}
{{- range $key, $value := .ownEngine -}}
{{- $text := ternary (toJson $value) (toString $value) (or (kindIs "map" $value) (kindIs "slice" $value) (kindIs "invalid" $value)) -}}
{{- if kindIs "float64" $value }}{{ $text = toJson $value }}{{ end -}}
{{- $arguments = append $arguments (printf "--rollout.engine.%s=%s" $key $text) -}}
{{- end -}}
{{- with .maxConcurrentGroups }}{{ $arguments = append $arguments (printf "--rollout.max_concurrent_groups=%d" (int .)) }}{{ end -}}
{{- $arguments | toJson -}}
{{- end -}}

{{/* include "penstock.poolGroups" (list . POOL): the groups that one server of the pool works on at once. */}}
{{- define "penstock.poolGroups" -}}
{{- $pool := last . -}}
{{- $pool.autoscaling.groupsPerServer | default $pool.maxConcurrentGroups | default (dig "rollout" "max_concurrent_groups" 64 (first .).Values.config) | int -}}
{{- end -}}
