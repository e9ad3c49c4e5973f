{{/* Not empty if gateways can mount the volume of the learner, to show trained samples: any node must be able to. */}}
{{- define "penstock.gatewayReadsRuns" -}}
{{- if eq .Values.storage.runs.accessMode "ReadWriteMany" }}yes{{ end -}}
{{- end -}}

{{/* The run's configuration: .Values.config plus what the chart decides. It holds no secret: keys and the password of
Redis are paths of mounted files. Each process gets its Redis user, and a rollout server its pod's address, as an argument. */}}
{{- define "penstock.config" -}}
{{- $decided := dict
  "run_dir" "/runs"
  "redis" (dict "url" (ternary (printf "%s://%s-redis:6379/0" (ternary "rediss" "redis" .Values.tls.enabled) (include "penstock.fullname" .)) .Values.externalRedis.url .Values.redis.enabled))
  "gateway" (dict "host" "0.0.0.0" "port" 8080 "grpc_port" 9090 "api_key_file" "/etc/penstock/keys/api-key")
  "rollout" (dict "port" 7070 "metrics_port" 9100)
  "dataset" (dict "metrics_host" "0.0.0.0" "metrics_port" 9100)
  "weights" (dict "cluster_key_file" "/etc/penstock/keys/cluster-key")
  "learner" (dict "ray_address" (ternary "auto" "" .Values.learner.kuberay.enabled) "metrics_host" "0.0.0.0" "metrics_port" 9100)
-}}
{{- if .Values.storage.cache.existingClaim -}}
{{- $_ := set $decided "cache_dir" .Values.storage.cache.mountPath -}}
{{- end -}}
{{- if include "penstock.hasRedisPassword" . -}}
{{- $_ := set $decided.redis "password_file" "/etc/penstock/redis/password" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $folder := "/etc/penstock/certificates" -}}
{{- $_ := set $decided "tls" (dict "ca_file" (printf "%s/ca.crt" $folder) "cert_file" (printf "%s/tls.crt" $folder) "key_file" (printf "%s/tls.key" $folder)) -}}
{{- end -}}
{{- if .Values.gateway.tls.enabled -}}
{{- $_ := set $decided.gateway "tls_cert_file" "/etc/penstock/tls/tls.crt" -}}
{{- $_ := set $decided.gateway "tls_key_file" "/etc/penstock/tls/tls.key" -}}
{{- end -}}
{{- if include "penstock.gatewayReadsRuns" . -}}
{{- $_ := set $decided.gateway "samples_dir" "/learner-runs" -}}
{{- end -}}
{{- if .Values.gateway.namedKeys -}}
{{- $_ := set $decided.gateway "keys_file" "/etc/penstock/keys/api-keys" -}}
{{- end -}}
{{- mustMergeOverwrite (deepCopy .Values.config) $decided | toYaml -}}
{{- end -}}

{{/* include "penstock.checksum" (list . "gateway"): digest of the parts of the configuration that the process reads, which
files/config-sections.yaml lists, and of `files`. Another part changes without a restart of the pod. */}}
{{- define "penstock.checksum" -}}
{{- $config := include "penstock.config" (first .) | fromYaml -}}
{{- $read := list -}}
{{- range index ((first .).Files.Get "files/config-sections.yaml" | fromYaml) (last .) -}}
{{- $value := $config -}}
{{- range splitList "." . }}{{ if kindIs "map" $value }}{{ $value = get $value . }}{{ end }}{{ end -}}
{{- $read = append $read $value -}}
{{- end -}}
{{- if ne (last .) "gateway" }}{{ with (first .).Values.files }}{{ $read = append $read . }}{{ end }}{{ end -}}
checksum/config: {{ $read | toJson | sha256sum }}
{{- end -}}
