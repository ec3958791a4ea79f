"""The InferenceModel API. Its types are the single source of the CustomResourceDefinition and of the reference page."""
