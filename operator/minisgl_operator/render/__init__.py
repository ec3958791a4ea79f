"""Manifests of a model's children. Pure: the same model and defaults give the same bytes."""

from minisgl_operator.render.children import render, revision, wanted_replicas

__all__ = ["render", "revision", "wanted_replicas"]
