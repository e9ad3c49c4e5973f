{{/* The resource groups that this run needs, the same as in penstock.config.gpu_bundles. A JSON list of
{name, settings, bundles, cpus, gpus}: the number of bundles, the CPUs of the largest one, and the GPUs of each. A group that has
only `learner.roles` has the settings of `learner.groups.critic`. */}}
{{- define "penstock.resourceGroups" -}}
{{- $learner := .Values.config.learner -}}
{{- $needed := dict "policy" (dig "policy" (dict) $learner) -}}
{{- $policyIsReference := and (dig "lora" "" $learner) (not (dig "reference" "path" "" $learner)) -}}
{{- if and (ne (dig "algorithm" "kl" "placement" "none" $learner) "none") (not $policyIsReference) -}}
{{- $_ := set $needed "reference" (dig "reference" (dict) $learner) -}}
{{- end -}}
{{- range list "critic" "reward_model" -}}
{{- $role := index $learner . -}}
{{- if not (kindIs "invalid" $role) -}}{{- $_ := set $needed . $role -}}{{- end -}}
{{- end -}}
{{- $own := dig "roles" (dict) $learner | default dict -}}
{{- range $name, $sizes := $own }}{{ $_ := set $needed $name $sizes }}{{ end -}}
{{- $pools := list -}}{{- $members := dict -}}
{{- range $role := concat (list "policy" "reference" "critic" "reward_model") (keys $own | sortAlpha) -}}
{{- if hasKey $needed $role -}}
{{- $shared := ternary "policy" "critic" (has $role (list "policy" "reference")) -}}
{{- $default := ternary $shared $role (eq $learner.placement "split-collocate") -}}
{{- $pool := dig "pool" "" (index $needed $role) | default $default -}}
{{- $pools = append $pools $pool | uniq -}}
{{- $_ := set $members $pool (append (dig $pool list $members) $role) -}}
{{- end -}}
{{- end -}}
{{- $groups := list -}}
{{- range $pool := $pools -}}
{{- $names := index $members $pool -}}{{- $bundles := 0 -}}{{- $cpus := 0.0 -}}
{{- range $role := $names -}}
{{- $sizes := index $needed $role -}}
{{- $bundles = max $bundles (dig "num_ranks" 1 $sizes | int) -}}
{{- $cpus = addf $cpus (dig "cpus_per_rank" 1.0 $sizes | float64) -}}
{{- end -}}
{{- $gpus := list -}}
{{- range $rank := until (int $bundles) -}}
{{- $share := 0.0 -}}
{{- range $role := $names -}}
{{- $sizes := index $needed $role -}}
{{- if lt $rank (dig "num_ranks" 1 $sizes | int) }}{{ $share = addf $share (dig "gpus_per_rank" 0.0 $sizes | float64) }}{{ end -}}
{{- end -}}
{{- $gpus = append $gpus $share -}}
{{- end -}}
{{- $name := join "-" $names | replace "_" "-" -}}
{{- $settings := first $names -}}
{{- if not (hasKey $.Values.learner.groups $settings) }}{{ $settings = "critic" }}{{ end -}}
{{- $groups = append $groups (dict "name" $name "settings" $settings "bundles" $bundles "cpus" $cpus "gpus" $gpus) -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{/* include "penstock.wholeGpus" (list 0.75 0.75): number of GPUs that hold these bundles. Ray places a bundle's fraction on one
GPU: four bundles of 0.75 need four GPUs, and four of 0.5 need two. The largest fraction goes first, to the first GPU with room. */}}
{{- define "penstock.wholeGpus" -}}
{{- $whole := 0 -}}{{- $fractions := list -}}
{{- range . -}}
{{- $units := round (mulf . 10000) 0 | int -}}
{{- $whole = add $whole (div $units 10000) -}}
{{- with mod $units 10000 }}{{ $fractions = append $fractions (printf "%05d" .) }}{{ end -}}
{{- end -}}
{{- $room := list -}}
{{- range sortAlpha $fractions | reverse -}}
{{- $size := trimPrefix "0" . | trimPrefix "0" | trimPrefix "0" | trimPrefix "0" | int -}}
{{- $placed := false -}}{{- $left := list -}}
{{- range $room -}}
{{- if and (not $placed) (ge (int .) $size) -}}
{{- $left = append $left (sub . $size) -}}{{- $placed = true -}}
{{- else -}}
{{- $left = append $left . -}}
{{- end -}}
{{- end -}}
{{- if not $placed }}{{ $left = append $left (sub 10000 $size) }}{{ end -}}
{{- $room = $left -}}
{{- end -}}
{{- add $whole (len $room) -}}
{{- end -}}

{{/* Labels that make the pods of the RayCluster start together or not at all. The first four schedulers need KubeRay's operator to be
installed with batchScheduler; Kueue watches its label itself. */}}
{{- define "penstock.gangLabels" -}}
{{- with .Values.learner.gang -}}
{{- $queueLabels := dict
  "volcano" "volcano.sh/queue-name"
  "yunikorn" "yunikorn.apache.org/queue"
  "kai-scheduler" "kai.scheduler/queue"
  "kueue" "kueue.x-k8s.io/queue-name"
-}}
{{- $labels := dict -}}
{{- if has .scheduler (list "yunikorn" "scheduler-plugins") -}}{{- $_ := set $labels "ray.io/gang-scheduling-enabled" "true" -}}{{- end -}}
{{- if eq .scheduler "volcano" -}}{{- $_ := set $labels "ray.io/scheduler-name" "volcano" -}}{{- end -}}
{{- if eq .scheduler "yunikorn" -}}{{- $_ := set $labels "yunikorn.apache.org/app-id" (include "penstock.fullname" $) -}}{{- end -}}
{{- if and .scheduler .queue (hasKey $queueLabels .scheduler) -}}{{- $_ := set $labels (index $queueLabels .scheduler) .queue -}}{{- end -}}
{{- if and .scheduler .priorityClassName -}}{{- $_ := set $labels (ternary "kueue.x-k8s.io/priority-class" "ray.io/priority-class-name" (eq .scheduler "kueue")) .priorityClassName -}}{{- end -}}
{{- if $labels -}}{{- toYaml $labels -}}{{- end -}}
{{- end -}}
{{- end -}}
