"""Defaults for fields that models do not set."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl_operator.api.defaults import ModelDefaults


@dataclass(frozen=True)
class Defaults:
    """Flags of the operator; operators of one version with equal flags render equal manifests.

    `operator_namespace`: namespace of the operator's pods, whose probes NetworkPolicies allow.
    `image_pull_policy`: None leaves the choice to the API server.
    `image_pull_secrets`: names of Secrets in the namespace of each model.
    `engine_architecture`, `frontend_architecture`: label kubernetes.io/arch of nodes that can run the image; None: any.
    `models`: defaults for the other fields.
    """

    operator_namespace: str
    engine_image: str
    frontend_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    engine_architecture: str | None = None
    frontend_architecture: str | None = None
    models: ModelDefaults = field(default_factory=ModelDefaults)
