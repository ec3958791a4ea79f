"""Endpoints with facts about model, server and load, in the forms of SGLang and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.frontend.config import Access
from minisgl.version import __version__
from minisgl.wire.messages import Ack, Submit
from support.frontend.fake_scheduler import STATUS, answer_with, row
from support.frontend.served import eventually
from support.frontend.stack import FrontendStack, ids
from support.messages import status_of

MakeStack = Callable[..., FrontendStack]

BUSY = status_of(STATUS, running=3, waiting=2, used_pages=16, num_pages=64, page_size=16, steps=9)


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_the_model_is_described(stack: FrontendStack, path: str) -> None:
    info = stack.http.get(path).json()
    assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == ("org/tiny", "org/tiny", True)
    assert (info["max_model_len"], info["vocab_size"], info["weight_version"]) == (256, 512, "r1")
    # The vocabulary of this model has markers of reasoning; its template has no switch for it, and no tools.
    assert info["capabilities"] == ["chat", "reasoning"]


def test_what_requests_can_ask_of_the_model_is_found_from_its_template(agent_stack: FrontendStack) -> None:
    expected = ["chat", "tools", "reasoning", "reasoning_switch"]
    assert agent_stack.http.get("/get_model_info").json()["capabilities"] == expected
    [card] = agent_stack.http.get("/v1/models").json()["data"]
    assert card["capabilities"] == expected


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_the_server_is_described(make_stack: MakeStack, path: str) -> None:
    stack = make_stack()
    stack.scheduler.status = BUSY
    eventually(lambda: stack.http.get(path).json()["internal_states"][0].get("num_running_reqs") == 3)
    info = stack.http.get(path).json()
    assert (info["served_model_name"], info["version"], info["status"]) == ("org/tiny", __version__, "ready")
    assert (info["context_length"], info["page_size"], info["max_total_num_tokens"]) == (256, 16, 1024)
    assert info["model_path"] == "org/tiny"


def test_the_load_is_reported(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.status = BUSY
    eventually(lambda: stack.http.get("/load").json().get("num_waiting_reqs") == 2)
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    assert stack.http.get("/load").json()["server_load"] == 0
    with stack.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        load = stack.http.get("/load").json()
        (submit,) = stack.scheduler.received(Submit)
        stack.scheduler.send(row(submit.id, 1, ids("b")[0], "length"), to=submit)
        assert "data: [DONE]" in list(lines)
    assert load == {
        "server_load": 1,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_used_tokens": 256,
        "max_total_num_tokens": 1024,
        "token_usage": 0.25,
    }
    assert stack.http.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 256}
    ]


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": "a", "stream": True}], ids=["whole", "stream"])
def test_an_answer_reports_the_load_where_a_load_balancer_asks_for_it(
    make_stack: MakeStack, body: dict[str, Any]
) -> None:
    stack = make_stack()
    stack.scheduler.status = BUSY
    eventually(lambda: stack.http.get("/load").json().get("num_waiting_reqs") == 2)
    stack.scheduler.answer = answer_with(ids("a"))

    def load(*format: str) -> str | None:
        headers = {"endpoint-load-metrics-format": format[0]} if format else {}
        answer = stack.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        return answer.headers.get("endpoint-load-metrics")

    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0"
    assert load("TEXT") == load("text") == text
    format, _, report = (load("JSON") or "").partition(" ")
    metrics = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}
    assert (format, json.loads(report)) == ("JSON", {"named_metrics": metrics})
    assert load() is None and load("BIN") is None


def test_a_hosting_platform_finds_the_frontend_alive(make_stack: MakeStack) -> None:
    stack = make_stack(wait=False)
    for method in ("GET", "POST"):
        assert stack.http.request(method, "/ping").status_code == 200


def test_without_an_engine_nothing_is_described(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.close()
    stack.wait_until_served(False)
    for path in ("/get_model_info", "/get_server_info"):
        response = stack.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert stack.http.get("/load").status_code == 200


def test_these_endpoints_need_a_key(make_stack: MakeStack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-first alice\n")
    stack = make_stack(access=Access(api_keys=str(keys)))
    for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/load", "/get_load"):
        assert stack.http.get(path).status_code == 401
        assert stack.http.get(path, headers={"authorization": "Bearer sk-first"}).status_code == 200
    assert stack.http.get("/health_generate").status_code == 401
