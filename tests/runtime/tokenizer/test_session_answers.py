"""Reasoning and tool calls in the messages of a session."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from minisgl.grammar.library import is_too_large
from minisgl.parsing.answer_format import PLAIN_ANSWERS, AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.reasoning import ReasoningState
from minisgl.parsing.scanner import Scanner
from minisgl.tokenizer import answer_constraints
from minisgl.tokenizer.answer_constraints import AnswerConstraints
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.messages import Abort, Ack, FinishReason, SamplingParams, Submit, Thinking
from minisgl.wire.text import (
    ChatMessage,
    Finished,
    ScoredToken,
    StructuredOutput,
    TextFailed,
    Texts,
    ToolCallDelta,
    ToolOptions,
)
from support.frontend.fake_scheduler import card, row
from support.frontend.scored_answers import scores
from support.messages import generate_of
from support.panic import Panic
from support.tiny_tokenizers import byte_level

TOKENIZER = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>"))
TABLE = TokenBytes(TOKENIZER)
ANSWERS = find_formats(Parsers(tool_calls="hermes", reasoning="qwen3"), None, added_tokens(TOKENIZER))
ID = b"a" * 16
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


class Collected(msgspec.Struct):
    """Output of one request, as the frontend receives it."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = []
    """Name, identifier and arguments of each call."""
    scored: list[ScoredToken] = []
    finished: Finished | None = None

    def add(self, message: Texts) -> None:
        for number, (_, text) in enumerate(message.rows()):
            self.reasoning += message.reasoning.get(number, "")
            self.text += text
            for delta in message.tool_calls.get(number, ()):
                self._add_delta(delta)
            self.scored += message.scored.get(number, ())
        for finished in message.finished:
            self.finished = finished

    def _add_delta(self, delta: ToolCallDelta) -> None:
        if delta.name:
            assert delta.index == len(self.calls) and delta.id and not delta.arguments
            self.calls.append([delta.name, delta.id, ""])
        else:
            assert delta.index == len(self.calls) - 1 and not delta.id
            self.calls[-1][2] += delta.arguments


def session(prompt: str = "<|im_start|>assistant\n", *, answers: AnswerFormat = ANSWERS, **fields: Any) -> Session:
    """Return a session with a running chat."""
    params = fields.pop("params", SamplingParams())
    fields.setdefault("tools", ToolOptions(definitions=(WEATHER,)))
    made = Session(TABLE, answers)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
    messages = (ChatMessage("user", "Hello"),)
    assert made.begin(generate_of(id=ID, messages=messages, params=params, **fields))
    made.encoded(ID, array("i", TOKENIZER.encode(prompt).ids))
    if ID in made:
        made.acked(Ack(ID))
        made.take_to_frontend()
    return made


def answer(made: Session, text: str, finish: FinishReason | None = "length", *, scored: bool = False) -> Collected:
    """Deliver the text token by token, the last one with `finish`."""
    tokens = TOKENIZER.encode(text).ids
    collected = Collected()
    for index, token in enumerate(tokens):
        message = row(ID, index, token, finish if index == len(tokens) - 1 else None)
        if scored:
            message = msgspec.structs.replace(message, logprobs={0: scores([token], 0)})
        made.tokens(message)
        for reply in made.take_to_frontend():
            assert isinstance(reply, Texts)
            collected.add(reply)
    return collected


def test_reasoning_text_and_calls_arrive_apart() -> None:
    found = answer(session(), f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    assert (found.reasoning, found.text) == ("Hm.", "I look.")
    assert [(name, arguments) for name, _, arguments in found.calls] == [("weather", '{"city": "Bonn"}')] * 2
    assert found.calls[0][1] != found.calls[1][1]
    assert found.finished is not None
    assert found.finished.tool_calls == 2
    assert found.finished.reasoning_tokens == len(TOKENIZER.encode("<think>\nHm.\n</think>").ids)


def test_a_strict_tool_that_the_format_cannot_enforce_never_reaches_the_scheduler() -> None:
    function = {"name": "weather", "strict": True, "parameters": {"patternProperties": {"^x": {"type": "integer"}}}}
    answers = find_formats(Parsers(tool_calls="qwen3_coder"), None, added_tokens(TOKENIZER))
    made = session(answers=answers, tools=ToolOptions(definitions=({"type": "function", "function": function},)))
    assert ID not in made
    (failed,) = made.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert failed.code == "unsupported_schema"
    assert failed.message.startswith("weather: #/patternProperties: ")
    assert not [message for message in made.take_to_scheduler() if isinstance(message, Submit)]


def test_reasoning_that_the_prompt_has_opened_continues() -> None:
    found = answer(session("<|im_start|>assistant\n<think>\n"), "Hm.\n</think>\n\nYes")
    assert (found.reasoning, found.text) == ("Hm.", "Yes")
    assert found.finished is not None
    assert found.finished.reasoning_tokens == len(TOKENIZER.encode("Hm.\n</think>").ids)


def test_reasoning_that_the_prompt_has_closed_does_not_begin_again() -> None:
    found = answer(session("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "<think>a</think>")
    assert (found.reasoning, found.text) == ("", "<think>a</think>")
    assert found.finished is not None
    assert found.finished.reasoning_tokens == 0


def test_markers_in_earlier_turns_do_not_count() -> None:
    found = answer(session("<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n"), "Yes")
    assert (found.reasoning, found.text) == ("", "Yes")


def test_text_without_reasoning_and_tools_takes_the_fast_path() -> None:
    made = session(tools=None)
    found = answer(made, "Hello world")
    assert found.text == "Hello world"


def test_a_quoted_marker_is_text() -> None:
    """The vocabulary has the marker as a token, so its letters alone are no marker."""
    made = session()
    tokens = [token for part in ("<tool", "_call>", '{"name": "weather"}') for token in TOKENIZER.encode(part).ids]
    collected = Collected()
    for index, token in enumerate(tokens):
        made.tokens(row(ID, index, token, "length" if index == len(tokens) - 1 else None))
    for reply in made.take_to_frontend():
        assert isinstance(reply, Texts)
        collected.add(reply)
    assert collected.text == '<tool_call>{"name": "weather"}'
    assert not collected.calls


def test_calls_are_text_if_no_tool_may_be_called() -> None:
    for tools in (None, ToolOptions(definitions=(WEATHER,), choice="none")):
        found = answer(session(tools=tools), f"Yes {CALL}")
        assert (found.text, found.calls) == (f"Yes {CALL}", [])


def test_reasoning_stays_in_the_text_on_request() -> None:
    text = "<think>\nHm.\n</think>\n\nYes"
    found = answer(session(separate_reasoning=False), text + CALL)
    assert (found.text, found.reasoning, len(found.calls)) == (text, "", 1)
    found = answer(session(separate_reasoning=False, tools=None), text)
    assert found.text == text


def test_a_stop_string_is_searched_for_in_the_whole_answer() -> None:
    made = session(params=SamplingParams(stop=("Bonn",)))
    found = answer(made, f"<think>a</think>b{CALL}", None)
    assert (found.reasoning, found.text) == ("a", "b")
    assert [arguments for _, _, arguments in found.calls] == ['{"city": "']
    assert found.finished is not None and found.finished.reason == "stop"
    assert Abort(ID) in made.take_to_scheduler()


@pytest.mark.parametrize("stop", ["call>\nX", "</think>\nX", "<think>X", "X"])
def test_text_that_is_held_back_for_a_stop_string_keeps_its_markers(stop: str) -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    found = answer(session(params=SamplingParams(stop=(stop,))), text)
    assert (found.reasoning, found.text, len(found.calls)) == ("Hm.", "I look.", 1)


def test_a_stop_string_within_a_marker_ends_the_answer_there() -> None:
    found = answer(session(params=SamplingParams(stop=("_call>",))), f"b{CALL}", None)
    assert (found.text, found.calls) == ("b<tool", [])


def test_text_behind_a_call_keeps_its_place() -> None:
    """All of it is held back until the stop string does not follow, and is then output of one step."""
    made = session(params=SamplingParams(stop=(f"{CALL} bye!",)))
    tokens = TOKENIZER.encode(f"{CALL} byes").ids
    for index, token in enumerate(tokens):
        made.tokens(row(ID, index, token))
    (message,) = made.take_to_frontend()
    assert isinstance(message, Texts)
    assert message.rows() == [(ID, ""), (ID, "byes")]
    assert [*message.tool_calls] == [0]


def test_scores_cover_all_tokens_whatever_they_become() -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    found = answer(session(params=SamplingParams(logprobs=0)), text, scored=True)
    assert b"".join(token.text for token in found.scored).decode() == text
    assert (found.reasoning, found.text, len(found.calls)) == ("Hm.", "I look.", 1)


def test_tools_of_a_model_with_an_unknown_format_are_refused() -> None:
    answers = find_formats(Parsers(), None, added_tokens(TOKENIZER))
    made = session(answers=answers)
    (failed,) = made.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("tools_unavailable", "tools")
    assert not [message for message in made.take_to_scheduler() if isinstance(message, Submit)]
    assert ID in session(answers=answers, tools=ToolOptions(definitions=(WEATHER,), choice="none"))


def test_a_scanner_that_fails_returns_the_rest_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session()
    scan = Scanner.scan
    scans = 0

    def fail(scanner: Scanner) -> Any:
        nonlocal scans
        scans += 1
        if scans == 12:
            raise ValueError("a bug")
        return scan(scanner)

    monkeypatch.setattr(Scanner, "scan", fail)
    found = answer(made, f"<think>Hm</think>Yes{CALL}")
    assert found.reasoning == "Hm"
    assert found.text == f"Yes{CALL}"
    assert found.finished is not None


def submitted(prompt: str = "<|im_start|>assistant\n", **fields: Any) -> Submit:
    made = session(prompt, **fields)
    (submit,) = made.take_to_scheduler()
    assert isinstance(submit, Submit)
    return submit


def tools(choice: Any, *, strict: bool = False, **options: Any) -> ToolOptions:
    function = WEATHER["function"] | {"strict": strict}
    return ToolOptions(definitions=({"type": "function", "function": function},), choice=choice, **options)


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({"tools": None}, False),
        ({"tools": tools("none", strict=True)}, False),
        ({"tools": tools("auto")}, False),
        ({"tools": tools("auto", strict=True)}, True),
        ({"tools": tools("auto", parallel=False)}, True),
        ({"tools": tools("required")}, True),
        ({"tools": tools("named", name="weather")}, True),
        ({"tools": None, "structured_output": StructuredOutput("json", "{}")}, True),
        ({"tools": tools("none"), "structured_output": StructuredOutput("json", "{}")}, True),
        ({"tools": tools("auto"), "structured_output": StructuredOutput("json", "{}")}, True),
    ],
)
def test_answers_have_a_grammar_where_they_are_constrained(fields: dict[str, Any], has_grammar: bool) -> None:
    submit = submitted(**fields)
    assert bool(submit.constraint.grammar) == has_grammar
    assert (submit.constraint.thinking is not None) == has_grammar


def test_choices_share_a_grammar_and_others_have_their_own() -> None:
    made = Session(TABLE, ANSWERS)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))

    def grammar(number: int, schema: str, choice: str = "auto") -> str:
        request_id = bytes([number]) * 16
        constraint = StructuredOutput("json", schema)
        fields: dict[str, Any] = {"structured_output": constraint, "tools": tools(choice, strict=True)}
        fields["params"] = SamplingParams()
        assert made.begin(generate_of(id=request_id, messages=(ChatMessage("user", "Hello"),), **fields))
        made.encoded(request_id, array("i", TOKENIZER.encode("<|im_start|>assistant\n").ids))
        (submit,) = made.take_to_scheduler()
        assert isinstance(submit, Submit)
        return submit.constraint.grammar

    first = grammar(1, '{"const": 1}')
    assert grammar(2, '{"const": 1}') is first
    others = [grammar(3, '{"const": true}'), grammar(4, '{"const": true}', "required"), grammar(5, '{"const": 1}')]
    assert others[2] == first and len({first, *others}) == 3


START, END = (TOKENIZER.token_to_id(text) for text in ("<think>", "</think>"))


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n", Thinking(start=(START,), end=(END,))),
        ("<|im_start|>assistant\n<think>\n", Thinking(start=(START,), end=(END,), is_open=True)),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
    ],
)
def test_a_grammar_begins_behind_the_reasoning(prompt: str, thinking: Thinking | None) -> None:
    assert submitted(prompt, tools=tools("required")).constraint.thinking == thinking


def test_a_budget_of_reasoning_reaches_the_scheduler() -> None:
    limited = submitted(tools=None, thinking_budget=7).constraint.thinking
    assert limited == Thinking(start=(START,), end=(END,), budget=7)
    assert submitted("<think></think>", tools=None, thinking_budget=7).constraint.thinking is None


@pytest.mark.parametrize("answers", [PLAIN_ANSWERS, find_formats(Parsers(reasoning="kimi"), None, {})])
def test_a_budget_needs_tokens_that_mark_reasoning(answers: AnswerFormat) -> None:
    made = session(answers=answers, tools=None, thinking_budget=0)
    (failed,) = made.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("unsupported_parameter", "thinking_token_budget")
    made = session(answers=answers, tools=None, thinking_budget=0, soft_limits=True)
    (submit,) = made.take_to_scheduler()
    assert isinstance(submit, Submit) and submit.constraint.thinking is None


def test_constraints_that_were_prepared_fail_in_the_session() -> None:
    """So the client gets their error."""
    request = generate_of(id=ID, messages=(ChatMessage("user", "x"),), params=SamplingParams(), tools=tools("required"))
    for answers, code in ((PLAIN_ANSWERS, "tools_unavailable"), (ANSWERS, None)):
        prepared = AnswerConstraints(answers).prepare(request, ReasoningState.BEFORE)
        made = Session(TABLE, answers)
        made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
        made.begin(request)
        made.encoded(ID, array("i", [1]), (), prepared)
        failed = [message.code for message in made.take_to_frontend() if isinstance(message, TextFailed)]
        assert failed == ([] if code is None else [code])


@pytest.mark.parametrize("error", [OverflowError("too large"), Panic("unwrap on none")])
def test_constraints_that_cannot_be_prepared_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def grammar(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(answer_constraints, "answer_grammar", grammar)
    request = generate_of(id=ID, messages=(ChatMessage("user", "x"),), params=SamplingParams(), tools=tools("required"))
    made = Session(TABLE, ANSWERS)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
    made.begin(request)
    made.encoded(ID, array("i", [1]), (), AnswerConstraints(ANSWERS).prepare(request, ReasoningState.BEFORE))
    (failed,) = made.take_to_frontend()
    assert isinstance(failed, TextFailed) and failed.code == "internal_error"


def test_constraints_that_were_prepared_for_another_end_of_the_prompt_are_not_used() -> None:
    """A truncated prompt may have lost the beginning of its reasoning."""
    prompt = TOKENIZER.encode("<|im_start|>assistant\n<think>\n").ids
    request = generate_of(
        id=ID,
        messages=(ChatMessage("user", "x"),),
        params=SamplingParams(),
        tools=tools("required"),
        truncate_prompt_tokens=1,
    )
    prepared = AnswerConstraints(ANSWERS).prepare(request, ReasoningState.WITHIN)
    made = Session(TABLE, ANSWERS)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
    made.begin(request)
    made.encoded(ID, array("i", prompt), (), prepared)
    (submit,) = made.take_to_scheduler()
    assert isinstance(submit, Submit) and submit.constraint.thinking is not None
    assert not submit.constraint.thinking.is_open


def large_tools(*, strict: bool, count: int = 60) -> ToolOptions:
    def values(tool: int, parameter: int) -> dict[str, Any]:
        return {"type": "string", "enum": [f"value {tool} {parameter} {i}" for i in range(20)]}

    definitions = [
        {
            "type": "function",
            "function": {
                "name": f"tool{tool}",
                "strict": strict,
                "parameters": {"type": "object", "properties": {f"p{i}": values(tool, i) for i in range(40)}},
            },
        }
        for tool in range(count)
    ]
    return ToolOptions(definitions=(*definitions, WEATHER), choice="required")


def test_schemas_of_tools_that_are_too_large_together_are_refused() -> None:
    made = session(tools=large_tools(strict=True))
    (failed,) = made.take_to_frontend()
    assert isinstance(failed, TextFailed)
    assert (failed.code, failed.param) == ("grammar_too_complex", "tools")
    assert made.take_to_scheduler() == []


@pytest.mark.parametrize("count", [10, 60])
def test_schemas_that_are_too_large_together_are_left_out_unless_they_are_strict(count: int) -> None:
    made = session(tools=large_tools(strict=False, count=count))
    (submit,) = made.take_to_scheduler()
    assert isinstance(submit, Submit) and not is_too_large(submit.constraint.grammar)
    assert ("value 3 2 1" in submit.constraint.grammar) == (count == 10)
    assert "tool9" in submit.constraint.grammar and "weather" in submit.constraint.grammar
