"""Log-probabilities of a message are those of its text, whatever else the answer has."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.responses.output import OutputOptions
from minisgl.frontend.responses.responses import ResponsesFormat
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ScoredToken, ToolCallDelta
from support.frontend.random_output import pieces

END = Finished(id=b"", reason="stop", prompt_tokens=3, cached_tokens=0, completion_tokens=9)


def tokens(*texts: str) -> list[ScoredToken]:
    return [ScoredToken(text.encode(), text.encode(), 0, -0.5, []) for text in texts]


def delta(text: str = "", scored: Any = (), finished: Finished | None = None, **fields: Any) -> Delta:
    return Delta(0, text, 0, scored, finished, **fields)


def scores(*deltas: Delta) -> list[list[str]]:
    """Return the scored tokens of each message, of which those of the events are the same."""
    format = ResponsesFormat({}, OutputOptions(scored=True))
    events = format.events("1", "m", [3])
    data = events.first + b"".join(map(events.event, [*deltas, delta(finished=END)])) + events.last([END])
    found = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    messages = [item for item in found[-1]["response"]["output"] if item["type"] == "message"]
    result = [[token["token"] for token in item["content"][0]["logprobs"]] for item in messages]
    streamed = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
    assert [token["token"] for part in streamed for token in part] == [token for part in result for token in part]
    return result


def test_tokens_of_reasoning_markers_and_calls_are_left_out() -> None:
    call = ToolCallDelta(0, "call_0", "f", "{}")
    assert scores(
        delta(scored=tokens("<think>")),
        delta(scored=tokens("Hm", "."), reasoning="Hm."),
        delta(scored=tokens("</think>", "\n\n")),
        delta("I ", tokens("I", " ")),
        delta("look.", tokens("look", ".")),
        delta(scored=tokens("\n", "<tool_call>", "x"), tool_calls=(call,)),
        delta("So", tokens("</tool_call>", "So")),
    ) == [["I", " ", "look", "."], ["So"]]


def test_a_whole_answer_has_the_same_tokens() -> None:
    all_tokens = tokens("<think>", "Hm", "</think>", "\n", "Yes", ".", "\n", "<tool_call>")
    assert scores(delta("Yes.", all_tokens, reasoning="Hm")) == [["Yes", "."]]


def test_bytes_that_are_no_characters_keep_their_tokens() -> None:
    broken = [ScoredToken(b"\xc3", b"\xc3", 0, -0.5, [])]
    assert scores(delta("a", tokens("a")), delta("\ufffd", broken)) == [["a", "\ufffd"]]
    assert scores(delta("\ufffd", broken)) == [["\ufffd"]]


@given(st.data(), st.text(min_size=1, max_size=12), st.integers(0, 3))
def test_each_token_of_a_plain_text_is_reported_once(data: Any, text: str, held: int) -> None:
    parts = data.draw(pieces(text))
    cuts = data.draw(pieces(text))
    deltas, waiting, at = [], list(parts), 0
    for cut in cuts:
        at += len(cut)
        ready = []
        while waiting and sum(map(len, parts[: len(parts) - len(waiting) + 1])) <= at + held:
            ready.append(waiting.pop(0))
        deltas.append(delta(cut, tokens(*ready)))
    (found,) = scores(*deltas)
    given_tokens = parts[: len(parts) - len(waiting)]
    assert found == given_tokens[: len(found)], "none twice, and none out of order"
