"""Chat templates of further families: their formats are found, and prompts have tools, calls, results and reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest

from minisgl.errors import PromptError
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.described_tools import with_calls_as_text
from minisgl.wire.text import ChatMessage, ToolOptions
from support.frontend.family_templates import FAMILIES
from support.parsing.replay import replay, tokens

SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS: Final = {"city": 'Köln "x"', "days": 2}
CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
LOOP: Final = (
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", None, reasoning="I look it up.", tool_calls=[CALL]),
    ChatMessage("tool", '{"sky": "blue"}', tool_call_id="abcdefghi"),
)
KEEP_REASONING: Final = (
    "seed-oss",
    "exaone4",
    "ernie45",
    "mistral",
    "magistral",
    "gemma4",
    "glm45",
    "glm47",
    "minimax-m2",
)
"""Families whose templates, as written here, show the reasoning of a loop that goes on."""

with_tools = pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])


def formats(name: str) -> AnswerFormat:
    family = FAMILIES[name]
    return find_formats(Parsers(), family.template, {text: 100 + n for n, text in enumerate(family.tokens)})


def rendered(name: str, messages: Sequence[ChatMessage] = LOOP, **options: Any) -> str:
    """Return the prompt as the encoder makes it."""
    template = ChatTemplate(FAMILIES[name].template, SPECIAL)
    if not template.features.takes_tool_calls and FAMILIES[name].tools:
        takes_results = template.features.takes_role("tool")
        messages = with_calls_as_text(messages, formats(name), takes_results=takes_results)
    return template.render(messages, tools=ToolOptions(definitions=(WEATHER,)), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_of_families_are_found(name: str) -> None:
    found = formats(name)
    assert (found.tools.name if found.tools else None) == FAMILIES[name].tools
    assert (found.reasoning.name if found.reasoning else None) == FAMILIES[name].reasoning
    assert {marker.text for marker in found.by_token.values()} == {*FAMILIES[name].tokens} - {
        "<response>",
        "</response>",
    }


@with_tools
def test_a_loop_with_tools_has_them_and_its_call_and_result(name: str) -> None:
    text = rendered(name)
    definition, _, loop = text.partition("Weather?")
    assert "weather" in definition
    assert "blue" in loop.partition("Köln")[2]
    assert ("I look it up." in loop) == (name in KEEP_REASONING)


@with_tools
def test_calls_of_a_prompt_are_read_as_the_calls_that_they_were(name: str) -> None:
    answers = formats(name)
    assert answers.tools is not None
    loop = rendered(name).partition("Weather?")[2]
    begin = min(at for start in answers.tools.starts if (at := loop.find(start)) >= 0)
    parameters = {"weather": WEATHER["function"]["parameters"]}
    found = replay(answers, tokens(answers, loop[begin:]), ReasoningState.BEHIND, parameters)
    ((called, arguments),) = found.calls
    assert (called, json.loads(arguments)) == ("weather", ARGUMENTS)


def test_gemmas_results_are_part_of_the_turn_with_their_calls() -> None:
    text = rendered("gemma4")
    assert text.endswith(
        '<|tool_call>call:weather{city:<|"|>Köln "x"<|"|>,days:2}<tool_call|>'
        '<|tool_response>response:weather{sky:<|"|>blue<|"|>}<tool_response|><|channel>thought\n<channel|>'
    )
    loop = (*LOOP[:2], ChatMessage("tool", "blue", tool_call_id="abcdefghi"))
    assert '<|tool_response>response:weather{value:<|"|>blue<|"|>}' in rendered("gemma4", loop)
    # A result without a call has a message of its own.
    assert "<|turn>tool\nblue" in rendered("gemma4", [ChatMessage("user", "Hi"), ChatMessage("tool", "blue")])


def test_tools_of_phi_are_a_text_of_the_system_message() -> None:
    text = rendered("phi4-mini")
    functions = json.dumps([WEATHER["function"]])
    assert text.startswith(f"<|system|><|tool|>{functions}<|/tool|><|end|><|user|>Weather?<|end|>")
    assert '<|tool_response|>{"sky": "blue"}<|end|>' in text
    system = (ChatMessage("system", "Be kind."), *LOOP)
    assert rendered("phi4-mini", system).startswith(f"<|system|>Be kind.<|tool|>{functions}")
    assert "<|tool|>" not in ChatTemplate(FAMILIES["phi4-mini"].template, SPECIAL).render(LOOP[:1])


def test_reasoning_of_magistral_is_a_part_of_the_content() -> None:
    answer = ChatMessage("assistant", "Yes", reasoning="hm")
    assert "[THINK]hm[/THINK]Yes</s>" in rendered("magistral", [LOOP[0], answer, LOOP[0]])
    template = ChatTemplate(FAMILIES["magistral"].template, SPECIAL)
    text = template.render([LOOP[0], answer], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("[THINK]hm[/THINK]Yes")


def test_variables_of_smollm3_can_be_given_and_tools_fill_the_one_that_is_not() -> None:
    assert str(WEATHER) in rendered("smollm3")
    assert str(WEATHER) not in rendered("smollm3", variables={"xml_tools": ["mine"]})
    assert "/no_think" in rendered("smollm3", thinking=False)
    assert rendered("smollm3", thinking=False).endswith("<think>\n\n</think>\n")


def test_a_budget_of_zero_switches_the_reasoning_of_seed_oss_off() -> None:
    for options in (
        {"thinking": False},
        {"variables": {"enable_thinking": False}},
        {"variables": {"thinking_budget": 0}},
    ):
        assert rendered("seed-oss", **options).endswith("<seed:think><seed:cot_budget_reflect>")
    assert "budget 512" in rendered("seed-oss", variables={"thinking_budget": 512})
    assert rendered("seed-oss", thinking=True).endswith("<seed:bos>assistant\n")


def test_a_template_without_tools_refuses_what_must_be_called() -> None:
    options = ToolOptions(definitions=(WEATHER,), choice="required")
    template = ChatTemplate(FAMILIES["gemma3"].template, SPECIAL)
    with pytest.raises(PromptError, match="does not support tools"):
        template.render(LOOP[:1], tools=options)
    with pytest.raises(PromptError, match="Roles must alternate"):
        template.render([LOOP[0], LOOP[0]])


def test_tools_get_what_a_template_reads_of_all_of_them() -> None:
    bare = ToolOptions(definitions=({"type": "function", "function": {"name": "now"}},))
    text = ChatTemplate(FAMILIES["seed-oss"].template, SPECIAL).render(LOOP[:1], tools=bare)
    assert "# \ndef now()" in text
    text = ChatTemplate(FAMILIES["glm45"].template, SPECIAL).render(LOOP[:1], tools=bare)
    assert '{"type": "function", "function": {"name": "now"}}\n' in text
