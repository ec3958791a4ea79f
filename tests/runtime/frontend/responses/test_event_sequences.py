"""The events of any answer have the order of the API, and together are the response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.generation.sealed_reasoning import seal, unseal
from minisgl.frontend.responses.custom_input import CustomInput
from minisgl.frontend.responses.output import OutputOptions
from minisgl.frontend.responses.responses import ResponsesFormat
from minisgl.frontend.responses.tools import ToolName, ToolNames
from minisgl.frontend.server.response_stream import Delta
from support.frontend.random_output import TEXT, outputs, pieces, whole

NAMES = ToolNames({"ns__f": ToolName("f", "ns"), "patch": ToolName("patch", is_custom=True)})

Event = dict[str, Any]


def streamed(format: ResponsesFormat, deltas: list[Delta]) -> list[Event]:
    events = format.events("1", "m", [3])
    end = deltas[-1].finished
    assert end is not None
    data = events.first + b"".join(map(events.event, deltas)) + events.last([end])
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\ndata: ")
        event = json.loads(body)
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


class Replay:
    """Builds a response from its events as a client does, and checks each of them."""

    def __init__(self, events: list[Event]) -> None:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        self._events: Iterator[Event] = iter(events)
        self.items: list[dict[str, Any]] = []

    def run(self) -> Event:
        created, in_progress = next(self._events), next(self._events)
        assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
        assert created["response"] == in_progress["response"]
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        for event in self._events:
            if event["type"] != "response.output_item.added":
                assert next(self._events, None) is None, "nothing follows the end"
                assert event["response"]["id"] == created["response"]["id"]
                return event
            self._item(event)
        raise AssertionError("the stream has no end")

    def _item(self, added: Event) -> None:
        index, item = added["output_index"], added["item"]
        assert index == len(self.items)
        assert item["status"] == "in_progress"
        parts: dict[str, str] = {}
        for event in self._events:
            assert event["output_index"] == index
            if event["type"] == "response.output_item.done":
                done = event["item"]
                assert done["id"] == item["id"] and done["status"] in ("completed", "incomplete")
                assert set(item) == set(done)
                self._check_content(done, parts)
                self.items.append(done)
                return
            assert event["item_id"] == item["id"]
            kind, _, step = event["type"].removeprefix("response.").rpartition(".")
            if step == "delta":
                assert event["delta"], "no event is empty"
                parts[kind] = parts.get(kind, "") + event["delta"]
            elif step == "done" and kind not in ("content_part", "reasoning_summary_part"):
                final = event.get("text", event.get("arguments", event.get("input")))
                assert final == parts.get(kind, "")
                parts[kind] = final
            assert event.get("content_index", 0) == event.get("summary_index", 0) == 0

    def _check_content(self, done: dict[str, Any], parts: dict[str, str]) -> None:
        match done["type"]:
            case "message":
                assert done["content"][0]["text"] == parts["output_text"]
            case "reasoning":
                assert done["content"][0]["text"] == parts["reasoning_text"]
                for part in done["summary"]:
                    assert part["text"] == parts["reasoning_summary_text"]
            case "function_call":
                assert done["arguments"] == parts["function_call_arguments"]
            case "custom_tool_call":
                assert done["input"] == parts["custom_tool_call_input"]


@given(outputs(("f", "ns__f", "patch")), st.booleans())
def test_the_events_of_any_answer_are_the_whole_response(deltas: list[Delta], summarized: bool) -> None:
    options = OutputOptions(NAMES, sealed_reasoning=summarized, summarized_reasoning=summarized)
    format = ResponsesFormat({}, options)
    replay = Replay(streamed(format, deltas))
    last = replay.run()
    assert last["response"]["output"] == replay.items
    full = json.loads(format.full("1", "m", [whole(deltas)]))
    times = {"created_at": 0, "completed_at": 0}
    assert full | times == last["response"] | times
    assert last["type"] == f"response.{full['status']}"
    assert len({item["id"] for item in replay.items}) == len(replay.items)


@given(outputs(("f",)))
def test_no_output_is_lost(deltas: list[Delta]) -> None:
    response = json.loads(ResponsesFormat({}, OutputOptions()).full("1", "m", [whole(deltas)]))
    items = response["output"]
    texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    assert "".join(texts) == "".join(delta.text for delta in deltas)
    reasoning = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
    assert "".join(reasoning) == "".join(delta.reasoning for delta in deltas)
    arguments = [item["arguments"] for item in items if item["type"] == "function_call"]
    assert "".join(arguments) == "".join(call.arguments for delta in deltas for call in delta.tool_calls)


@given(st.data(), TEXT, st.booleans(), st.sampled_from(['{"input":%s}', ' { "input" : %s } ', '{"input": %s, "x": 1}']))
def test_the_input_of_a_custom_tool_is_found_in_any_pieces(data: Any, text: str, ascii: bool, form: str) -> None:
    arguments = form % json.dumps(text, ensure_ascii=ascii)
    parser = CustomInput()
    found = "".join(map(parser.push, data.draw(pieces(arguments))))
    assert found + parser.finish() == text
    cut = CustomInput()
    shorter = cut.push(arguments[: data.draw(st.integers(0, len(arguments)))])
    assert text.startswith(shorter), "what is there of a call that was cut off is a beginning of the input"
    cut.finish()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ("no json", "no json"),
        ('"text"', "text"),
        ('{"x": 1, "input": "late"}', "late"),
        ('{"patch": "p"}', '{"patch": "p"}'),
        ("[" * 5000, "[" * 5000),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\udc00\\uzzzz"}', "\ufffd\ufffd"),
        ('{"input": "a\\', "a\ufffd"),
        ('{"input": "a\\ud83d\\u', "a\ufffd"),
    ],
)
def test_arguments_of_another_form_are_no_loss(arguments: str, expected: str) -> None:
    parser = CustomInput()
    assert "".join(map(parser.push, arguments)) + parser.finish() == expected


@given(st.text())
def test_sealed_reasoning_is_read_again(text: str) -> None:
    sealed = seal(text)
    assert unseal(sealed) == text.encode("utf-8", "replace").decode()
    assert sealed.isascii() and unseal(sealed[:-1] + "?") is None and unseal("gAAAA" + sealed) is None
