{{/* Permissions of the operator. Each verb is used; it can neither read Secrets nor create roles or bindings. */}}

{{/* Permissions for models: in the whole cluster, or in each watched namespace. */}}
{{- define "minisgl.rules" -}}
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels]
  verbs: [list, watch]
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels/status]
  verbs: [patch]
# Children block the deletion of their owner, the model: some clusters require this permission for it.
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels/finalizers]
  verbs: [update]
# Children of a deleted model are deleted by Kubernetes, through their owner reference.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [controllerrevisions, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# While a model has no frontends, its Service leads to the gateway.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.gateway.enabled }}
# OpenShift requires it for addresses of pods, which are those of the gateway.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices/restricted]
  verbs: [create]
{{- end }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Routes of models, where the cluster has the Gateway API.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Tokens by which the pods of a model know one another. They can be written, and not be read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, update]
# Deleted are pods on lost nodes, which do not terminate, and those of a failed replica for its next attempt.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
{{- if .Values.rollouts.dryRun }}
# Only in dry runs, which create nothing: whether admission accepts the pods of a new revision.
- apiGroups: [""]
  resources: [pods]
  verbs: [create]
{{- end }}
# Only Events explain why a pod does not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* Permissions in the whole cluster, also where only some namespaces are watched: which nodes are lost. */}}
{{- define "minisgl.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
{{- end -}}

{{/* Permissions in the operator's namespace: the Lease of the leader election, and the pods of the gateway. */}}
{{- define "minisgl.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "minisgl.name" . | quote }}]
  verbs: [get, update]
{{- if .Values.gateway.enabled }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
{{- end }}
{{- end -}}

{{/* Subjects of the role bindings. */}}
{{- define "minisgl.subject" -}}
- kind: ServiceAccount
  name: {{ include "minisgl.serviceAccountName" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}
