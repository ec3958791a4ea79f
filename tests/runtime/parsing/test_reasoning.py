"""Where reasoning begins and ends: in the prompt, and in the answer."""

from __future__ import annotations

from array import array
from typing import Any, Final

import pytest

from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers, ReasoningParser
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.answer_scanner import reasoning_state
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage
from support.messages import generate_of
from support.parsing.replay import Result, replay
from support.tiny_tokenizers import byte_level

BEFORE, WITHIN, BEHIND = ReasoningState.BEFORE, ReasoningState.WITHIN, ReasoningState.BEHIND


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", BEFORE),
        ("<|im_start|>assistant\n<think>\n", WITHIN),
        ("<|im_start|>assistant\n<think>\nI wonder", WITHIN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", BEHIND),
        ("<|im_start|>assistant\n<think>Hm.</think>\n\nThe answer", BEHIND),
        ("<|im_start|>assistant\n<think>a</think><|im_end|>\n<|im_start|>assistant\n", BEFORE),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", BEFORE),
        ("no special tokens", BEFORE),
    ],
)
def test_the_tail_of_the_prompt_decides(prompt: str, state: ReasoningState, has_tokens: bool) -> None:
    tokenizer = byte_level(added=("<think>", "</think>") if has_tokens else ())
    answers = find_formats(Parsers(reasoning="qwen3"), None, added_tokens(tokenizer))
    request = generate_of(id=b"", messages=(ChatMessage("user", "Hi"),), params=SamplingParams())
    tokens = array("i", tokenizer.encode(prompt).ids)
    assert reasoning_state(request, answers, TokenBytes(tokenizer), tokens) is state
    completion = generate_of(id=b"", prompt=prompt, params=SamplingParams())
    assert reasoning_state(completion, answers, TokenBytes(tokenizer), tokens) is BEHIND


def test_a_note_of_the_budget_is_within_the_reasoning_of_seed_oss() -> None:
    special = ("<seed:bos>", "<seed:cot_budget_reflect>", "<seed:think>", "</seed:think>")
    tokenizer = byte_level(special=special)
    answers = find_formats(Parsers(reasoning="seed_oss"), None, added_tokens(tokenizer))
    request = generate_of(id=b"", messages=(ChatMessage("user", "Hi"),), params=SamplingParams())
    for prompt, state in (("<seed:think><seed:cot_budget_reflect>", WITHIN), ("", BEFORE)):
        tokens = array("i", tokenizer.encode(f"<seed:think>a</seed:think><seed:bos>assistant\n{prompt}").ids)
        assert reasoning_state(request, answers, TokenBytes(tokenizer), tokens) is state


def scanned(text: str, state: ReasoningState, parser: ReasoningParser = "qwen3", **options: bool) -> Result:
    answers = find_formats(Parsers(reasoning=parser), None, {})
    whole = replay(answers, [text], state, None, **options)
    assert replay(answers, text, state, None, **options) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "state", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", BEFORE, "Hm.", "Yes.\n"),
        ("<think>Hm.</think>Yes", BEFORE, "Hm.", "Yes"),
        ("\n <think>Hm.</think>Yes", BEFORE, "Hm.", "Yes"),
        ("<think>\n\n</think>\n\nYes", BEFORE, "", "Yes"),
        ("Hm.\n</think>\n\n  Yes", WITHIN, "Hm.", "  Yes"),
        ("<think>\nHm.</think>Yes", WITHIN, "Hm.", "Yes"),
        ("Hm.\n\nWhat if\n</think>", WITHIN, "Hm.\n\nWhat if", ""),
        ("<think>a</think>b<think>c</think>", BEFORE, "a", "b<think>c</think>"),
        ("Yes <think>a</think>", BEFORE, "", "Yes <think>a</think>"),
        ("\n\nYes", BEFORE, "", "\n\nYes"),
        ("<think>a</think>b", BEHIND, "", "<think>a</think>b"),
        ("<think>never\nended\n", BEFORE, "never\nended\n", ""),
        ("<thin", BEFORE, "", "<thin"),
        ("Hm </thin", WITHIN, "Hm </thin", ""),
        ("", BEFORE, "", ""),
        ("\n", WITHIN, "", ""),
    ],
)
def test_reasoning_and_text(text: str, state: ReasoningState, reasoning: str, content: str) -> None:
    assert scanned(text, state) == Result(reasoning, content, [])


def test_reasoning_may_begin_without_its_marker() -> None:
    """Where the model always reasons, and neither template nor answer has the marker."""
    assert scanned("Hm.</think>Yes", BEFORE, "deepseek_r1") == Result("Hm.", "Yes", [])
    assert scanned("<think>Hm.</think>Yes", BEFORE, "deepseek_r1") == Result("Hm.", "Yes", [])
    assert scanned("Yes", BEHIND, "deepseek_r1") == Result("", "Yes", [])


def test_reasoning_that_always_comes_is_open_before_it_begins() -> None:
    tokenizer = byte_level()
    answers = find_formats(Parsers(reasoning="deepseek_r1"), None, added_tokens(tokenizer))
    request = generate_of(id=b"", messages=(ChatMessage("user", "Hi"),), params=SamplingParams())
    for prompt, state in (("<|im_start|>", WITHIN), ("<|im_start|><think></think>", BEHIND)):
        tokens = array("i", tokenizer.encode(prompt).ids)
        assert reasoning_state(request, answers, TokenBytes(tokenizer), tokens) is state


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", "[THINK]Hm.[/THINK]Yes"),
        ("kimi", "◁think▷Hm.◁/think▷Yes"),
        ("seed_oss", "<seed:think>Hm.</seed:think>Yes"),
        ("granite", "Here is my thought process:\nHm.\nHere is my response:\nYes"),
    ],
)
def test_other_markers(parser: ReasoningParser, text: str) -> None:
    assert scanned(text, BEFORE, parser) == Result("Hm.", "Yes", [])


def test_reasoning_can_stay_in_the_text() -> None:
    text = "\n<think>\nHm.\n</think>\n\nYes\n"
    assert scanned(text, BEFORE, separate_reasoning=False) == Result("", text, [])


def test_calls_within_reasoning_do_not_count() -> None:
    answers = find_formats(Parsers(tool_calls="hermes", reasoning="qwen3"), None, {})
    call = '<tool_call>{"name": "now"}</tool_call>'
    for separate in (True, False):
        found = replay(answers, [f"<think>{call}</think>{call}"], BEFORE, {"now": {}}, separate_reasoning=separate)
        assert found.calls == [("now", "{}")]
        assert call in (found.reasoning if separate else found.text)


RESPONSE: Final = ("</think>\n\n<response>\nIt is <b>.\n</response>\n", "It is <b>.")


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "shown"),
    [
        ("ernie45", f"hm\n{RESPONSE[0]}", "hm", RESPONSE[1]),
        ("hunyuan_a13b", "hm\n</think>\n<answer>\nYes </answer> no\n</answer>", "hm", "Yes </answer> no"),
        ("hunyuan_a13b", "hm\n</think>\n<answer>\nYes </ans", "hm", "Yes </ans"),
        ("hunyuan_a13b", "hm\n</think>\n<answers>\n</answer>", "hm", "<answers>\n</answer>"),
        ("hunyuan_a13b", "hm\n</think>\nYes <answer>a</answer>", "hm", "Yes <answer>a</answer>"),
        ("hunyuan_a13b", "hm\n</think>\n<answer>", "hm", ""),
        ("qwen3", f"hm\n{RESPONSE[0]}", "hm", "<response>\nIt is <b>.\n</response>\n"),
    ],
)
@pytest.mark.parametrize("tools", [None, {"now": {}}])
def test_tags_around_a_whole_answer_are_left_out(
    parser: ReasoningParser, text: str, reasoning: str, shown: str, tools: Any
) -> None:
    answers = find_formats(Parsers(tool_calls="hermes", reasoning=parser), None, {})
    whole = replay(answers, [text], ReasoningState.WITHIN, tools)
    assert whole == Result(reasoning, shown, [])
    for place in range(1, len(text)):
        assert replay(answers, [text[:place], text[place:]], ReasoningState.WITHIN, tools) == whole
    assert replay(answers, text, ReasoningState.WITHIN, tools) == whole


@pytest.mark.parametrize("text", ["<answer>\nLook:\n{}\n</answer>", "<answer>\nLook:\n</answer>\n{}"])
def test_calls_within_and_behind_the_tags_of_an_answer_are_calls(text: str) -> None:
    answers = find_formats(Parsers(tool_calls="hermes", reasoning="hunyuan_a13b"), None, {})
    text = text.format('<tool_call>\n{"name": "now"}\n</tool_call>')
    for pieces in ([text], list(text)):
        assert replay(answers, pieces, ReasoningState.BEHIND) == Result("", "Look:", [("now", "{}")])


def test_the_name_of_gemmas_channel_is_no_part_of_the_reasoning() -> None:
    answers = find_formats(Parsers(reasoning="gemma4"), None, {"<|channel>": 100, "<channel|>": 101})
    for pieces in (
        ["<|channel>", "thought\nhm <b>\n", "<channel|>", "Yes"],
        ["<|channel>", "tho", "ught", "\nhm", " <b>\n", "<channel|>", "Yes"],
    ):
        assert replay(answers, pieces) == Result("hm <b>", "Yes", [])
    assert replay(answers, ["<|channel>", "though", "<channel|>", "Yes"]) == Result("though", "Yes", [])
