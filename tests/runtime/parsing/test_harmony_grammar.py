"""Grammars of answers in channels: what they allow is what the scanner understands."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import numpy as np
import pytest

from minisgl.grammar.grammars import Grammars
from minisgl.grammar.matcher import Matcher
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_grammar import CallableTool
from minisgl.parsing.detect import find_formats
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.text import StructuredOutput
from support.parsing.channels import AS_TEXT, HARMONY, IDS, pieces, replay
from support.tiny_tokenizers import byte_level, write_directory

TOKENIZER: Final = byte_level(tuple(IDS), added=())
TABLE: Final = TokenBytes(TOKENIZER)
ANSWERS: Final = find_formats(HARMONY, None, added_tokens(TOKENIZER))
ENDS: Final = [TOKENIZER.token_to_id("<|return|>"), TOKENIZER.token_to_id("<|call|>")]

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "city": {"type": "string", "maxLength": 8}},
    "required": ["id"],
    "additionalProperties": False,
}
TOOLS: Final = (CallableTool("weather", SCHEMA, True), CallableTool("now", {"type": "object"}, False))
CITY: Final = StructuredOutput("json", json.dumps(SCHEMA))
HEAD: Final = "<|start|>assistant"
THOUGHT: Final = "<|channel|>analysis<|message|>Hm.\n<|end|>" + HEAD
PREAMBLE: Final = "<|channel|>commentary<|message|>I look.<|end|>" + HEAD
CALL: Final = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"id": 1}'
FINAL: Final = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = write_directory(tmp_path_factory.mktemp("tokenizer"), TOKENIZER)
    return Grammars(directory, TOKENIZER.get_vocab_size(), ENDS)


def allows(matcher: Matcher, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = matcher.copy()
    return all(matcher.consume(token) for token in TOKENIZER.encode(text).ids) and matcher.can_end


def test_a_required_call_may_follow_reasoning_and_a_preamble(grammars: Grammars) -> None:
    matcher = grammars.matcher(answer_grammar(ANSWERS, ReasoningState.BEFORE, tools=TOOLS, must_call=True))
    for before in ("", THOUGHT, THOUGHT + THOUGHT, PREAMBLE, THOUGHT + PREAMBLE + THOUGHT):
        assert allows(matcher, before + CALL)
    assert allows(matcher, ' to=functions.now<|channel|>commentary json<|message|>{"a": null}')
    assert allows(matcher, CALL.replace(" <|constrain|>", "<|constrain|>"))
    for wrong in (
        *("", "Yes", THOUGHT, PREAMBLE, f"{FINAL}Yes", CALL + HEAD + CALL, CALL[:-1], f"{CALL}<|end|>"),
        *(CALL.replace("weather", "other"), CALL.replace("1", '"x"'), PREAMBLE + PREAMBLE + CALL),
    ):
        assert not allows(matcher, wrong)


def test_a_text_under_a_schema_is_in_the_final_channel(grammars: Grammars) -> None:
    matcher = grammars.matcher(answer_grammar(ANSWERS, ReasoningState.BEFORE, constraint=CITY))
    assert allows(matcher, f'{FINAL}{{"id": 1}}')
    assert allows(matcher, f'{THOUGHT}{FINAL}{{"id": 1}}')
    for wrong in ('{"id": 1}', f"{FINAL}Yes", '<|channel|>analysis<|message|>{"id": 1}', THOUGHT, CALL):
        assert not allows(matcher, wrong)


def test_a_schema_beside_tools_allows_both(grammars: Grammars) -> None:
    matcher = grammars.matcher(answer_grammar(ANSWERS, ReasoningState.BEFORE, tools=TOOLS, constraint=CITY))
    assert allows(matcher, f'{THOUGHT}{FINAL}{{"id": 1}}')
    assert allows(matcher, f"{THOUGHT}{CALL}")
    assert not allows(matcher, f"{FINAL}Yes")


def test_tools_that_need_not_be_called_leave_the_text_free(grammars: Grammars) -> None:
    matcher = grammars.matcher(answer_grammar(ANSWERS, ReasoningState.BEFORE, tools=TOOLS))
    assert allows(matcher, f"{THOUGHT}{FINAL}Yes")
    assert allows(matcher, f"{THOUGHT}{CALL}")
    assert not allows(matcher, CALL.replace("1", '"x"'))


@pytest.mark.parametrize(
    ("state", "fields", "right", "wrong"),
    [
        (ReasoningState.WITHIN, {"constraint": CITY}, f'So.<|end|>{HEAD}{FINAL}{{"id": 1}}', f'{FINAL}{{"id": 1}}'),
        (ReasoningState.WITHIN, {"tools": TOOLS, "must_call": True}, f"<|end|>{HEAD}{THOUGHT}{CALL}", CALL),
        (ReasoningState.BEHIND, {"constraint": CITY}, '{"id": 1}', f'{FINAL}{{"id": 1}}'),
        (ReasoningState.BEHIND, {"tools": TOOLS, "must_call": True}, f"So.<|end|>{HEAD}{CALL}", "So."),
        (ReasoningState.BEHIND, {"tools": TOOLS}, "So.", f"So.<|end|>{HEAD}{CALL[:-1]}"),
    ],
)
def test_a_grammar_continues_the_message_in_which_the_prompt_ends(
    grammars: Grammars, state: ReasoningState, fields: dict[str, Any], right: str, wrong: str
) -> None:
    matcher = grammars.matcher(answer_grammar(ANSWERS, state, **fields))
    assert allows(matcher, right)
    assert not allows(matcher, wrong)


def test_markers_may_be_text(grammars: Grammars) -> None:
    matcher = grammars.matcher(answer_grammar(AS_TEXT, ReasoningState.BEFORE, tools=TOOLS, constraint=CITY))

    def allows_text(text: str) -> bool:
        copy = matcher.copy()
        # Cut so that no marker becomes the token that this vocabulary has for it.
        ids = [token for character in text for token in TOKENIZER.encode(character).ids]
        return all(copy.consume(token) for token in ids) and copy.can_end

    assert allows_text(f'{THOUGHT}{FINAL}{{"id": 1}}')
    assert allows_text(f"{THOUGHT}{CALL}")
    assert not allows_text(f"{THOUGHT}Yes")


CLOSING: Final = (b'"', b"}", *(marker.encode() for marker in IDS))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_grammar_allows_is_understood(grammars: Grammars, seed: int) -> None:
    rng = random.Random(seed)
    matcher = grammars.matcher(answer_grammar(ANSWERS, ReasoningState.BEFORE, tools=TOOLS, constraint=CITY))
    mask = np.full((1, grammars.mask_words), -1, np.int32)
    tokens: list[int] = []
    while True:
        assert len(tokens) < 2000
        matcher.fill_mask(mask[0])
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
        closing = [token for token in allowed if TABLE.name(token) in CLOSING]
        token = rng.choice(closing if closing and (len(tokens) > 200 or rng.random() < 0.5) else allowed)
        if token in ENDS:
            break
        assert matcher.consume(token)
        tokens.append(token)
    text = b"".join(map(TABLE.name, tokens)).decode("utf-8", "replace")
    found = replay(ANSWERS, pieces(text), tools={tool.name: tool.schema for tool in TOOLS})
    (value,) = [arguments for _, arguments in found.calls] or [found.text.rpartition("\n\n")[2]]
    assert isinstance(json.loads(value), dict)
