{{/* The run's configuration: .Values.config plus what the chart decides. It holds no secret: keys and the password of
Redis are paths of mounted files. Each process gets its Redis user, and a rollout server its pod's address, as an argument. */}}
{{- define "penstock.config" -}}
{{- $decided := dict
  "run_dir" "/runs"
  "redis" (dict "url" (ternary (printf "redis://%s-redis:6379/0" (include "penstock.fullname" .)) .Values.externalRedis.url .Values.redis.enabled))
  "gateway" (dict "host" "0.0.0.0" "port" 8080 "grpc_port" 9090 "api_key_file" "/etc/penstock/keys/api-key")
  "rollout" (dict "port" 7070 "metrics_port" 9100)
  "weights" (dict "cluster_key_file" "/etc/penstock/keys/cluster-key")
  "learner" (dict "ray_address" (ternary "auto" "" .Values.learner.kuberay.enabled) "metrics_host" "0.0.0.0" "metrics_port" 9100)
-}}
{{- if include "penstock.hasRedisPassword" . -}}
{{- $_ := set $decided.redis "password_file" "/etc/penstock/redis/password" -}}
{{- end -}}
{{- if .Values.gateway.tls.enabled -}}
{{- $_ := set $decided.gateway "tls_cert_file" "/etc/penstock/tls/tls.crt" -}}
{{- $_ := set $decided.gateway "tls_key_file" "/etc/penstock/tls/tls.key" -}}
{{- end -}}
{{- if .Values.gateway.namedKeys -}}
{{- $_ := set $decided.gateway "keys_file" "/etc/penstock/keys/api-keys" -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy .Values.config) $decided | toYaml -}}
{{- end -}}

{{/* The resource groups that this run needs, the same as in penstock_learner.roles.placement. A JSON list of
{name, settings, bundles, cpus, gpus}; cpus and gpus are those of one bundle. */}}
{{- define "penstock.resourceGroups" -}}
{{- $learner := .Values.config.learner -}}
{{- $layouts := dict
  "standalone" (list (list "policy") (list "reference") (list "critic") (list "reward_model"))
  "split-collocate" (list (list "policy" "reference") (list "critic" "reward_model"))
-}}
{{- $needed := dict "policy" (dig "policy" (dict) $learner) -}}
{{- $policyIsReference := and (dig "lora" "" $learner) (not (dig "reference" "path" "" $learner)) -}}
{{- if and (ne (dig "algorithm" "kl" "placement" "none" $learner) "none") (not $policyIsReference) -}}
{{- $_ := set $needed "reference" (dig "reference" (dict) $learner) -}}
{{- end -}}
{{- range list "critic" "reward_model" -}}
{{- $role := index $learner . -}}
{{- if not (kindIs "invalid" $role) -}}{{- $_ := set $needed . $role -}}{{- end -}}
{{- end -}}
{{- $groups := list -}}
{{- range $layout := index $layouts ($learner.placement | default "standalone") -}}
{{- $names := list -}}{{- $bundles := 0 -}}{{- $cpus := 0.0 -}}{{- $gpus := 0.0 -}}
{{- range $role := $layout -}}
{{- if hasKey $needed $role -}}
{{- $sizes := index $needed $role -}}
{{- $names = append $names $role -}}
{{- $bundles = max $bundles (dig "num_ranks" 1 $sizes | int) -}}
{{- $cpus = addf $cpus (dig "cpus_per_rank" 1.0 $sizes | float64) -}}
{{- $gpus = addf $gpus (dig "gpus_per_rank" 0.0 $sizes | float64) -}}
{{- end -}}
{{- end -}}
{{- if $names -}}
{{- $name := join "-" $names | replace "_" "-" -}}
{{- $groups = append $groups (dict "name" $name "settings" (first $names) "bundles" $bundles "cpus" $cpus "gpus" $gpus) -}}
{{- end -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{/* Refuses combinations of values that cannot work, before anything is installed. */}}
{{- define "penstock.check" -}}
{{- $values := .Values -}}
{{- $tensorParallel := dig "rollout" "engine" "tensor_parallel_size" 1 $values.config | int -}}
{{- if and $values.rollout.gpus (ne (int $values.rollout.gpus) $tensorParallel) -}}
{{- fail (printf "rollout.gpus is %v and config.rollout.engine.tensor_parallel_size is %d; make them equal, or rollout.gpus 0 for CPU" $values.rollout.gpus $tensorParallel) -}}
{{- end -}}
{{- $external := $values.externalRedis -}}
{{- if and $values.redis.enabled (or $external.url $external.existingSecret) -}}
{{- fail "redis.enabled is true and externalRedis is set; choose one" -}}
{{- end -}}
{{- if not (or $values.redis.enabled $external.url) -}}
{{- fail "redis.enabled is false; set externalRedis.url" -}}
{{- end -}}
{{- if contains "@" $external.url -}}
{{- fail "externalRedis.url holds a user or password, which everyone who reads the ConfigMap would see; set externalRedis.username and externalRedis.existingSecret" -}}
{{- end -}}
{{- if and $external.username (not $external.existingSecret) -}}
{{- fail "externalRedis.username is set; set externalRedis.existingSecret to the Secret with its password" -}}
{{- end -}}
{{- if and $values.rollout.autoscaling.enabled (not $values.rollout.autoscaling.prometheusUrl) -}}
{{- fail "rollout.autoscaling.enabled is true; set rollout.autoscaling.prometheusUrl, from which the queue's depth is read" -}}
{{- end -}}
{{- if and $values.gateway.ingress.enabled (not $values.gateway.ingress.host) -}}
{{- fail "gateway.ingress.enabled is true; set gateway.ingress.host" -}}
{{- end -}}
{{- if and $values.gateway.httpRoute.enabled (not $values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled is true; set gateway.httpRoute.parentRefs to the Gateway that routes to it" -}}
{{- end -}}
{{- if and $values.certManager.enabled (not $values.certManager.issuerRef) -}}
{{- fail "certManager.enabled is true; set certManager.issuerRef, such as {name: letsencrypt, kind: ClusterIssuer}" -}}
{{- end -}}
{{- if and $values.gateway.tls.enabled (not (or $values.gateway.tls.secretName $values.certManager.enabled)) -}}
{{- fail "gateway.tls.enabled is true; set gateway.tls.secretName to a Secret with tls.crt and tls.key, or certManager.enabled" -}}
{{- end -}}
{{- if and $values.learner.gang.scheduler (not $values.learner.kuberay.enabled) -}}
{{- fail "learner.gang.scheduler is set and learner.kuberay.enabled is false: one pod needs no gang" -}}
{{- end -}}
{{- if and (eq $values.learner.gang.scheduler "kueue") (not $values.learner.gang.queue) -}}
{{- fail "learner.gang.scheduler is kueue; set learner.gang.queue to a LocalQueue" -}}
{{- end -}}
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
{{- if and .scheduler .priorityClassName -}}{{- $_ := set $labels "ray.io/priority-class-name" .priorityClassName -}}{{- end -}}
{{- if $labels -}}{{- toYaml $labels -}}{{- end -}}
{{- end -}}
{{- end -}}
