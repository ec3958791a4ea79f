"""Manifests of a model's children. Pure: the same model and defaults give the same bytes."""

from minisgl_operator.render.children import initial_replicas, render, revision

__all__ = ["initial_replicas", "render", "revision"]
