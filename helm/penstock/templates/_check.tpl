{{/* Refuses combinations of values that cannot work, before anything is installed. */}}
{{- define "penstock.check" -}}
{{- $values := .Values -}}
{{- with include "penstock.unknown" (dict "values" .Values "known" (.Files.Get "files/known-values.json" | fromJson) "path" "") -}}
{{- fail . -}}
{{- end -}}
{{- include "penstock.checkPools" . -}}
{{- include "penstock.checkRedis" . -}}
{{- include "penstock.checkQueue" . -}}
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
{{- if and $values.gateway.ingress.enabled (not $values.gateway.ingress.host) -}}
{{- fail "gateway.ingress.enabled is true; set gateway.ingress.host" -}}
{{- end -}}
{{- if and $values.gateway.httpRoute.enabled (not $values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled is true; set gateway.httpRoute.parentRefs to the Gateway that routes to it" -}}
{{- end -}}
{{- if and $values.certManager.enabled (not $values.certManager.issuerRef) -}}
{{- fail "certManager.enabled is true; set certManager.issuerRef, such as {name: letsencrypt, kind: ClusterIssuer}" -}}
{{- end -}}
{{- if and $values.certManager.enabled $values.certManager.publicNamesOnly (not (or $values.gateway.ingress.host $values.gateway.httpRoute.hostnames)) -}}
{{- fail "certManager.publicNamesOnly is true; set gateway.ingress.host or gateway.httpRoute.hostnames to the name that the certificate is for" -}}
{{- end -}}
{{- if and $values.secretProviderClass (not $values.secretName) -}}
{{- fail "secretProviderClass is set; set secretName to the Secret that the SecretProviderClass makes (secretObjects)" -}}
{{- end -}}
{{- $models := $values.storage.models -}}
{{- if and $values.modelDownload.source (not (hasPrefix (printf "%s/" $models.mountPath) (toString $values.config.model.path))) -}}
{{- fail (printf "modelDownload.source is set; config.model.path %s must be a folder below storage.models.mountPath %s, where the model is stored" (toString $values.config.model.path) $models.mountPath) -}}
{{- end -}}
{{- if or $values.learner.kuberay.enabled (include "penstock.hasSpreadServers" .) -}}
{{- $learner := $values.config.learner -}}
{{- $named := dict "model" $values.config.model -}}
{{- range $role := list "reference" "critic" "reward_model" }}{{ $_ := set $named (printf "learner.%s" $role) (index $learner $role | default dict) }}{{ end -}}
{{- range $role, $its := dig "roles" (dict) $learner }}{{ $_ := set $named (printf "learner.roles.%s" $role) ($its | default dict) }}{{ end -}}
{{- range $field, $its := $named -}}
{{- with get $its "path" | toString -}}
{{- if not (hasPrefix "/" .) -}}
{{- fail (printf "config.%s.path is %s, which only one of several pods would fetch; set it to a folder below storage.models.mountPath %s%s" $field . $models.mountPath (ternary (printf ", and modelDownload.source to %s" .) " on the claim" (eq $field "model"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.tls.enabled (not $values.redis.enabled) (hasPrefix "redis://" $values.externalRedis.url) -}}
{{- fail "tls.enabled is true; set externalRedis.url to a rediss:// one, whose certificate ca.crt in the Secret has signed" -}}
{{- end -}}
{{- if and $values.gateway.tls.enabled (not (or $values.gateway.tls.secretName $values.certManager.enabled)) -}}
{{- fail "gateway.tls.enabled is true; set gateway.tls.secretName to a Secret with tls.crt and tls.key, or certManager.enabled" -}}
{{- end -}}
{{- $size := 0 -}}
{{- range $values.files }}{{ $size = add $size (len .) }}{{ end -}}
{{- if gt $size 1000000 -}}
{{- fail (printf "files has %d bytes, and a ConfigMap takes 1 MB; put large ones on storage.data" $size) -}}
{{- end -}}
{{- range regexFindAll "/etc/penstock/files/[^\":]+" (toRawJson $values.config) -1 -}}
{{- if not (hasKey $values.files (trimPrefix "/etc/penstock/files/" .)) -}}
{{- fail (printf "config names %s, which files lacks; add --set-file 'files.%s=FILE'" . (base . | replace "." "\\.")) -}}
{{- end -}}
{{- end -}}
{{- $data := $values.storage.data -}}
{{- $stored := deepCopy $values.config -}}
{{- if dig "learner" "checkpoint" "upload" "" $stored }}{{ $_ := unset $stored.learner.checkpoint "upload" }}{{ end -}}
{{- with regexFind "\"(s3|gs|gcs|az|abfs)://[^\"]+\"" (toRawJson $stored) -}}
{{- fail (printf "config names %s, and datasets and functions are read from files; set storage.data.source to the folder of the object store, and name the files below %s" . $data.mountPath) -}}
{{- end -}}
{{- if and $data.source $data.existingClaim -}}
{{- fail "storage.data.source and storage.data.existingClaim are set; choose one: a source is downloaded into a volume of each pod" -}}
{{- end -}}
{{- if and $data.source (not (regexMatch "^[a-z0-9]+://" $data.source)) -}}
{{- fail (printf "storage.data.source is %s; set it to the URL of a folder such as s3://bucket/data" $data.source) -}}
{{- end -}}
{{- $egress := $values.networkPolicy.egress -}}
{{- if and $data.source $values.networkPolicy.enabled $egress.enabled (not (and $egress.to.rollout $egress.to.learner $egress.to.feed)) -}}
{{- fail "storage.data.source is set, and networkPolicy.egress stops the pods from downloading it; add rules to networkPolicy.egress.to.rollout, learner and feed" -}}
{{- end -}}
{{- if and (dig "learner" "checkpoint" "upload" "" $values.config) $values.networkPolicy.enabled $values.networkPolicy.egress.enabled (not $values.networkPolicy.egress.to.learner) -}}
{{- fail "config.learner.checkpoint.upload is set, and networkPolicy.egress stops the learner from connecting to it; add a rule to networkPolicy.egress.to.learner" -}}
{{- end -}}
{{- with $values.gateway -}}
{{- if and .tls.enabled .ingress.enabled .ingress.className (not (contains "nginx" .ingress.className)) (not .ingress.annotations) (not .service.annotations) -}}
{{- fail (printf "gateway.tls.enabled is true; set gateway.ingress.annotations or gateway.service.annotations to the one by which the controller of %s speaks HTTPS to the gateway" .ingress.className) -}}
{{- end -}}
{{- if and .tls.enabled .ingress.enabled (not (or .ingress.tlsSecretName $values.certManager.enabled .ingress.annotations)) -}}
{{- fail (printf "gateway.tls.enabled is true, and clients would reach the Ingress without TLS; set gateway.ingress.tlsSecretName to a Secret with the certificate of %s, or gateway.ingress.annotations to what makes its controller serve one" .ingress.host) -}}
{{- end -}}
{{- if and .tls.enabled .httpRoute.enabled (not .httpRoute.caConfigMap) (not (include "penstock.hasPublicCertificate" $)) -}}
{{- fail "gateway.tls.enabled is true; set gateway.httpRoute.caConfigMap to a ConfigMap with the ca.crt by which the Gateway checks the gateway's certificate" -}}
{{- end -}}
{{- end -}}
{{- if and $values.learner.gang.scheduler (not $values.learner.kuberay.enabled) -}}
{{- fail "learner.gang.scheduler is set and learner.kuberay.enabled is false: one pod needs no gang" -}}
{{- end -}}
{{- if and (eq $values.learner.gang.scheduler "kueue") (not $values.learner.gang.queue) -}}
{{- fail "learner.gang.scheduler is kueue; set learner.gang.queue to a LocalQueue" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.checkPools" -}}
{{- $names := dict -}}
{{- range include "penstock.pools" . | fromJsonArray -}}
{{- $where := ternary (printf "rollout.pools[%s]" .name) "rollout" (ne .name "") -}}
{{- if hasKey $names .name }}{{ fail (printf "rollout.pools: two pools are called %s" .name) }}{{ end -}}
{{- $_ := set $names .name true -}}
{{- $tensorParallel := .engine.tensor_parallel_size | default 1 | int -}}
{{- $pipelineParallel := dig "extra" "pipeline_parallel_size" 1 .engine | int -}}
{{- if and (gt (int .nodes) 1) (not .gpus) }}{{ fail (printf "%s.nodes is %v; set gpus to the GPUs of each node" $where .nodes) }}{{ end -}}
{{- if and .gpus (ne (mul .gpus .nodes | int) (mul $tensorParallel $pipelineParallel | int)) -}}
{{- fail (printf "%s.gpus is %v%s and the engine's tensor_parallel_size is %d%s; make them equal, or gpus 0 for CPU" $where .gpus (ternary (printf " on %v nodes" .nodes) "" (gt (int .nodes) 1)) $tensorParallel (ternary (printf " times pipeline_parallel_size %d" $pipelineParallel) "" (gt $pipelineParallel 1))) -}}
{{- end -}}
{{- if and (gt (int .nodes) 1) (ne (.engine.name | default "auto") "vllm") -}}
{{- fail (printf "%s.nodes is %v; only the engine vllm runs on several nodes" $where .nodes) -}}
{{- end -}}
{{- if and .autoscaling.enabled (not .autoscaling.prometheusUrl) -}}
{{- fail (printf "%s.autoscaling.enabled is true; set rollout.autoscaling.prometheusUrl, from which the queue's depth is read" $where) -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* include "penstock.bytes" "4Gi" */}}
{{- define "penstock.bytes" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := toString . -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (index $units (regexFind "[a-zA-Z]*$" $text)) | int64 -}}
{{- end -}}

{{- define "penstock.checkRedis" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.enabled -}}
{{- with dig "limits" "memory" "" $redis.resources -}}
{{- if ge (include "penstock.bytes" $redis.maxMemory | int64) (include "penstock.bytes" . | int64) -}}
{{- fail (printf "redis.maxMemory %s is not below the memory limit %v of redis.resources, so the node would kill Redis before it refuses data" $redis.maxMemory .) -}}
{{- end -}}
{{- end -}}
{{- $name := printf "%s-redis" (include "penstock.fullname" .) -}}
{{- $live := lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- if $live -}}
{{- $claim := first $live.spec.volumeClaimTemplates -}}
{{- $size := $claim.spec.resources.requests.storage -}}
{{- $again := printf "then remove the old StatefulSet without its pod (kubectl -n %s delete statefulset %s --cascade=orphan) and upgrade again" .Release.Namespace $name -}}
{{- if ne (include "penstock.bytes" $size) (include "penstock.bytes" $redis.storage.size) -}}
{{- fail (printf "redis.storage.size is %s and the release has %s: a StatefulSet cannot change it. Set the size of the claim yourself (kubectl -n %s patch pvc data-%s-0 -p '{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"%s\"}}}}'), %s" $redis.storage.size $size .Release.Namespace $name $redis.storage.size $again) -}}
{{- end -}}
{{- if ne ($live.spec.podManagementPolicy | default "OrderedReady") "Parallel" -}}
{{- fail (printf "the StatefulSet %s was made by an older chart and cannot be changed to podManagementPolicy Parallel: %s" $name (trimPrefix "then " $again)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.checkQueue" -}}
{{- $kueue := .Values.kueue -}}
{{- if and $kueue.priorityClass (not $kueue.queueName) }}{{ fail "kueue.priorityClass is set; set kueue.queueName to a LocalQueue" }}{{ end -}}
{{- if and $kueue.queueName .Values.learner.gang.scheduler -}}
{{- fail "kueue.queueName and learner.gang.scheduler are set; choose one: Kueue admits the RayCluster with the rest of the run" -}}
{{- end -}}
{{- if include "penstock.isWrapped" . -}}
{{- if .Values.gateway.autoscaling.enabled }}{{ fail "kueue.wholeRun admits a fixed number of pods; turn gateway.autoscaling off, or set kueue.wholeRun to false" }}{{ end -}}
{{- range include "penstock.pools" . | fromJsonArray -}}
{{- if .autoscaling.enabled }}{{ fail "kueue.wholeRun admits a fixed number of pods; turn rollout.autoscaling off, or set kueue.wholeRun to false" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
