"""Writes the tokens by which the pods of one model know one another. The operator cannot read them."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.api.objects import ref_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Rejection
from minisgl_operator.facts.peer_secret import PeerSecret, period_at
from minisgl_operator.render.peer_secret import SLOTS, secret
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.resources import SECRET
from minisgl_operator.shell.store import ModelKey

_AGAIN: Final = timedelta(minutes=10)
"""Kubelets show pods a written token within two minutes; a token that no pod knows until then may be gone."""
_BYTES: Final = 32


class PeerTokens:
    """Remembers what was written, until pods report it. After a restart of the operator a token may be replaced twice:
    pods know the other one."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._written: dict[ModelKey, tuple[tuple[str, str, int], datetime]] = {}
        """Model → uid, slot and period of the last token that was written, and the time of that."""

    async def keep(self, key: ModelKey, model: InferenceModel, known: PeerSecret, now: datetime) -> Rejection | None:
        """Create the first token of a model, or replace an old one. Returns the refusal of the API server.

        Raises:
            ApiError: the API server does not answer.
        """
        replaced = known.slot_to_replace(now)
        slot = SLOTS[0] if known.is_unknown else replaced
        if slot is None:
            return None
        period = period_at(now)
        id = (model.metadata.uid, slot, period)
        last, written_at = self._written.get(key, (None, now))
        if last == id and (now < written_at + _AGAIN or not known.reports):
            return None
        body = secret(model, slot, f"{period}.{secrets.token_hex(_BYTES)}")
        name = body["metadata"]["name"]
        try:
            try:
                await self._client.create(SECRET, key.namespace, body)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                if slot == replaced:
                    await self._client.replace(SECRET, key.namespace, name, body)
        except ApiError as error:
            if error.status == 0:
                raise
            return Rejection(ref_of(body), error.status, error.reason, error.message)
        self._written[key] = id, now
        return None

    def forget(self, key: ModelKey) -> None:
        """Drop what is known about a model that is deleted."""
        self._written.pop(key, None)
