"""Defaults for models that set no image, pull policy or pull secrets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """Flags of the operator; operators of one version with equal flags render equal manifests.

    `operator_namespace`: namespace of the operator's pods, whose probes NetworkPolicies allow.
    `image_pull_policy`: None leaves the choice to the API server.
    `image_pull_secrets`: names of Secrets in the namespace of each model.
    """

    operator_namespace: str
    engine_image: str
    frontend_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
