"""API keys and the tenants that they belong to: what a key file and a Secret contain. Pure."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final, TypeVar

import msgspec
import yaml
from msgspec import Meta

from minisgl.frontend.server.auth import KeyFileError, key_digest
from minisgl.gateway.models import Model

T = TypeVar("T")

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._@|:-]{0,98}[A-Za-z0-9])?\Z")]
"""Providers write `auth0|1234` and `system:serviceaccount:team:app` into tokens."""
_Rate = Annotated[int, Meta(ge=1, le=10**12)]

_UNKNOWN_FIELD: Final = re.compile(r"unknown field `.*?`( - at `\$\.tenants\[\d+\]`)?\Z", re.DOTALL)
"""In an error of msgspec, perhaps with its place."""

KEY_LABEL: Final = "serving.minisgl.io/gateway-key"
"""Label of Secrets with API keys, whose value is `true`."""
_KEYS_IN_SECRETS: Final = ("key", "keys")
_TENANT_IN_SECRETS: Final = "tenant"


class Tenant(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Who may use what. Limits count all keys of a tenant together."""

    name: _Name
    models: tuple[str, ...] = ()
    """Models that it may use, as served names, `NAMESPACE/NAME`, or patterns such as `team-a/*`; empty: all. In a
    cluster those with a slash are for `NAMESPACE/NAME` only."""
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    """Tokens of prompts and answers."""
    max_concurrent: _Rate | None = None
    """Requests in progress."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Priority of its requests, which the field `priority` of a body can only lower."""

    def allows(self, model: Model) -> bool:
        """Return whether it may use a model."""
        return not self.models or any(_matches(pattern, model) for pattern in self.models)


class _TenantWithKeys(Tenant, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    keys: tuple[str, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: Annotated[tuple[_TenantWithKeys, ...], Meta(min_length=1)]


class KeyTable:
    """Tenants by the hashes of their keys, and by their names. Keys themselves are not kept."""

    def __init__(self, tenants: Iterable[tuple[Tenant, Iterable[bytes]]] = ()) -> None:
        """`tenants`: each with the digests of its keys."""
        found = list(tenants)
        self._tenants = {digest: (digest, tenant) for tenant, digests in found for digest in digests}
        self._named = {tenant.name: tenant for tenant, _ in found}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, key: str) -> Tenant | None:
        """Return the tenant of a key; None: there is no such key. The search depends on the hash of the given key only,
        so its time reveals nothing about any other key."""
        given = key_digest(key)
        found = self._tenants.get(given)
        return found[1] if found is not None and hmac.compare_digest(found[0], given) else None

    def named(self, name: str) -> Tenant | None:
        """Return the tenant that an access token names; None: there is no such tenant."""
        return self._named.get(name)


def read_file(text: str, name: str, *, by_tokens: bool = False) -> KeyTable:
    """Return the keys of a file. `by_tokens`: tenants may also come with access tokens, and need no key. Raises
    KeyFileError, whose message never contains a key."""
    found = _convert(_load(text, name), _File, name)
    tenants = []
    for each in found.tenants:
        if not each.keys and not by_tokens:
            raise KeyFileError(f"{name}: tenant {each.name!r} has no keys; only with --oidc-issuer it needs none")
        if not all(key == key.strip() != "" for key in each.keys):
            raise KeyFileError(f"{name}: tenant {each.name!r} has a key that is empty or has blanks at its ends")
        tenants.append((_without_keys(each), [key_digest(key) for key in each.keys]))
    names = [tenant.name for tenant, _ in tenants]
    for repeated in {each for each in names if names.count(each) > 1}:
        raise KeyFileError(f"{name}: tenant {repeated!r} is there twice; give it one entry with all its keys")
    for owners in shared_keys(tenants).values():
        raise KeyFileError(f"{name}: tenants {', '.join(map(repr, owners))} have the same key; a key has one tenant")
    return KeyTable(tenants)


def shared_keys(tenants: Iterable[tuple[Tenant, Iterable[bytes]]]) -> dict[bytes, list[str]]:
    """Return the digests of keys that several tenants have, with the names of these."""
    owners: dict[bytes, set[str]] = {}
    for tenant, digests in tenants:
        for digest in digests:
            owners.setdefault(digest, set()).add(tenant.name)
    return {digest: sorted(names) for digest, names in owners.items() if len(names) > 1}


def read_secret(name: str, data: Mapping[str, bytes], *, by_tokens: bool = False) -> tuple[Tenant, list[bytes]]:
    """Return the tenant of a Secret, and the digests of its keys: one on each line of `key` or `keys`. `tenant` may
    contain its fields as YAML or JSON; its name is that of the Secret, unless that says otherwise. `by_tokens`: it may
    come with access tokens, and needs no key. Raises KeyFileError, whose message never contains a key."""
    shown = f"Secret {name}"
    try:
        lines = [line.strip() for field in _KEYS_IN_SECRETS for line in data.get(field, b"").decode().splitlines()]
        document = data.get(_TENANT_IN_SECRETS, b"").decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"{shown} is not UTF-8 text") from None
    digests = [key_digest(line) for line in lines if line and not line.startswith("#")]
    if not digests and not by_tokens:
        raise KeyFileError(f"{shown} has no key; write one per line into its field `key`")
    return _convert({"name": name} | _fields(document, shown), Tenant, shown), digests


def _matches(pattern: str, model: Model) -> bool:
    """Return whether a pattern is for a model. In a cluster one with a slash is for qualified names only: a namespace
    chooses the served names of its own models, which may look like qualified names of another."""
    is_qualified = "/" in pattern and bool(model.key.namespace)
    names = (str(model.key),) if is_qualified else (*model.names, str(model.key))
    return any(fnmatchcase(name, pattern) for name in names)


def _without_keys(each: _TenantWithKeys) -> Tenant:
    return Tenant(**{field: getattr(each, field) for field in Tenant.__struct_fields__})


def _fields(document: str, shown: str) -> dict[str, object]:
    fields = _load(document, shown)
    if fields is None:
        return {}
    if not isinstance(fields, dict) or "keys" in fields:
        raise KeyFileError(f"{shown}: `tenant` must be an object with the fields of a tenant, without keys")
    return fields


def _load(document: str, shown: str) -> object:
    try:
        return yaml.safe_load(document)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        # The text of the error quotes the document.
        raise KeyFileError(f"{shown} is not valid YAML{where}") from None


def _convert(value: object, kind: type[T], shown: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # The name of an unknown field may be a key, as where a colon follows one.
        message = _UNKNOWN_FIELD.sub(r"unknown field\1", str(error))
        raise KeyFileError(f"{shown}: {message}") from None
