"""The Kubernetes operator: one InferenceModel becomes a serving endpoint."""
