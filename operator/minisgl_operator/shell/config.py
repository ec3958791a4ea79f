"""Configuration of the operator: flags, each with an environment variable. The flags need no optional dependency."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minisgl_operator.api.defaults import Defaults

_PREFIX: Final = "MINISGL_OPERATOR_"


@dataclass(frozen=True)
class Config:
    """Empty `watch_namespaces`: the whole cluster. Times are in seconds."""

    defaults: Defaults
    lease_name: str = "minisgl-operator"
    watch_namespaces: tuple[str, ...] = ()
    resync_seconds: float = 600.0
    probe_seconds: float = 3.0
    metrics_port: int = 8080
    kubeconfig: Path | None = None


def add_arguments(parser: argparse.ArgumentParser, variables: Mapping[str, str] = os.environ) -> None:
    """The flags of `run`. A flag wins over its variable: --engine-image over MINISGL_OPERATOR_ENGINE_IMAGE."""

    def add(flag: str, help: str, default: str | None = None, type: type = str) -> None:
        variable = _variable(flag)
        value = variables.get(variable) or default
        shown = f"{help} [{variable}]"
        parser.add_argument(flag, help=shown, default=value, type=type, required=value is None)

    add("--namespace", "namespace of the operator, which contains its Lease")
    add("--lease-name", "name of the Lease; operators with the same Lease form one leader election", Config.lease_name)
    add("--engine-image", "engine image of models that set none")
    add("--frontend-image", "image of frontends and fetch Jobs of models that set none")
    for image in ("engine", "frontend"):
        text = f"label kubernetes.io/arch of the nodes that can run --{image}-image, such as amd64 (default: any)"
        add(f"--{image}-architecture", text, "")
    add("--image-pull-policy", "pull policy of models that set none (default: that of Kubernetes)", "")
    add("--defaults", "other defaults of models, as JSON or YAML: the chart's values.yaml describes them", "{}")
    text = "label app.kubernetes.io/instance of the gateway's pods in the operator's namespace (default: no gateway)"
    add("--gateway", text, "")
    add("--resync-seconds", "seconds between full lists of all objects", "600", float)
    add("--probe-seconds", "seconds between status probes of a launcher or frontend", "3", float)
    add("--metrics-port", "port of /healthz, /readyz and /metrics", "8080", int)
    for flag, help in (
        ("--image-pull-secret", "Secret of a registry, for models that set none; repeatable (default: none)"),
        ("--watch-namespace", "manage models in this namespace only; repeatable (default: all)"),
    ):
        metavar = flag.rpartition("-")[2].upper()
        shown = f"{help} [{_variable(flag)}, comma-separated]"
        parser.add_argument(flag, action="append", metavar=metavar, help=shown)
    text = "kubeconfig file of the cluster (default: the pod's service account, or that of kubectl)"
    parser.add_argument("--kubeconfig", type=Path, help=text)


def parse(arguments: argparse.Namespace, variables: Mapping[str, str] = os.environ) -> Config:
    """The configuration that the flags and variables give.

    Raises:
        InvalidDefaults: --defaults has an unknown field or a wrong value.
    """
    from minisgl_operator.api.defaults import Defaults, ModelDefaults

    def names(flag: str, given: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in given or variables.get(_variable(flag), "").split(",") if name))

    return Config(
        defaults=Defaults(
            operator_namespace=arguments.namespace,
            engine_image=arguments.engine_image,
            frontend_image=arguments.frontend_image,
            image_pull_policy=arguments.image_pull_policy or None,
            image_pull_secrets=names("--image-pull-secret", arguments.image_pull_secret),
            engine_architecture=arguments.engine_architecture or None,
            frontend_architecture=arguments.frontend_architecture or None,
            gateway=arguments.gateway or None,
            models=ModelDefaults.read(arguments.defaults),
        ),
        lease_name=arguments.lease_name,
        watch_namespaces=names("--watch-namespace", arguments.watch_namespace),
        resync_seconds=arguments.resync_seconds,
        probe_seconds=arguments.probe_seconds,
        metrics_port=arguments.metrics_port,
        kubeconfig=arguments.kubeconfig,
    )


def _variable(flag: str) -> str:
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()
