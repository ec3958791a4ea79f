"""Fields that are known but not supported. The annotation of a field lists the values that ask for nothing; the parser
checks them, and /openapi.json publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta, inspect

from minisgl.frontend.server.json_body import unsupported

NOT_YET: Final = "not supported yet; leave the field out"
NO_LORA: Final = "adapters are not supported; merge the adapter into the checkpoint and serve that"
NO_BEAMS: Final = "beam search is not supported; use `n` with a temperature above 0"
NO_SHORTENING: Final = "conversations are never shortened here; leave turns out, or replace them by a summary"
_NO_PREDICTION: Final = "a field of /v1/chat/completions alone; leave it out, which changes no answer"
_NO_MODERATION: Final = "this server moderates nothing; check prompts and answers in the client"
_STATELESS: Final = "conversations are not stored; send the whole one with each request"
_NO_FALLBACKS: Final = "one model is served here; let the client send the request to another one"
_NO_TRANSFER: Final = "one engine computes both prompt and answer; leave the field out"

_SUPPORTED: Final = "supported"

S = TypeVar("S", bound=msgspec.Struct)


def supports(*values: Any, problem: str = NOT_YET) -> Meta:
    """Annotate a field of which only `values` and null are supported. `problem`: text of the error for others."""
    supported = [*values, None]
    return Meta(description=problem, extra_json_schema={"enum": supported}, extra={_SUPPORTED: (supported, problem)})


# Fields of several APIs with which clients ask a service for more than the answer of a model. Ignored, they would leave
# a client with another conversation, model or check than it believes to have.
Prediction = Annotated[Any, supports(problem=_NO_PREDICTION)]
Moderation = Annotated[Any, supports(problem=_NO_MODERATION)]
Compaction = Annotated[Any, supports(problem=NO_SHORTENING)]
Thread = Annotated[Any, supports(problem=_STATELESS)]
Fallbacks = Annotated[Any, supports([], problem=_NO_FALLBACKS)]
KvTransfer = Annotated[Any, supports({}, problem=_NO_TRANSFER)]


def with_fields(name: str, kind: type[S], annotations: Mapping[str, Any]) -> type[S]:
    """Return the struct under another name, with further optional fields, which are refused or have no effect."""
    fields = [(field, annotation, None) for field, annotation in annotations.items()]
    namespace = {"__doc__": kind.__doc__}
    further: Any = msgspec.defstruct(name, fields, bases=(kind,), namespace=namespace, kw_only=True)
    return cast(type[S], further)


def reject_unsupported(body: msgspec.Struct, path: str = "") -> None:
    """Raises ApiError for a field that asks for something that is not supported. `path` comes before its name."""
    for name, (supported, problem) in _annotated(type(body)):
        if getattr(body, name) not in supported:
            raise unsupported(path + name, problem)


@lru_cache(maxsize=64)
def _annotated(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Return the fields annotated with `supports`."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    extras = [(field.name, getattr(field.type, "extra", None) or {}) for field in info.fields]
    return [(name, extra[_SUPPORTED]) for name, extra in extras if _SUPPORTED in extra]
