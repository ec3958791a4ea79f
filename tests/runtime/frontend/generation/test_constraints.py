"""Constraints on answers: all fields that ask for one, and what reaches the scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation import constraint_check
from minisgl.frontend.native.requests import parse_native
from minisgl.frontend.openai.requests import parse_chat, parse_completion
from minisgl.grammar import lark
from minisgl.grammar.build import build
from minisgl.router import constraint_checks
from minisgl.wire.messages import Submit
from minisgl.wire.text import SamplingDefaults, StructuredOutput
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with
from support.frontend.retry_after import assert_has_retry_headers
from support.frontend.stack import EOS, FrontendStack
from support.panic import Panic

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLD_TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
HUGE = 17976931348623157 * 10**292
"""It is a double, but not when its first 15 digits are rounded up."""
HUGE_BOUNDS = {"exclusiveMinimum": HUGE, "maximum": HUGE}
HUGE_AND_FRACTION = {"minimum": HUGE, "maximum": 1.5}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

SHARED = [
    ({"json_schema": SCHEMA_TEXT}, "json", SCHEMA_TEXT),
    ({"json_schema": SCHEMA}, "json", SCHEMA_TEXT),
    ({"json_schema": "$$ANY$$"}, "json", "true"),
    ({"regex": "a+"}, "regex", "a+"),
    ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", json.dumps(TAG)),
]
OPENAI = [
    *SHARED,
    ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json", '{"type":"object"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        "json",
        SCHEMA_TEXT,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA_TEXT),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, "json", SCHEMA_TEXT),
    ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}'),
    ({"structured_outputs": {"regex": "a", "json_object": False}}, "regex", "a"),
    ({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": True}}, "choice", '["a","b"]'),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
    ({"guided_json": SCHEMA}, "json", SCHEMA_TEXT),
    ({"guided_json": True}, "json", "true"),
    ({"guided_regex": "a"}, "regex", "a"),
    ({"guided_choice": ["a"]}, "choice", '["a"]'),
    ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
    ({"response_format": {"type": "text"}, "regex": "a"}, "regex", "a"),
]


def parse(body: dict[str, Any], route: str = "chat") -> Any:
    raw = json.dumps
    match route:
        case "chat":
            return parse_chat(raw(CHAT | body).encode(), SamplingDefaults())
        case "completion":
            return parse_completion(raw({"prompt": "Hi"} | body).encode(), SamplingDefaults())
        case _:
            return parse_native(raw({"text": "Hi", "sampling_params": body}).encode(), SamplingDefaults())


def refused(body: dict[str, Any], route: str = "chat") -> tuple[str, str | None, str]:
    with pytest.raises(ApiError) as error:
        parse(body, route)
    assert error.value.status == 400
    return error.value.code, error.value.param, error.value.message


@pytest.mark.parametrize(("fields", "kind", "value"), OPENAI)
def test_every_field_of_chats_and_completions_becomes_one_constraint(fields: Any, kind: Any, value: str) -> None:
    for route in ("chat", "completion"):
        request = parse(fields, route)
        assert request.options.structured_output == StructuredOutput(kind, value)
        assert request.ignored == ()


@pytest.mark.parametrize(("fields", "kind", "value"), SHARED)
def test_every_field_of_generate_becomes_one_constraint(fields: Any, kind: Any, value: str) -> None:
    request = parse(fields, "native")
    assert request.options.structured_output == StructuredOutput(kind, value)
    assert request.structured_output_field == f"sampling_params.{next(iter(fields))}"
    assert request.ignored == ()


def test_structural_tags_in_a_response_format_have_two_forms() -> None:
    for format in (TAG, OLD_TAG):
        constraint = parse({"response_format": format}).options.structured_output
        assert constraint.kind == "structural_tag"
        build(constraint)


def test_a_request_without_a_constraint_has_none() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "regex": None}):
        assert parse(fields).options.structured_output is None
    assert parse({}, "native").options.structured_output is None


def test_json_without_whitespace_can_be_asked_for() -> None:
    request = parse({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}})
    assert request.options.structured_output == StructuredOutput("json", SCHEMA_TEXT, compact=True)
    other = parse({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}})
    assert other.options.structured_output == StructuredOutput("regex", "a")


def test_two_constraints_are_refused_by_name() -> None:
    json_object = {"response_format": {"type": "json_object"}}
    for fields, one, other in (
        (json_object | {"regex": "a"}, "response_format", "regex"),
        (json_object | {"json_schema": {}}, "response_format", "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_choice"),
        ({"structured_outputs": {"json": {}}, "ebnf": "a"}, "structured_outputs.json", "ebnf"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json", "structured_outputs.regex"),
    ):
        code, param, message = refused(fields)
        assert (code, param) == ("invalid_value", other)
        assert one in message
    assert refused({"regex": "a", "json_schema": "{}"}, "native")[1] == "sampling_params.json_schema"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": "json_object"}, "response_format", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "invalid_value"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "unsupported_parameter",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported_parameter"),
        ({"regex": 5}, "regex", "invalid_value"),
    ],
)
def test_fields_of_a_wrong_form_are_refused(fields: dict[str, Any], param: str, code: str) -> None:
    assert refused(fields)[:2] == (code, param)


def test_unknown_fields_in_a_constraint_are_reported() -> None:
    schema = {"name": "x", "schema": {"type": "object", "x-order": 1}, "stricter": True}
    request = parse({"response_format": {"type": "json_schema", "json_schema": schema, "other": 1}})
    assert request.ignored == ("response_format.json_schema.stricter", "response_format.other")


@pytest.mark.parametrize(
    ("route", "fields", "param", "code", "text"),
    [
        ("chat", {"regex": "(?=a)"}, "regex", "invalid_grammar", "look"),
        ("chat", {"guided_json": "{"}, "guided_json", "invalid_grammar", "JSON"),
        ("chat", {"guided_json": {"not": {}}}, "guided_json", "unsupported_schema", "not"),
        ("chat", {"guided_json": HUGE_BOUNDS}, "guided_json", "unsupported_schema", "2**53"),
        ("chat", {"guided_json": HUGE_AND_FRACTION}, "guided_json", "unsupported_schema", "2**53"),
        ("completion", {"ebnf": "root ::= a"}, "ebnf", "invalid_grammar", "a"),
        ("completion", {"structural_tag": "{}"}, "structural_tag", "invalid_grammar", "format"),
        ("chat", {"json_schema": {"not": {}}}, "json_schema", "unsupported_schema", "not"),
        ("completion", {"json_schema": "{"}, "json_schema", "invalid_grammar", "JSON"),
        ("native", {"json_schema": "[]"}, "sampling_params.json_schema", "unsupported_schema", "object"),
    ],
)
def test_a_constraint_that_cannot_be_applied_is_refused_before_it_is_queued(
    stack: FrontendStack, route: str, fields: dict[str, Any], param: str, code: str, text: str
) -> None:
    path, body = {
        "chat": ("/v1/chat/completions", CHAT | fields),
        "completion": ("/v1/completions", {"prompt": "Hi"} | fields),
        "native": ("/generate", {"text": "Hi", "sampling_params": fields}),
    }[route]
    for _ in range(2):
        response = stack.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert text in error["message"]
    assert not stack.scheduler.received(Submit)


def test_the_scheduler_gets_the_grammar_of_each_choice(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    body = CHAT | {"n": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200
    one, other = stack.scheduler.received(Submit)
    assert one.constraint.grammar == other.constraint.grammar != ""
    schema = lark.json_schema(SCHEMA)
    assert schema in msgspec.json.decode(one.constraint.grammar)["grammars"][0]["lark_grammar"]


def test_schemas_of_strict_tools_are_checked(agent_stack: FrontendStack) -> None:
    def ask(strict: bool, choice: str) -> Any:
        good = {"name": "f", "parameters": {"type": "object"}, "strict": True}
        bad = {"name": "g", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": strict}
        tools = [{"type": "function", "function": function} for function in (good, bad)]
        body = CHAT | {"tools": tools, "tool_choice": choice}
        return agent_stack.http.post("/v1/chat/completions", json=body)

    agent_stack.scheduler.answer = answer_with([-EOS])
    response = ask(True, "auto")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_schema")
    assert error["param"] == "tools[1].function.parameters"
    assert "#/properties/a/not" in error["message"]
    assert ask(True, "none").status_code == 200
    assert ask(False, "auto").status_code == 200
    assert ask(False, "required").status_code == 200


def strict_tools(*names: str) -> dict[str, Any]:
    functions = [{"name": name, "parameters": {"title": name}, "strict": True} for name in names]
    return CHAT | {"tools": [{"type": "function", "function": function} for function in functions]}


def test_schemas_of_tools_have_a_second_together(agent_stack: FrontendStack, monkeypatch: pytest.MonkeyPatch) -> None:
    agent_stack.scheduler.answer = answer_with([-EOS])
    assert agent_stack.http.post("/v1/chat/completions", json=strict_tools("a", "b")).status_code == 200
    monkeypatch.setattr(constraint_checks, "_SECONDS", -1)
    for _ in range(2):
        response = agent_stack.http.post("/v1/chat/completions", json=strict_tools("a", "c", "d"))
        error = response.json()["error"]
        expected = (400, "grammar_too_complex", "tools[1].function.parameters")
        assert (response.status_code, error["code"], error["param"]) == expected
    monkeypatch.setattr(constraint_checks, "_SECONDS", 60)
    assert agent_stack.http.post("/v1/chat/completions", json=strict_tools("a", "c", "d")).status_code == 200


def test_checks_that_were_not_needed_for_longest_are_forgotten(
    make_stack: Callable[..., FrontendStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(constraint_check, "_KEPT", 2)
    monkeypatch.setattr(constraint_checks, "validate", lambda constraint: checked.append(constraint.value))
    stack = make_stack()
    stack.scheduler.answer = answer_with([-EOS])
    for regex in ("a", "b", "a", "c", "a", "b"):
        assert stack.http.post("/v1/completions", json={"prompt": "Hi", "regex": regex}).status_code == 200
    assert checked == ["a", "b", "c", "b"]


@pytest.mark.parametrize("error", [OverflowError("too large"), Panic("unwrap on none")])
def test_a_check_that_breaks_fails_its_request_alone(
    make_stack: Callable[..., FrontendStack], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def check(constraint: StructuredOutput) -> None:
        if constraint.value == "b":
            raise error

    monkeypatch.setattr(constraint_checks, "validate", check)
    stack = make_stack(limits=RequestLimits(checking=1))
    stack.scheduler.answer = answer_with([-EOS])
    for regex, status in (("b", 500), ("b", 500), ("a", 200)):
        response = stack.http.post("/v1/completions", json={"prompt": "Hi", "regex": regex})
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] == "internal_error"


def test_a_problem_is_not_as_long_as_its_constraint(stack: FrontendStack) -> None:
    structure = {"begin": "x" * 100_000, "schema": {}, "end": "y"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<a>"]}
    response = stack.http.post("/v1/chat/completions", json=CHAT | {"response_format": tag})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_grammar")
    assert len(response.content) < 2000


def test_the_frontend_loads_no_library_of_grammars() -> None:
    script = "import sys, minisgl.frontend.process; assert 'llguidance' not in sys.modules"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_SECONDS, env=environment)


def test_constraints_that_are_being_checked_are_limited(
    make_stack: Callable[..., FrontendStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(constraint: StructuredOutput) -> None:
        if "slow" in constraint.value:
            begun.set()
            assert goes_on.wait(WAIT_SECONDS)

    monkeypatch.setattr(constraint_checks, "validate", slow)
    # The slow one takes as long as all requests that come meanwhile.
    monkeypatch.setattr(constraint_checks, "_SECONDS", 2 * WAIT_SECONDS)
    stack = make_stack(limits=RequestLimits(checking=1))
    stack.scheduler.answer = answer_with([-EOS])

    def ask(regex: str, path: str = "/v1/chat/completions") -> httpx.Response:
        body = CHAT if "chat" in path else {"prompt": "Hi"}
        url = str(stack.http.base_url.join(path))
        return httpx.post(url, json=body | {"regex": regex}, timeout=WAIT_SECONDS)

    assert ask("known").status_code == 200
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, "slow")
        assert begun.wait(WAIT_SECONDS)
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = ask("new", path)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert_has_retry_headers(response.headers)
        assert ask("known").status_code == 200, "it need not be checked again"
        goes_on.set()
        assert waiting.result().status_code == 200
    assert ask("new").status_code == 200
    page = stack.http.get("/metrics").text
    assert 'minisgl:admission_rejections_total{model_name="org/tiny",engine="0",reason="constraints"} 2' in page
