{{/* Names and labels. At most 32 characters, because KubeRay appends to them. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 32 | trimSuffix "-" -}}
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

{{/* include "penstock.image" (list . "services") */}}
{{- define "penstock.image" -}}
{{- $root := first . -}}
{{- $image := index $root.Values.images (last .) -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{/* include "penstock.peer" (list . "label: value"): a NetworkPolicy peer. */}}
{{- define "penstock.peer" -}}
- podSelector:
    matchLabels: {{- include "penstock.selector" (first .) | nindent 6 }}
      {{ last . }}
{{- end -}}
