"""Request bodies: what a gateway reads of one, and the room for those that it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import decode
from minisgl.scheduler.shares import has_share

_KEPT_BYTES: Final = 256 << 20
"""Most bytes of all bodies: each is kept until its response is complete, because it may have to be sent again. Shares
of tenants may double them, as they do those that are being read; the pod's memory has room for both."""


class _Body(msgspec.Struct):
    """The one field of a body that decides where it goes. Frontends check the others."""

    model: str | None = None


_decoder: Final = msgspec.json.Decoder(_Body)
_fields_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def requested_model(body: bytes) -> str | None:
    """Return the field `model` of a body. Raises ApiError when it is not a JSON object, or the field is no text."""
    if not body.isascii():
        # The decoder skips the texts of other fields unseen.
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    return decode(_decoder, body).model


def with_model(body: bytes, name: str) -> bytes:
    """Return a body whose field `model` is `name`, and whose other fields are as they were. Raises ApiError."""
    fields = decode(_fields_decoder, body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)


class KeptBodies:
    """Room for bodies, with shares of tenants."""

    def __init__(self) -> None:
        self._bytes_of: Counter[str] = Counter()

    @contextmanager
    def keep(self, size: int, tenant: str) -> Iterator[None]:
        """Keep a tenant's body of `size` bytes. Raises ApiError when there is no room."""
        self.take(size, tenant)
        try:
            yield
        finally:
            self.give_back(size, tenant)

    def take(self, size: int, tenant: str) -> None:
        """Keep `size` bytes more of a tenant's bodies. The caller must `give_back` them. Raises ApiError when there is
        no room."""
        kept, own = self._bytes_of.total(), self._bytes_of[tenant]
        if kept + size > _KEPT_BYTES and not has_share(own, size, kept, _KEPT_BYTES, +self._bytes_of):
            raise ApiError(429, "queue_full", f"bodies of {kept} bytes wait for their responses; retry later")
        self._bytes_of[tenant] += size

    def give_back(self, size: int, tenant: str) -> None:
        self._bytes_of[tenant] -= size
        if not self._bytes_of[tenant]:
            del self._bytes_of[tenant]
