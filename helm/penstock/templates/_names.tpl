{{/* Names, labels and images. */}}

{{/* include "penstock.bounded" (list "a name" 32): the name, with a hash instead of its end where it is longer. */}}
{{- define "penstock.bounded" -}}
{{- $name := first . -}}
{{- $most := last . | int -}}
{{- if gt (len $name) $most -}}
{{- printf "%s-%s" ($name | trunc (int (sub $most 9)) | trimSuffix "-") ($name | sha256sum | trunc 8) -}}
{{- else -}}
{{- $name | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* At most 32 characters, because KubeRay appends to the name. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "penstock.bounded" (list .Values.fullnameOverride 32) -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- include "penstock.bounded" (list (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) 32) -}}
{{- end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* include "penstock.image" (list . "services"), or with an image of values in place of a name: images.registry goes before
the repository, except for Redis, and a digest replaces the tag. */}}
{{- define "penstock.image" -}}
{{- $root := first . -}}
{{- $image := last . -}}
{{- $own := true -}}
{{- if kindIs "string" $image -}}{{- $own = ne $image "redis" -}}{{- $image = index $root.Values.images $image -}}{{- end -}}
{{- if and $own $root.Values.images.registry }}{{ trimSuffix "/" $root.Values.images.registry }}/{{ end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The account of every pod that names no other. */}}
{{- define "penstock.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "penstock.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* include "penstock.peer" (list . "label: value"): a NetworkPolicy peer. */}}
{{- define "penstock.peer" -}}
- podSelector:
    matchLabels: {{- include "penstock.selector" (first .) | nindent 6 }}
      {{ last . }}
{{- end -}}
