"""POST /invocations: one route for chats and completions, by the fields of the body."""

from __future__ import annotations

from typing import Any

import pytest

from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import EOS, FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (CHAT, "chat.completion"),
        (CHAT | {"prompt": None}, "chat.completion"),
        ({"prompt": "Hi"}, "text_completion"),
        ({"prompt": "Hi", "messages": []}, "text_completion"),
    ],
)
def test_the_fields_of_a_body_decide_what_is_answered(stack: FrontendStack, body: dict[str, Any], kind: str) -> None:
    stack.scheduler.answer = answer_with([*ids("one two"), -EOS])
    answer = stack.http.post("/invocations", json=body).json()
    assert answer["object"] == kind
    streamed = stack.http.post("/invocations", json=body | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"messages": "Hi"}, "messages"), (CHAT | {"mood": 1, "n": 0}, "n"), ({"prompt": 5}, "prompt")],
)
def test_errors_are_those_of_the_route_that_is_meant(stack: FrontendStack, body: dict[str, Any], param: str) -> None:
    refused = stack.http.post("/invocations", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
