"""Answers in channels in the messages of a session: their parts, tokens, and constraints."""

from __future__ import annotations

from array import array
from typing import Any, Final

import pytest

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.answer_scanner import reasoning_state
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.messages import UNCONSTRAINED, Ack, FinishReason, SamplingParams, Submit
from minisgl.wire.text import ChatMessage, Finished, StructuredOutput, TextFailed, Texts, ToolOptions
from support.frontend.fake_scheduler import card, row
from support.messages import generate_of
from support.parsing.channels import AS_TEXT, HARMONY, IDS
from support.tiny_tokenizers import byte_level

TOKENIZER: Final = byte_level(tuple(IDS), added=())
TABLE: Final = TokenBytes(TOKENIZER)
ANSWERS: Final = find_formats(HARMONY, None, added_tokens(TOKENIZER))
ID: Final = b"a" * 16
WEATHER: Final = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HEAD: Final = "<|start|>assistant"
THOUGHT: Final = "<|channel|>analysis<|message|>Hm.<|end|>"
PREAMBLE: Final = "<|channel|>commentary<|message|>I look.<|end|>"
CALL: Final = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>'

Event = tuple[str, str]


def session(prompt: str = HEAD, *, answers: AnswerFormat = ANSWERS, **fields: Any) -> Session:
    made = Session(TABLE, answers)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
    assert made.begin(generate_of(id=ID, messages=(ChatMessage("user", "Hello"),), **fields))
    made.encoded(ID, array("i", TOKENIZER.encode(prompt).ids))
    if ID in made:
        made.acked(Ack(ID))
        made.take_to_frontend()
    return made


def events(made: Session, text: str, finish: FinishReason = "stop") -> tuple[list[Event], Finished]:
    """Return what the frontend receives, pieces of one kind joined, and the end of the answer."""
    tokens = TOKENIZER.encode(text).ids
    found: list[Event] = []
    finished: list[Finished] = []

    def add(kind: str, piece: str) -> None:
        if piece and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + piece)
        elif piece:
            found.append((kind, piece))

    for index, token in enumerate(tokens):
        made.tokens(row(ID, index, token, finish if index == len(tokens) - 1 else None))
        for reply in made.take_to_frontend():
            assert isinstance(reply, Texts)
            for number, (_, piece) in enumerate(reply.rows()):
                add("reasoning", reply.reasoning.get(number, ""))
                add("text", piece)
                for delta in reply.tool_calls.get(number, ()):
                    add(delta.name or "arguments", delta.name or delta.arguments)
            finished += reply.finished
    return found, finished[0]


def test_parts_arrive_in_their_order_and_reasoning_is_counted_apart() -> None:
    made = session(tools=ToolOptions(definitions=(WEATHER,)))
    found, end = events(made, f"{THOUGHT}{HEAD}{PREAMBLE}{HEAD}{THOUGHT}{HEAD}{CALL}")
    assert found == [
        *(("reasoning", "Hm."), ("text", "I look."), ("reasoning", "\n\nHm.")),
        *(("weather", "weather"), ("arguments", '{"city": "Bonn"}')),
    ]
    assert end.tool_calls == 1
    thought = len(TOKENIZER.encode(THOUGHT).ids)
    # The marker that ends a text, and the words before the channel, belong to what follows.
    assert 2 * thought <= end.reasoning_tokens <= 2 * thought + len(TOKENIZER.encode(HEAD).ids) + 1


def test_text_that_is_held_back_for_a_stop_string_keeps_its_order() -> None:
    made = session(params=SamplingParams(stop=("I look.assistantanalysisHm.!",)))
    found, _ = events(made, f"{PREAMBLE}{HEAD}{THOUGHT}{HEAD}<|channel|>final<|message|>Yes<|return|>")
    assert found == [("text", "I look."), ("reasoning", "Hm."), ("text", "\n\nYes")]


def test_an_answer_that_is_cut_within_a_header_loses_nothing() -> None:
    found, _ = events(session(), f"{THOUGHT}{HEAD}<|channel|>fin", "length")
    assert found == [("reasoning", "Hm."), ("text", "assistantfin")]


def test_special_tokens_in_the_text_are_only_those_that_are_no_headers() -> None:
    made = session(skip_special_tokens=False)
    found, _ = events(made, f"{THOUGHT}{HEAD}<|channel|>final<|message|>a<|channel|>b<|return|>")
    assert found == [("reasoning", "Hm."), ("text", "a<|channel|>b")]


def test_reasoning_stays_in_the_text_on_request() -> None:
    found, end = events(session(separate_reasoning=False), f"{THOUGHT}{HEAD}<|channel|>final<|message|>Yes<|return|>")
    assert found == [("text", "analysisHm.assistantfinalYes")]
    assert end.reasoning_tokens == 0


def test_completions_are_plain_text() -> None:
    made = Session(TABLE, ANSWERS)
    made.open(card(vocab_size=TOKENIZER.get_vocab_size()))
    assert made.begin(generate_of(id=ID, prompt=HEAD))
    made.encoded(ID, array("i", TOKENIZER.encode(HEAD).ids))
    made.acked(Ack(ID))
    made.take_to_frontend()
    assert events(made, "<|channel|>final<|message|>Yes")[0] == [("text", "finalYe")]


@pytest.mark.parametrize("answers", [ANSWERS, AS_TEXT], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        (HEAD, ReasoningState.BEFORE),
        ("", ReasoningState.BEFORE),
        (f"{HEAD}{THOUGHT}{HEAD}", ReasoningState.BEFORE),
        (f"{HEAD}<|channel|>analysis<|message|>Hm", ReasoningState.WITHIN),
        (f"{HEAD}{THOUGHT}{HEAD}<|channel|>final<|message|>So", ReasoningState.BEHIND),
        (f"{HEAD}<|channel|>final<|message|>", ReasoningState.BEHIND),
        (f"{HEAD}<|channel|>analysis", ReasoningState.BEFORE),
    ],
)
def test_a_prompt_ends_before_or_within_a_message(answers: AnswerFormat, prompt: str, state: ReasoningState) -> None:
    request = generate_of(id=ID, messages=(ChatMessage("user", "Hello"),))
    assert reasoning_state(request, answers, TABLE, array("i", TOKENIZER.encode(prompt).ids)) is state


CITY: Final = StructuredOutput("json", '{"type": "object"}')


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tools": ToolOptions(definitions=(WEATHER,))}, False),
        ({"tools": ToolOptions(definitions=(WEATHER,), choice="required")}, True),
        ({"tools": ToolOptions(definitions=(WEATHER,), choice="named", name="weather")}, True),
        ({"structured_output": CITY}, True),
    ],
)
def test_a_grammar_has_the_reasoning_in_it(fields: dict[str, Any], has_grammar: bool) -> None:
    (submit,) = session(**fields).take_to_scheduler()
    assert isinstance(submit, Submit)
    assert submit.constraint.thinking == UNCONSTRAINED.thinking
    assert ("analysis" in submit.constraint.grammar) == has_grammar


@pytest.mark.parametrize(
    ("eos", "params", "added"),
    [
        ((), {}, ("<|return|>", "<|call|>")),
        (("<|return|>",), {}, ("<|call|>",)),
        (("<|return|>", "<|call|>"), {}, ()),
        ((), {"ignore_eos": True}, ()),
    ],
)
def test_calls_end_answers_even_where_the_checkpoint_does_not_say_so(
    eos: tuple[str, ...], params: dict[str, Any], added: tuple[str, ...]
) -> None:
    made = Session(TABLE, ANSWERS)
    ids = tuple(map(TOKENIZER.token_to_id, eos))
    made.open(card(vocab_size=TOKENIZER.get_vocab_size(), eos_token_ids=ids))
    request = generate_of(id=ID, messages=(ChatMessage("user", "Hi"),), params=SamplingParams(**params))
    assert made.begin(request)
    made.encoded(ID, array("i", [1]))
    (submit,) = made.take_to_scheduler()
    assert isinstance(submit, Submit)
    assert submit.params.stop_token_ids == tuple(map(TOKENIZER.token_to_id, added))


def test_reasoning_has_no_budget() -> None:
    (failed,) = session(thinking_budget=5).take_to_frontend()
    assert isinstance(failed, TextFailed) and failed.param == "thinking_token_budget"


def test_a_tool_parser_alone_leaves_reasoning_in_the_text() -> None:
    answers = find_formats(Parsers(tool_calls="openai", reasoning="none"), None, added_tokens(TOKENIZER))
    found, _ = events(session(answers=answers, tools=ToolOptions(definitions=(WEATHER,))), f"{THOUGHT}{HEAD}{CALL}")
    assert found[0] == ("text", "analysisHm.") and found[1][0] == "weather"
