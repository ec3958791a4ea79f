"""Messages of the wire from flat fields: those of nested structs are given beside the others."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.wire.messages import AnswerConstraint, Counters, SamplingParams, Status, Submit
from minisgl.wire.text import Generate, Rendering, RequestOptions


def submit_of(**fields: Any) -> Submit:
    """Return a message with the fields of `Submit`, `SamplingParams` and `AnswerConstraint`."""
    params = SamplingParams(**_take(fields, SamplingParams))
    return Submit(params=params, constraint=AnswerConstraint(**_take(fields, AnswerConstraint)), **fields)


def with_params(submit: Submit, **params: Any) -> Submit:
    """Return a message with changed fields of `SamplingParams`."""
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, **params))


def without_seed(submit: Submit, seed: int | None = 0) -> Submit:
    """Return a message without its identifier, and with this seed."""
    return with_params(msgspec.structs.replace(submit, id=b""), seed=seed)


def generate_of(**fields: Any) -> Generate:
    """Return a message with the fields of `Generate`, `RequestOptions` and `Rendering`."""
    rendering = Rendering(**_take(fields, Rendering))
    options = RequestOptions(rendering=rendering, **_take(fields, RequestOptions))
    return Generate(options=options, **{"params": SamplingParams()} | fields)


def status_of(status: Status | None = None, **fields: Any) -> Status:
    """Return a status, or that of an idle engine, with changed fields of `Status` and `Counters`."""
    if status is None:
        status = Status(waiting=0, running=0, used_pages=0, num_pages=64, page_size=0, counters=Counters())
    counters = msgspec.structs.replace(status.counters, **_take(fields, Counters))
    return msgspec.structs.replace(status, counters=counters, **fields)


def _take(fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
