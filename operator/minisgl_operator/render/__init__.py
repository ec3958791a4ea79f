"""The children of a model, as manifests. Pure: the same model and environment give the same bytes."""

from minisgl_operator.render.children import render, revision, wanted_replicas

__all__ = ["render", "revision", "wanted_replicas"]
