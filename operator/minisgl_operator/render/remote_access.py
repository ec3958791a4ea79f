"""How fetch pods reach the Hub or a bucket: address, credentials, certificates and proxies. What the model sets comes
before defaults."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.defaults import Defaults, S3Defaults
from minisgl_operator.api.types import HuggingFaceSource, InferenceModel, S3Source
from minisgl_operator.render import names

_DIRECTORY: Final = "/var/run/minisgl/ca"
_FILE: Final = "bundle.pem"
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Variables of credentials, and keys of their Secret."""
_SESSION: Final = "AWS_SESSION_TOKEN"


def arguments(model: InferenceModel, directory: str, defaults: Defaults) -> list[str]:
    """Arguments of `minisgl models fetch`."""
    source = model.spec.model.source
    if source.s3 is not None:
        found = [source.s3.uri, directory]
    else:
        assert source.hugging_face is not None
        found = [source.hugging_face.repo, directory, "--revision", source.hugging_face.revision]
    address = _endpoint(model, defaults)
    return found if address is None else [*found, "--endpoint", address]


def may_use_any_port(model: InferenceModel, defaults: Defaults) -> bool:
    """True if the pod connects to a mirror, a store or a proxy. A NetworkPolicy would need the port of the pod behind
    its Service; that of one in the cluster is unknown."""
    return _endpoint(model, defaults) is not None or bool(_proxies(defaults))


def may_use_pod_identity(model: InferenceModel) -> bool:
    """True if the credentials may be those that an agent on the node has for the pod's account. The default Secret may
    be missing in the model's namespace."""
    s3 = model.spec.model.source.s3
    return s3 is not None and s3.secret_name is None


def variables(model: InferenceModel, defaults: Defaults) -> list[dict[str, Any]]:
    """Variables of the container, without those that the model sets itself."""
    source = model.spec.model.source
    plain = _proxies(defaults)
    bundle = None if defaults.models.hub.ca_config_map is None else f"{_DIRECTORY}/{_FILE}"
    if source.s3 is not None:
        store = _store(source.s3, defaults)
        found = _credentials(source.s3, store)
        plain |= {"AWS_CA_BUNDLE": bundle or "", "AWS_DEFAULT_REGION": source.s3.region or store.region or ""}
        # The role of the node is not the model's, also where no NetworkPolicy keeps the pod from it.
        plain |= {"AWS_EC2_METADATA_DISABLED": "true"}
    else:
        assert source.hugging_face is not None
        found = _token(source.hugging_face, defaults)
        plain |= {"SSL_CERT_FILE": bundle or ""}
    own = {variable.name for variable in model.spec.fetch.env}
    found += [{"name": name, "value": value} for name, value in plain.items() if value]
    return [variable for variable in found if variable["name"] not in own]


def volumes(defaults: Defaults) -> list[dict[str, Any]]:
    """The volume with the bundle of certificates, if there is one; it is mounted at `mounts`."""
    reference = defaults.models.hub.ca_config_map
    if reference is None:
        return []
    items = [{"key": reference.key, "path": _FILE}]
    return [{"name": names.CA_VOLUME, "configMap": {"name": reference.name, "items": items}}]


def mounts(defaults: Defaults) -> list[dict[str, Any]]:
    return [{"name": each["name"], "mountPath": _DIRECTORY, "readOnly": True} for each in volumes(defaults)]


def _endpoint(model: InferenceModel, defaults: Defaults) -> str | None:
    """URL of a mirror or of a store; None: the Hub, or Amazon S3. A default one has no part in the cache's key: the
    mirror has the files of the Hub, and the store those of all models."""
    source = model.spec.model.source
    if source.s3 is not None:
        return source.s3.endpoint or defaults.models.s3.endpoint
    assert source.hugging_face is not None
    return source.hugging_face.endpoint or defaults.models.hub.endpoint


def _store(s3: S3Source, defaults: Defaults) -> S3Defaults:
    """The default store; one without settings for a model that names another store, which must not get its
    credentials."""
    return defaults.models.s3 if s3.endpoint is None else S3Defaults()


def _secret(s3: S3Source, store: S3Defaults) -> str | None:
    return s3.secret_name or store.secret_name


def _credentials(s3: S3Source, store: S3Defaults) -> list[dict[str, Any]]:
    secret = _secret(s3, store)
    if secret is None:
        return []
    found = []
    for name in (*_KEYS, _SESSION):
        reference: dict[str, Any] = {"name": secret, "key": name}
        # Not every namespace has the default Secret; its accounts may have access by the cloud.
        if name == _SESSION or s3.secret_name is None:
            reference["optional"] = True
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _token(hub: HuggingFaceSource, defaults: Defaults) -> list[dict[str, Any]]:
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
