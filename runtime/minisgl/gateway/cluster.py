"""The sources of a gateway in a cluster: InferenceModels, and Secrets with API keys."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from minisgl.frontend.server.auth import KeyFileError
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.directory import Directory
from minisgl.gateway.keys import KEY_LABEL, KeyTable, Tenant, read_secret, shared_keys
from minisgl.gateway.models import InferenceModel, Key, Metadata, model_of
from minisgl.gateway.upstream import Client
from minisgl.gateway.watch import Watch

logger = logging.getLogger(__name__)

_API: Final = "/apis/serving.minisgl.io/v1alpha1"
_RESOURCE: Final = "inferencemodels"


class ClusterModels:
    """Source of the InferenceModels of some namespaces, or of all."""

    def __init__(self, client: Client, access: ClusterAccess, namespaces: Sequence[str], directory: Directory) -> None:
        """`namespaces`: empty for all."""
        self._directory = directory
        self._unlisted = set(namespaces or ("",))
        self._watches = [self._watch(client, access, namespace) for namespace in sorted(self._unlisted)]

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches:
                tasks.create_task(watch.run())

    def _watch(self, client: Client, access: ClusterAccess, namespace: str) -> Watch[InferenceModel]:
        path = f"{_API}/namespaces/{namespace}/{_RESOURCE}" if namespace else f"{_API}/{_RESOURCE}"

        def replace(found: list[InferenceModel]) -> None:
            models = [model_of(each) for each in found]
            self._directory.replace(models, lambda key: not namespace or key.namespace == namespace)
            self._unlisted.discard(namespace)
            if not self._unlisted:
                self._directory.problem = ""

        return Watch(
            client,
            access,
            path,
            InferenceModel,
            replace=replace,
            put=lambda found: self._directory.put(model_of(found)),
            remove=lambda metadata: self._directory.remove(Key(metadata.namespace, metadata.name)),
        )


class Secret(msgspec.Struct):
    """A Secret, as far as the gateway needs it."""

    metadata: Metadata
    data: dict[str, str] = {}


class SecretKeys:
    """Keys of the Secrets in the gateway's namespace that have the label. One that cannot be used is left out."""

    def __init__(self, client: Client, access: ClusterAccess, *, by_tokens: bool = False) -> None:
        """`by_tokens`: tenants may also come with access tokens."""
        self._by_tokens = by_tokens
        self._found: dict[str, tuple[Tenant, list[bytes]]] = {}
        """By name of the Secret."""
        self._table = KeyTable()
        self.is_listed = False
        """The Secrets have been read once."""
        self._watch = Watch(
            client,
            access,
            f"/api/v1/namespaces/{access.namespace}/secrets",
            Secret,
            replace=self._replace,
            put=self._put,
            remove=self._remove,
            selector=f"{KEY_LABEL}=true",
        )

    def table(self) -> KeyTable:
        return self._table

    async def run(self) -> None:
        """Run until cancelled."""
        await self._watch.run()

    def _replace(self, secrets: list[Secret]) -> None:
        self._found.clear()
        for secret in secrets:
            self._take(secret)
        self.is_listed = True
        self._index()
        logger.info("read %d keys from %d Secrets", len(self._table), len(self._found))

    def _put(self, secret: Secret) -> None:
        self._take(secret)
        self._index()

    def _remove(self, metadata: Metadata) -> None:
        self._found.pop(metadata.name, None)
        self._index()

    def _take(self, secret: Secret) -> None:
        name = secret.metadata.name
        self._found.pop(name, None)
        try:
            data = {field: base64.b64decode(value) for field, value in secret.data.items()}
            self._found[name] = read_secret(name, data, by_tokens=self._by_tokens)
        except (KeyFileError, binascii.Error) as error:
            logger.error("%s; its keys are not accepted", error)

    def _index(self) -> None:
        """Make the table anew. Of several Secrets with the same tenant, the first by name says what it may use. A key
        of several tenants is left out: whose requests it is for would depend on the order of the Secrets."""
        tenants: dict[str, Tenant] = {}
        for name, (tenant, _) in sorted(self._found.items()):
            if tenants.setdefault(tenant.name, tenant) != tenant:
                logger.warning("Secret %s has other limits for tenant %s than an earlier one", name, tenant.name)
        shared = shared_keys(self._found.values())
        for owners in sorted(shared.values()):
            logger.error("the tenants %s have the same key, which is not accepted", ", ".join(owners))
        self._table = KeyTable(
            (tenants[tenant.name], [digest for digest in digests if digest not in shared])
            for tenant, digests in self._found.values()
        )
