"""Sampling fields that request bodies of all APIs share, with the ranges that are checked while decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from minisgl.frontend.generation.constraints import ConstraintFields
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import SamplingDefaults

TOKEN_ID: Final = "token id"
"""Title of the type in schemas; the vocabulary of the served model bounds it."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1, title=TOKEN_ID)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
N = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingFields(ConstraintFields, kw_only=True):
    """Fields with one name and meaning everywhere. Null is as good as leaving a field out."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: N | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=100)] | None = None


def sampling_params(fields: SamplingFields, defaults: SamplingDefaults, **others: Any) -> SamplingParams:
    """Return the parameters of a request, with the checkpoint's defaults. `others`: those whose name differs by API."""
    stop = fields.stop or ()
    given = {name: getattr(fields, name) for name in SamplingDefaults.__struct_fields__}
    return SamplingParams(
        **{name: getattr(defaults, name) if value is None else value for name, value in given.items()},
        ignore_eos=bool(fields.ignore_eos),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        **others,
    )
