"""Media in the results of tools, which agents send again with each turn: the model gets a note in their place."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.wire.text import Encode, Generate
from support.frontend.scripted import ScriptedStack, answer, says

TEXT = "shot.png:"
URL = "data:image/png;base64,AAAA"


def chat(part: Any) -> Any:
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": TEXT}, part]}
    return {"messages": [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}, result]}


def responses(part: Any) -> Any:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": TEXT}, part]
    return {"input": [call, {"type": "function_call_output", "call_id": "c", "output": output}]}


def messages(part: Any) -> Any:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": TEXT}, part]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "Look."}, *turns]}


BASE64 = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CASES: Any = [
    ("/v1/chat/completions", chat, {"type": "image_url", "image_url": {"url": URL}}, "image"),
    ("/v1/chat/completions", chat, {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}, "audio"),
    ("/v1/chat/completions", chat, {"type": "file", "file": {"file_id": "f"}}, "file"),
    ("/v1/responses", responses, {"type": "input_image", "image_url": URL, "detail": "auto"}, "image"),
    ("/v1/responses", responses, {"type": "input_file", "file_id": "f"}, "file"),
    ("/v1/responses", responses, {"type": "computer_screenshot", "image_url": URL}, "image"),
    ("/v1/messages", messages, {"type": "image", "source": BASE64}, "image"),
    ("/v1/messages", messages, {"type": "document", "source": BASE64, "title": "t"}, "document"),
]


@pytest.mark.parametrize(("path", "body", "part", "noun"), CASES)
def test_a_medium_in_the_result_of_a_tool_becomes_a_note(
    scripted: ScriptedStack, path: str, body: Any, part: Any, noun: str
) -> None:
    scripted.script = answer(says("I see."))
    response = scripted.http.post(path, json=body(part))
    assert response.status_code == 200, response.text
    field = next(name for name in part if name != "type")
    assert response.headers["x-ignored-params"].split(", ")[0].endswith(f"[1].{field}")
    sent = scripted.last(Generate).messages
    assert sent is not None and sent[-1].role == "tool"
    assert sent[-1].content == f"{TEXT}\n[{noun} left out: this model reads only text]"
    strict = scripted.http.post(path, json=body(part), headers={"prefer": "handling=strict"})
    assert (strict.status_code, strict.json()["error"]["code"]) == (400, "unknown_parameter")


IMAGE = {"type": "image", "source": BASE64}
NOTE = "[image left out: this model reads only text]"


@pytest.mark.parametrize(
    ("part", "text", "left_out"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a b"}}, "a b", ""),
        ({"type": "document", "title": "T", "source": {"type": "content", "content": "a b"}}, "T\na b", ""),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}, IMAGE]}},
            f"a\n{NOTE}",
            ".source.content[1].source",
        ),
        (
            {
                "type": "search_result",
                "source": "https://a.example",
                "title": "T",
                "content": [{"type": "text", "text": "found"}],
            },
            "T\nhttps://a.example\nfound",
            "",
        ),
    ],
)
def test_the_text_of_documents_and_search_results_is_kept(
    scripted: ScriptedStack, part: Any, text: str, left_out: str
) -> None:
    scripted.script = answer(says("I see."))
    response = scripted.http.post("/v1/messages", json=messages(part))
    assert response.status_code == 200, response.text
    assert response.headers.get("x-ignored-params", "").removeprefix("messages[2].content[0].content[1]") == left_out
    sent = scripted.last(Generate).messages
    assert sent is not None and sent[-1].content == f"{TEXT}\n{text}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "document", "source": {"type": "text"}},
        {"type": "document", "source": {"type": "content", "content": [{"text": "a"}]}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "document_of", "source": {}}]}},
        {"type": "search_result", "source": "a", "content": 3},
    ],
)
def test_a_document_without_its_text_is_refused(scripted: ScriptedStack, part: Any) -> None:
    error = scripted.http.post("/v1/messages", json=messages(part)).json()["error"]
    assert error["param"].startswith("messages[2].content[0].content[1].")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", chat(CASES[0][2])),
        ("/v1/responses/input_tokens", responses(CASES[3][2])),
        ("/v1/messages/count_tokens", messages(CASES[6][2])),
    ],
)
def test_the_note_is_counted(scripted: ScriptedStack, path: str, body: Any) -> None:
    body.pop("max_tokens", None)
    response = scripted.http.post(path, json=body)
    assert response.status_code == 200, response.text
    sent = scripted.last(Encode).messages
    assert sent is not None and "image left out" in (sent[-1].content or "")
    assert "[1]." in response.headers["x-ignored-params"]
