"""Traces of frontends: where they send them, and what a collector learns of their pods."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names

_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
_COLLECTOR_PORT: Final = 4318
_PORTS: Final = {"http": 80, "https": 443}
"""By the scheme of a URL without a port."""


def arguments(defaults: Defaults) -> list[str]:
    """Flags of the command; those of the model come later, and so before these."""
    traces = defaults.models.traces
    if traces.endpoint is None:
        return []
    return ["--otlp-traces-endpoint", traces.endpoint, "--trace-sampling", f"{traces.sampling:g}"]


def variables(model: InferenceModel, defaults: Defaults) -> list[dict[str, Any]]:
    """Variables of the container, without one that the model sets itself."""
    own = {variable.name for variable in model.spec.frontend.env}
    if defaults.models.traces.endpoint is None or _RESOURCE in own:
        return []
    resource = {
        "k8s.namespace.name": model.metadata.namespace,
        "k8s.deployment.name": names.frontend(model.name),
        "k8s.pod.name": "$(MINISGL_POD_NAME)",
    }
    return [{"name": _RESOURCE, "value": ",".join(f"{name}={value}" for name, value in resource.items())}]


def ports(defaults: Defaults) -> list[int]:
    """Ports of the collector that a NetworkPolicy must allow. It sees the port of the pod behind a Service, which may
    be another one than the URL's: then most likely the usual one."""
    endpoint = defaults.models.traces.endpoint
    if endpoint is None:
        return []
    url = urlsplit(endpoint)
    return sorted({url.port or _PORTS[url.scheme], _COLLECTOR_PORT})
