{{/* Refuses values that the chart does not have, and names the nearest one. The schema checks the types of those that it has. */}}

{{/* include "penstock.pairs" "word": its pairs of letters as JSON, with its ends: [" w","wo","or","rd","d "]. */}}
{{- define "penstock.pairs" -}}
{{- $word := printf " %s " (lower . | replace "_" "") -}}
{{- $pairs := list -}}
{{- range $at := until (sub (len $word) 1 | int) }}{{ $pairs = append $pairs (substr $at (add $at 2 | int) $word) }}{{ end -}}
{{- $pairs | toJson -}}
{{- end -}}

{{/* include "penstock.nearest" (list "replica" (list "replicas" "pools")): the word that shares most pairs of letters with the first
one; empty if none shares half of them. */}}
{{- define "penstock.nearest" -}}
{{- $mine := include "penstock.pairs" (first .) | fromJsonArray -}}
{{- $best := 49 -}}{{- $found := "" -}}
{{- range $word := last . -}}
{{- $shared := 0 -}}
{{- $pairs := include "penstock.pairs" $word | fromJsonArray -}}
{{- range $mine }}{{ if has . $pairs }}{{ $shared = add1 $shared }}{{ end }}{{ end -}}
{{- $share := div (mul 200 $shared) (add (len $mine) (len $pairs)) | int -}}
{{- if gt $share $best }}{{ $best = $share }}{{ $found = $word }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* include "penstock.unknown" (dict "values" VALUES "known" KEYS "path" "rollout."): a line for each value that is not known. KEYS are
those of files/known-values.json. */}}
{{- define "penstock.unknown" -}}
{{- $known := .known -}}
{{- $path := .path -}}
{{- range $key, $value := .values -}}
{{- $name := printf "%s%s" $path $key -}}
{{- $inner := get $known (ternary $key "*" (hasKey $known $key)) -}}
{{- if and (not (hasKey $known $key)) (not (hasKey $known "*")) -}}
{{- $others := list -}}
{{- range $other, $its := $known }}{{ if not (kindIs "string" $its) }}{{ $others = append $others $other }}{{ end }}{{ end -}}
{{- with include "penstock.nearest" (list $key $others) }}
{{ $name }} is not a value of the chart; did you mean {{ $path }}{{ . }}?
{{- else }}
{{ $name }} is not a value of the chart; {{ trimSuffix "." $path | default "it" }} has {{ join ", " $others }}
{{- end -}}
{{- else if kindIs "string" $inner }}
{{ $name }} is {{ $inner }}; remove it
{{- else if and (kindIs "map" $inner) (kindIs "map" $value) -}}
{{- include "penstock.unknown" (dict "values" $value "known" $inner "path" (printf "%s." $name)) -}}
{{- else if and (kindIs "map" $inner) (kindIs "slice" $value) -}}
{{- range $at, $item := $value -}}
{{- if kindIs "map" $item }}{{ include "penstock.unknown" (dict "values" $item "known" (get $inner "[]") "path" (printf "%s[%d]." $name $at)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
