{{/* What the operator may do. Each verb is used; a Secret cannot be read, and no role or binding can be made. */}}

{{/* Where models live: in the cluster, or in each watched namespace. */}}
{{- define "minisgl.rules" -}}
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels]
  verbs: [list, watch]
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels/status]
  verbs: [patch]
# Children block the deletion of their owner, the model, until they are gone: some clusters ask for this right.
- apiGroups: [serving.minisgl.io]
  resources: [inferencemodels/finalizers]
  verbs: [update]
# What goes with the model itself is deleted by Kubernetes, by its owner reference.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [statefulsets]
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
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Deleted is only a pod that does not end, on a node that is lost.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# Why a pod does not start is said in events only.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* In the operator's own namespace: which one of a release's operators works. */}}
{{- define "minisgl.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "minisgl.name" . | quote }}]
  verbs: [get, update]
{{- end -}}

{{/* Whom the roles are bound to. */}}
{{- define "minisgl.subject" -}}
- kind: ServiceAccount
  name: {{ include "minisgl.serviceAccountName" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}
