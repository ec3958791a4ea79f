"""Calls in the forms that mistral-common 1.13 writes for versions 11 and 13 of Mistral's tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl.grammar.grammars import Grammars
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.call_text import call_text
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.token_bytes import added_tokens
from support.parsing.replay import Result, replay, tokens
from support.tiny_tokenizers import byte_level, write_directory

ARGUMENTS: Final[dict[str, Any]] = {"city": 'Köln "x"\n', "days": 2, "l": [1, None, True]}
CALLS: Final[list[Any]] = [("weather", ARGUMENTS), ("now", {})]
VERSION_11: Final = (
    '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Köln \\"x\\"\\n", "days": 2, "l": [1, null, true]}'
    "[TOOL_CALLS]now[CALL_ID]abcdefghj[ARGS]{}"
)
VERSION_13: Final = (
    '[TOOL_CALLS]weather[ARGS]{"city": "Köln \\"x\\"\\n", "days": 2, "l": [1, null, true]}[TOOL_CALLS]now[ARGS]{}'
)
TOKENS: Final = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
TOKENIZER: Final = byte_level(added=TOKENS)
ANSWERS: Final = find_formats(Parsers(tool_calls="mistral", reasoning="mistral"), None, added_tokens(TOKENIZER))

both_versions = pytest.mark.parametrize("written", [VERSION_11, VERSION_13], ids=["v11", "v13"])


@both_versions
def test_calls_are_read(written: str) -> None:
    found = replay(ANSWERS, tokens(ANSWERS, f"[THINK]hm[/THINK]Look.{written}"))
    assert (found.reasoning, found.text) == ("hm", "Look.")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == CALLS


@both_versions
def test_calls_that_are_required_have_these_forms(tmp_path: Path, written: str) -> None:
    directory = write_directory(tmp_path, TOKENIZER)
    end = added_tokens(TOKENIZER)["<|im_end|>"]
    tools = [CallableTool(name, {"type": "object"}, False) for name, _ in CALLS]
    grammar = answer_grammar(ANSWERS, ReasoningState.BEHIND, tools=tools, must_call=True)
    matcher = Grammars(directory, TOKENIZER.get_vocab_size(), [end]).matcher(grammar)
    assert all(map(matcher.consume, TOKENIZER.encode(written).ids)) and matcher.can_end


def test_calls_in_prompts_have_the_newer_form() -> None:
    assert call_text(ANSWERS, CALLS) == VERSION_13


def test_a_marker_in_letters_is_text() -> None:
    assert replay(ANSWERS, list(VERSION_13), ReasoningState.BEHIND) == Result("", VERSION_13, [])
