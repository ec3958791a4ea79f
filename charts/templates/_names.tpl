{{/* Names and labels of the release's objects. */}}

{{- define "minisgl.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "minisgl-operator" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else if contains "minisgl" .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 40 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-minisgl-operator" (.Release.Name | trunc 32 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "minisgl.name" .) -}}
{{- end -}}

{{/* What selects the operator's pods. The NetworkPolicies of models let pods with this name label in. */}}
{{- define "minisgl.selector" -}}
app.kubernetes.io/name: minisgl-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "minisgl.labels" -}}
{{ include "minisgl.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: minisgl
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The reference of an image: (list context image). */}}
{{- define "minisgl.image" -}}
{{- $context := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $context.Values.imageRegistry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $context.Chart.AppVersion }}{{ end -}}
{{- end -}}
