"""The next applies and deletes, computed from the model and the facts. Pure."""
