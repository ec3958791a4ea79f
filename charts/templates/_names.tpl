{{/* Names and labels of the release's objects. All are quoted, as a name such as 7 or on would not be a string. */}}

{{- define "minisgl.name" -}}
{{- /* The name of a release may contain dots or begin with a digit, unlike that of a Service. */ -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $release -}}
{{- $release = printf "release-%s" $release -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "minisgl-operator" $release -}}
{{- $release | trunc 50 | trimSuffix "-" -}}
{{- else if contains "minisgl" $release -}}
{{- printf "%s-operator" ($release | trunc 40 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-minisgl-operator" ($release | trunc 32 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "minisgl.metricsService" -}}
{{- include "minisgl.name" . }}-metrics
{{- end -}}

{{- define "minisgl.gatewayName" -}}
{{- include "minisgl.name" . | trimSuffix "-operator" }}-gateway
{{- end -}}

{{- define "minisgl.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "minisgl.name" .) -}}
{{- end -}}

{{/* Name of a ClusterRole: (list context suffix). Releases of one name in several namespaces have one each. */}}
{{- define "minisgl.clusterRoleName" -}}
{{- $context := index . 0 -}}
{{- include "minisgl.name" $context }}-{{ index . 1 }}
{{- with $context.Values.watchNamespaces }}-{{ $context.Release.Namespace }}{{ end }}
{{- end -}}

{{/* Selector of the operator's pods. NetworkPolicies of models allow pods with this name label. */}}
{{- define "minisgl.selector" -}}
app.kubernetes.io/name: minisgl-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Selector of the gateway's pods. NetworkPolicies of models allow pods with this name label. */}}
{{- define "minisgl.gatewaySelector" -}}
app.kubernetes.io/name: minisgl-gateway
app.kubernetes.io/component: gateway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "minisgl.labels" -}}
{{- include "minisgl.labelsWith" (list . dict) -}}
{{- end -}}

{{/* Labels of an object: (list context labels). Each label occurs once: the user's may
     override all except those of the selector. */}}
{{- define "minisgl.labelsWith" -}}
{{- $context := index . 0 -}}
{{- include "minisgl.labelsOf" (list $context "operator" (include "minisgl.selector" $context) (index . 1)) -}}
{{- end -}}

{{/* Labels of an object of the gateway: (list context labels). */}}
{{- define "minisgl.gatewayLabels" -}}
{{- $context := index . 0 -}}
{{- include "minisgl.labelsOf" (list $context "gateway" (include "minisgl.gatewaySelector" $context) (index . 1)) -}}
{{- end -}}

{{/* (list context component selector labels) */}}
{{- define "minisgl.labelsOf" -}}
{{- $context := index . 0 -}}
{{- $own := dict
      "app.kubernetes.io/component" (index . 1)
      "app.kubernetes.io/part-of" "minisgl"
      "app.kubernetes.io/version" $context.Chart.AppVersion
      "app.kubernetes.io/managed-by" $context.Release.Service
      "helm.sh/chart" (printf "%s-%s" $context.Chart.Name $context.Chart.Version | replace "+" "_") -}}
{{- $selecting := index . 2 | fromYaml -}}
{{- toYaml (merge $selecting (index . 3 | default dict) ($context.Values.commonLabels | default dict) $own) -}}
{{- end -}}

{{/* Selector of the namespaces with models, and of others: (list context others). */}}
{{- define "minisgl.modelNamespaces" -}}
{{- with (index . 0).Values.watchNamespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values:
      {{- range concat . (index $ 1) | uniq }}
      - {{ . | quote }}
      {{- end }}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* Reference of an image: (list context image). */}}
{{- define "minisgl.image" -}}
{{- $context := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $context.Values.imageRegistry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $context.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* Pull secrets of pods of the release that run the frontend's image. */}}
{{- define "minisgl.frontendPullSecrets" -}}
{{- with .Values.defaults.imagePullSecrets | default .Values.operator.imagePullSecrets -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Labels of the nodes that a pod may use: (list image selector). */}}
{{- define "minisgl.nodeSelector" -}}
{{- $labels := dict -}}
{{- with (index . 0).architecture -}}
{{- $_ := set $labels "kubernetes.io/arch" . -}}
{{- end -}}
{{- with merge (dict) (index . 1) $labels -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* User and groups of a pod. OpenShift's restricted-v2 rejects fixed ones. */}}
{{- define "minisgl.identity" -}}
{{- if eq .Values.defaults.podIdentity "Fixed" -}}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end -}}
{{- end -}}

{{/* Defaults of models as JSON without empty ones, for an argument: Kubernetes would replace $(NAME) in it. */}}
{{- define "minisgl.defaults" -}}
{{- $defaults := dict -}}
{{- if ne .Values.defaults.podIdentity "Fixed" -}}
{{- $_ := set $defaults "podIdentity" .Values.defaults.podIdentity -}}
{{- end -}}
{{- with .Values.defaults.storageClassName -}}
{{- $_ := set $defaults "storageClassName" . -}}
{{- end -}}
{{- range $section := list "hub" "s3" "proxy" "networkPolicy" "route" -}}
{{- $fields := dict -}}
{{- range $field, $value := get $.Values.defaults $section -}}
{{- /* A Secret or ConfigMap without a name is none. */ -}}
{{- if and $value (or (not (kindIs "map" $value)) $value.name) -}}
{{- $_ := set $fields $field $value -}}
{{- end -}}
{{- end -}}
{{- with $fields -}}
{{- $_ := set $defaults $section . -}}
{{- end -}}
{{- end -}}
{{- /* A sampling of 0 is a value. */ -}}
{{- if .Values.defaults.traces.endpoint -}}
{{- $_ := set $defaults "traces" .Values.defaults.traces -}}
{{- end -}}
{{- $rollout := dict -}}
{{- range $field := list "waves" "maxModels" -}}
{{- with get $.Values.defaults.rollout $field -}}
{{- $_ := set $rollout $field . -}}
{{- end -}}
{{- end -}}
{{- with .Values.defaults.rollout.window -}}
{{- if or .days (ne (int .startHour) 0) (ne (int .endHour) 24) -}}
{{- $window := dict "startHour" .startHour "endHour" .endHour -}}
{{- with .days -}}
{{- $_ := set $window "days" . -}}
{{- end -}}
{{- $_ := set $rollout "window" $window -}}
{{- end -}}
{{- end -}}
{{- with $rollout -}}
{{- $_ := set $defaults "rollout" . -}}
{{- end -}}
{{- range $component := list "engine" "frontend" "fetch" -}}
{{- $fields := dict -}}
{{- range $field, $value := get $.Values.defaults $component -}}
{{- if eq $field "resources" -}}
{{- $resources := dict -}}
{{- range $kind, $quantities := $value -}}
{{- with $quantities -}}
{{- $_ := set $resources $kind . -}}
{{- end -}}
{{- end -}}
{{- $value = $resources -}}
{{- end -}}
{{- /* Of this one the default is 1, and 0 is a value. */ -}}
{{- if or (and (ne $field "minReplicas") $value) (and (eq $field "minReplicas") (eq (int $value) 0)) -}}
{{- $_ := set $fields $field $value -}}
{{- end -}}
{{- end -}}
{{- with $fields -}}
{{- $_ := set $defaults $component . -}}
{{- end -}}
{{- end -}}
{{- with $defaults -}}
{{- toJson . | replace "$" "$$" -}}
{{- end -}}
{{- end -}}

{{- /* Port of an http or https URL. */}}
{{- define "minisgl.urlPort" -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $port | default (ternary 443 80 (eq $url.scheme "https")) -}}
{{- end }}
