"""The InferenceModel API: the types here are the one source of the CustomResourceDefinition and of its reference."""
