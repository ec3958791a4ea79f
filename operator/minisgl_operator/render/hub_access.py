"""How fetch pods reach the Hub: address, token, certificates and proxies. What the model sets comes before defaults."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names

_DIRECTORY: Final = "/var/run/minisgl/ca"
_FILE: Final = "bundle.pem"


def endpoint(model: InferenceModel, defaults: Defaults) -> str | None:
    """The mirror; None: the Hub. A default one has no part in the cache's key: it has the files of the Hub."""
    hub = model.spec.model.source.hugging_face
    assert hub is not None
    return hub.endpoint or defaults.models.hub.endpoint


def may_use_any_port(model: InferenceModel, defaults: Defaults) -> bool:
    """True if the pod connects to a mirror or a proxy. A NetworkPolicy would need the port of the pod behind its
    Service; that of one in the cluster is unknown."""
    return endpoint(model, defaults) is not None or bool(_proxies(defaults))


def variables(model: InferenceModel, defaults: Defaults) -> list[dict[str, Any]]:
    """Variables of the container, without those that the model sets itself."""
    hub = defaults.models.hub
    found = [*_token(model, defaults)]
    own = {variable.name for variable in model.spec.fetch.env}
    plain = dict(_proxies(defaults))
    if hub.ca_config_map is not None:
        plain["SSL_CERT_FILE"] = f"{_DIRECTORY}/{_FILE}"
    return found + [{"name": name, "value": value} for name, value in plain.items() if name not in own]


def volumes(defaults: Defaults) -> list[dict[str, Any]]:
    """The volume with the bundle of certificates, if there is one; it is mounted at `mounts`."""
    reference = defaults.models.hub.ca_config_map
    if reference is None:
        return []
    items = [{"key": reference.key, "path": _FILE}]
    return [{"name": names.CA_VOLUME, "configMap": {"name": reference.name, "items": items}}]


def mounts(defaults: Defaults) -> list[dict[str, Any]]:
    return [{"name": each["name"], "mountPath": _DIRECTORY, "readOnly": True} for each in volumes(defaults)]


def _token(model: InferenceModel, defaults: Defaults) -> list[dict[str, Any]]:
    hub = model.spec.model.source.hugging_face
    assert hub is not None
    own, default = hub.token_secret_ref, defaults.models.hub.token_secret
    secret = own or default
    if secret is None:
        return []
    reference: dict[str, Any] = {"name": secret.name, "key": secret.key}
    if own is None:
        # Most models need no token, and not every namespace has the Secret.
        reference["optional"] = True
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]


def _proxies(defaults: Defaults) -> dict[str, str]:
    proxy = defaults.models.proxy
    found = {"HTTP_PROXY": proxy.http, "HTTPS_PROXY": proxy.https, "NO_PROXY": proxy.no_proxy}
    return {name: value for name, value in found.items() if value} if proxy.http or proxy.https else {}
