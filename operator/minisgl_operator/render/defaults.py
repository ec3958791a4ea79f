"""Defaults for models that set no image, pull policy or pull secrets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """The same for all models, from the operator's own flags; two operators of one version render alike.

    `operator_namespace` is where the operator's pods run: NetworkPolicies let them in to ask for the status.
    `image_pull_policy` is what pods get whose spec names none; None leaves the choice to the API server.
    `image_pull_secrets` are names of Secrets in a model's own namespace, for pods whose spec names none.
    """

    operator_namespace: str
    engine_image: str
    frontend_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
