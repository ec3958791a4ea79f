{{/* Permissions of the gateway. It writes nothing. */}}

{{- define "minisgl.gatewayRules" -}}
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels]
  verbs: [list, watch]
{{- end -}}

{{/* Frontends that the endpoint picker leads Gateways to: an InferencePool has its pods and its picker in its namespace. */}}
{{- define "minisgl.gatewayPickerRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end -}}

{{/* Secrets with keys have the label serving.minisgl.io/gateway-key. RBAC cannot select by labels, so this covers all
     Secrets of the namespace: install the release in one of its own. */}}
{{- define "minisgl.gatewayKeyRules" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [list, watch]
{{- end -}}

{{- define "minisgl.gatewaySubject" -}}
- kind: ServiceAccount
  name: {{ include "minisgl.gatewayName" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}
