"""Exact bytes of every form of a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from minisgl.frontend.native.responses import NativeFormat
from minisgl.frontend.openai.logprobs import chat_logprobs, completion_logprobs
from minisgl.frontend.openai.responses import OpenAIFormat
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ScoredToken, ToolCallDelta

END = Finished(id=b"r" * 16, reason="stop", prompt_tokens=3, cached_tokens=2, completion_tokens=2)
SCORED = [
    ScoredToken(b"\xc3", b"\xc3", 0, -0.5, [(b"\xc3", -0.5), (b"b", -1.5)], 7, [7, 8]),
    ScoredToken(b"\xa9", b"\xa9", 0, float("-inf"), [(b"<|end|>", -0.25)], 9, [6]),
]


@pytest.fixture(autouse=True)
def created_at_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.frontend.openai.responses.time", SimpleNamespace(time=lambda: 7.9))


def stream(kind: Any, scored: bool = False, **options: bool) -> list[str]:
    events = OpenAIFormat(kind, scored=scored, **options).events("1", "org/tiny", [3])
    delta = Delta(0, "é\n", 1, SCORED if scored else (), None)
    data = events.first + events.event(delta) + events.event(Delta(0, "", 2, (), END)) + events.last([END])
    assert data.endswith(b"\n\n")
    return data.decode().split("\n\n")[:-1]


NO_PROMPT = ',"prompt_logprobs":null,"prompt_token_ids":null'
NOTHING = '"stop_reason":null,"matched_stop":null'
CHAT = 'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"org/tiny","choices":['
TEXT = 'data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"org/tiny","choices":['
USAGE = (
    '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":2}}}'
)


def test_chat_events() -> None:
    assert stream("chat") == [
        CHAT + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        CHAT + '{"index":0,"delta":{"content":"é\\n"},"logprobs":null,"finish_reason":null}]}',
        CHAT + f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",{NOTHING}}}]}}',
        "data: [DONE]",
    ]


def test_completion_events_with_usage() -> None:
    assert stream("completion", include_usage=True) == [
        TEXT + '{"index":0,"text":"é\\n","logprobs":null,"finish_reason":null}],"usage":null}',
        TEXT + f'{{"index":0,"text":"","logprobs":null,"finish_reason":"stop",{NOTHING}}}],"usage":null}}',
        TEXT + "]," + USAGE,
        "data: [DONE]",
    ]


def test_usage_in_every_event() -> None:
    def so_far(count: int) -> str:
        return f'"usage":{{"prompt_tokens":3,"completion_tokens":{count},"total_tokens":{3 + count}}}}}'

    assert stream("completion", include_usage=True, continuous_usage=True) == [
        TEXT + '{"index":0,"text":"é\\n","logprobs":null,"finish_reason":null}],' + so_far(1),
        TEXT + f'{{"index":0,"text":"","logprobs":null,"finish_reason":"stop",{NOTHING}}}],' + so_far(2),
        TEXT + "]," + USAGE,
        "data: [DONE]",
    ]


def test_logprobs_in_events() -> None:
    assert stream("chat", scored=True)[1] == (
        CHAT + '{"index":0,"delta":{"content":"é\\n"},"logprobs":{"content":['
        '{"token":"\ufffd","logprob":-0.5,"bytes":[195],"top_logprobs":['
        '{"token":"\ufffd","logprob":-0.5,"bytes":[195]},{"token":"b","logprob":-1.5,"bytes":[98]}]},'
        '{"token":"\ufffd","logprob":-9999.0,"bytes":[169],"top_logprobs":['
        '{"token":"<|end|>","logprob":-0.25,"bytes":[60,124,101,110,100,124,62]}]}'
        '],"refusal":null},"finish_reason":null}]}'
    )
    assert stream("completion", scored=True)[0] == (
        TEXT + '{"index":0,"text":"é\\n","logprobs":{"text_offset":[0,0],"token_logprobs":[-0.5,-9999.0],'
        '"tokens":["bytes:\\\\xc3","bytes:\\\\xa9"],"top_logprobs":['
        '{"bytes:\\\\xc3":-0.5,"b":-1.5},{"<|end|>":-0.25,"bytes:\\\\xa9":-9999.0}]},"finish_reason":null}]}'
    )
    assert chat_logprobs([]) == {"content": [], "refusal": None}
    assert completion_logprobs([])["tokens"] == []


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_full_responses(kind: Any) -> None:
    content = (
        '"message":{"role":"assistant","content":"é","refusal":null,"reasoning":null,"reasoning_content":null}'
        if kind == "chat"
        else '"text":"é"'
    )
    name, form = ("chatcmpl-1", "chat.completion") if kind == "chat" else ("cmpl-1", "text_completion")
    nothing = NOTHING + ',"token_ids":null' + ("" if kind == "chat" else NO_PROMPT)
    choices = f'"choices":[{{"index":0,{content},"logprobs":null,"finish_reason":"stop",{nothing}}}],'
    reasoning = ',"completion_tokens_details":{"reasoning_tokens":0},"reasoning_tokens":0}'
    details = f"{reasoning}{NO_PROMPT}}}" if kind == "chat" else "}}"
    usage = USAGE.removesuffix("}}") + details
    expected = f'{{"id":"{name}","object":"{form}","created":7,"model":"org/tiny",{choices}{usage}'
    choice = Delta(0, "é", 2, (), END)
    assert OpenAIFormat(kind).full("1", "org/tiny", [choice]).decode() == expected


CALLS = [ToolCallDelta(0, "c0", "f", ""), ToolCallDelta(0, "", "", '{"a":'), ToolCallDelta(1, "c1", "g", "{}")]
CALLED = msgspec.structs.replace(END, tool_calls=2, reasoning_tokens=1)


def test_events_of_reasoning_and_calls() -> None:
    events = OpenAIFormat("chat").events("1", "org/tiny", [3])
    rest = b',"logprobs":null,"finish_reason":null}]}\n\n'
    begin = CHAT.encode() + b'{"index":0,"delta":'
    assert events.event(Delta(0, "a", 1, (), None, "why", CALLS)) == (
        begin
        + b'{"reasoning":"why","reasoning_content":"why"}'
        + rest
        + begin
        + b'{"content":"a"}'
        + rest
        + begin
        + b'{"tool_calls":[{"index":0,"id":"c0","type":"function","function":{"name":"f","arguments":"{\\"a\\":"}},'
        + b'{"index":1,"id":"c1","type":"function","function":{"name":"g","arguments":"{}"}}]}'
        + rest
    )
    later = Delta(0, "", 2, (), CALLED, "", [ToolCallDelta(0, "", "", "1}")])
    assert events.event(later) == (
        begin
        + b'{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}'
        + rest
        + begin
        + f'{{}},"logprobs":null,"finish_reason":"tool_calls",{NOTHING}}}]}}\n\n'.encode()
    )


def test_a_full_response_with_reasoning_and_calls() -> None:
    body = OpenAIFormat("chat").full("1", "org/tiny", [Delta(0, "", 2, (), CALLED, "why", CALLS)])
    assert body.decode().partition('"choices":')[2] == (
        '[{"index":0,"message":{"role":"assistant","content":null,"refusal":null,"reasoning":"why",'
        '"reasoning_content":"why","tool_calls":['
        '{"id":"c0","type":"function","function":{"name":"f","arguments":"{\\"a\\":"}},'
        '{"id":"c1","type":"function","function":{"name":"g","arguments":"{}"}}]},'
        f'"logprobs":null,"finish_reason":"tool_calls",{NOTHING},"token_ids":null}}],'
        '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":2},'
        f'"completion_tokens_details":{{"reasoning_tokens":1}},"reasoning_tokens":1}}{NO_PROMPT}}}'
    )


def test_events_of_generate() -> None:
    native = NativeFormat().events("1", "org/tiny", [3])
    assert native.event(Delta(0, "a", 1, (), None)) == (
        b'data: {"text":"a","output_ids":[],"meta_info":{"id":"1","finish_reason":null,"prompt_tokens":3,'
        b'"completion_tokens":1}}\n\n'
    )
    assert native.event(Delta(0, "b", 2, (), END)) == (
        b'data: {"text":"ab","output_ids":[],"meta_info":{"id":"1","finish_reason":{"type":"stop","matched":null},'
        b'"prompt_tokens":3,"completion_tokens":2,"cached_tokens":2}}\n\n'
    )
    plain = NativeFormat(text_only=True).events("1", "org/tiny", [3])
    assert plain.event(Delta(0, "a\nb", 1, (), None)) == b"data: a\ndata: b\n\n"
    assert plain.first + plain.event(Delta(0, "", 2, (), END)) + plain.last([END]) == b"data: [DONE]\n\n"
