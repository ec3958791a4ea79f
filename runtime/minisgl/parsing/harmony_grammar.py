"""The grammar of an answer in channels: its reasoning, and then a call or a final text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl.grammar import lark
from minisgl.grammar.build import fragment
from minisgl.parsing import harmony
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_rules import CallableTool, marker
from minisgl.parsing.reasoning import ReasoningState
from minisgl.wire.text import StructuredOutput

_THOUGHTS: Final = "channel_thought*"
_CALL: Final = f"{_THOUGHTS} (channel_preamble {_THOUGHTS})? channel_call"


def channel_grammar(
    answers: AnswerFormat,
    state: ReasoningState,
    *,
    tools: Sequence[CallableTool],
    must_call: bool,
    constraint: StructuredOutput | None,
) -> str:
    """Return the text of the grammar, as `answer_grammar` does, but with the reasoning. An answer has one call: the
    marker behind it ends the answer. Raises GrammarError."""
    start, channel, message, end = (
        marker(answers, text) for text in (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END)
    )
    is_token = answers.markers[harmony.END].token is not None
    text = None if constraint is None or must_call else fragment(constraint, added_tokens=answers.added_tokens)
    final = lark.ANY_TEXT if text is None else text.expression
    rules = [
        f"channel_rest{'' if is_token else '[lazy]'}: {lark.ANY_TEXT} {end}",
        f"channel_next: channel_rest {start} {lark.literal(harmony.ROLE)}",
        f'channel_thought: {channel} "analysis" {message} channel_next',
        f'channel_preamble: {channel} "commentary" {message} channel_next',
    ]
    if tools:
        rules += _calls(answers, tools)
    final_message = f'{_THOUGHTS} {channel} "final" {message} ({final})'
    choices = [] if must_call else [final_message]
    choices += [_CALL] if tools else []
    rest = lark.one_of(choices)
    if state is ReasoningState.BEHIND:
        # The prompt ends within the text.
        choices = [] if must_call else [final]
        choices += [f"channel_next {_CALL}"] if tools else []
        body = lark.one_of(choices)
    else:
        body = rest if state is ReasoningState.BEFORE else f"channel_next {rest}"
    return lark.grammar("\n".join([f"start: {body}", *rules]), *([] if text is None else [text]))


def _calls(answers: AnswerFormat, tools: Sequence[CallableTool]) -> list[str]:
    """Return rules for a call of one of the tools, with its recipient before or behind the channel."""
    channel, constrain = marker(answers, harmony.CHANNEL), marker(answers, harmony.CONSTRAIN)
    names = [f"channel_call_{number}" for number in range(len(tools))]
    rules = [f"channel_call: {lark.one_of(names)}", f'channel_type: (" "? {constrain} "json" | " json")?']
    for name, tool in zip(names, tools, strict=True):
        recipient = f" to={harmony.NAMESPACE}{tool.name}"
        header = lark.one_of(
            [
                f"{channel} {lark.literal(f'commentary{recipient}')}",
                f'{lark.literal(recipient)} {channel} "commentary"',
            ]
        )
        arguments = tool.value(tool.schema)
        rules.append(f"{name}: {header} channel_type {marker(answers, harmony.MESSAGE)} {arguments}")
    return rules
