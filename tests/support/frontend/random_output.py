"""Hypothesis strategies for the output of an answer: text, reasoning and calls in any order and in any pieces."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ToolCallDelta

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """Return the text in pieces, none of which is empty."""
    cuts = sorted(draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=6)))
    found = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [piece for piece in found if piece]


@st.composite
def outputs(draw: st.DrawFn, names: tuple[str, ...]) -> list[Delta]:
    """Return the deltas of one choice, the last of which has its end. Arguments of calls are whole, unless a limit or a
    stop string ends the answer within a call. `names`: those of tools."""
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6))
    fields: list[dict[str, Any]] = []
    calls = 0
    for kind in kinds:
        if kind == "call":
            arguments = json.dumps({"input": draw(TEXT)}, ensure_ascii=draw(st.booleans()))
            fields.append({"tool_calls": (ToolCallDelta(calls, f"call_{calls}", draw(st.sampled_from(names)), ""),)})
            fields += [{"tool_calls": (ToolCallDelta(calls, "", "", piece),)} for piece in draw(pieces(arguments))]
            calls += 1
        else:
            fields += [{kind: piece} for piece in draw(pieces(draw(TEXT)))]
    is_cut = bool(fields) and draw(st.booleans())
    if is_cut:
        fields = fields[: draw(st.integers(1, len(fields)))]
    cuts: list[dict[str, Any]] = [{"reason": "length"}, {"reason": "stop", "matched_stop": "###"}]
    cause = draw(st.sampled_from(cuts)) if is_cut else {"reason": "stop"}
    end = Finished(id=b"", prompt_tokens=3, cached_tokens=0, completion_tokens=len(fields), tool_calls=calls, **cause)
    deltas = [_delta(number, **field) for number, field in enumerate(fields)]
    return [*deltas, _delta(len(fields), finished=end)]


def whole(deltas: list[Delta]) -> Delta:
    """Return the deltas as the one of a response that is not streamed."""
    return _delta(len(deltas), finished=deltas[-1].finished, joined=deltas)


def _delta(tokens: int, *, text: str = "", finished: Finished | None = None, **fields: Any) -> Delta:
    return Delta(0, text, tokens, (), finished, **fields)
