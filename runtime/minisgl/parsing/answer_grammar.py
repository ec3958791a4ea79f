"""The grammar of a whole answer: its text, its tool calls, and reasoning where no token marks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl.grammar import lark
from minisgl.grammar.build import fragment
from minisgl.grammar.lark import Fragment
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_grammar import call_rules
from minisgl.parsing.call_rules import CallableTool, CallRules, marker
from minisgl.parsing.harmony_grammar import channel_grammar
from minisgl.parsing.llama_json import PYTHON_TAG
from minisgl.parsing.reasoning import ReasoningState
from minisgl.wire.text import StructuredOutput

_SOME_TEXT: Final = "/(?s:.+)/"
_LEAD: Final = r"CALL_LEAD: /\n{1,4}/"
"""Line breaks behind reasoning, which the scanner leaves out."""


def answer_grammar(
    answers: AnswerFormat,
    state: ReasoningState,
    *,
    tools: Sequence[CallableTool] = (),
    parallel: bool = True,
    must_call: bool = False,
    constraint: StructuredOutput | None = None,
) -> str:
    """Return the text of the grammar of an answer, behind its reasoning if tokens mark it. Raises GrammarError.

    `tools`: those that the answer may call. With `must_call` it consists of calls; otherwise an answer without calls is
    any text, or one that satisfies `constraint`.
    """
    if answers.in_channels:
        return channel_grammar(answers, state, tools=tools, must_call=must_call, constraint=constraint)
    rules: list[str] = []
    text = None if constraint is None or must_call else fragment(constraint, added_tokens=answers.added_tokens)
    calls = call_rules(answers, tools, parallel=parallel, must_call=must_call) if tools else None
    if calls is not None:
        rules += calls.rules
    if text is not None:
        body = _text_or_calls(answers, text, calls)
    elif must_call:
        assert calls is not None
        body = _calls(answers, calls)
    else:
        assert calls is not None
        body = _free_text_and_calls(answers, calls, rules)
    is_json = constraint is not None and constraint.kind == "json"
    if state is ReasoningState.WITHIN or (state is ReasoningState.BEFORE and (must_call or is_json)):
        rules.append(_LEAD)
        body = f"CALL_LEAD? ({body})"
    reasoning = answers.reasoning if answers.reasoning_tokens is None else None
    if reasoning is not None and state is not ReasoningState.BEHIND:
        rules.append(f"call_thought[lazy]: {lark.ANY_TEXT} {lark.literal(reasoning.end)}")
        begun = state is ReasoningState.WITHIN
        thought = "call_thought" if begun else f"({lark.literal(reasoning.start)} call_thought)?"
        body = f"{thought} ({body})"
    return lark.grammar("\n".join([f"start: {body}", *rules]), *([text] if text else []))


def _calls(answers: AnswerFormat, calls: CallRules) -> str:
    return f"{marker(answers, calls.start)} {calls.first}" if calls.start else calls.first


def _text_or_calls(answers: AnswerFormat, text: Fragment, calls: CallRules | None) -> str:
    if calls is None:
        return text.expression
    if PYTHON_TAG in answers.markers:
        # Without the tag, nothing but its name tells a call from an object under the constraint.
        if answers.markers[PYTHON_TAG].token is None:
            return text.expression
        return f"{text.expression} | {marker(answers, PYTHON_TAG)} {calls.first}"
    return f"{text.expression} | {_calls(answers, calls)}"


def _free_text_and_calls(answers: AnswerFormat, calls: CallRules, rules: list[str]) -> str:
    """Return an expression for any text and then calls, both of which may be missing; adds the rules it needs."""
    if not calls.start:
        rules.append(f"CALL_FREE: {calls.text}")
        return f"{calls.first} | CALL_FREE?"
    rules.append(f"CALL_FREE: {_SOME_TEXT}")
    if answers.markers[calls.start].token is not None:
        return f"CALL_FREE? ({_calls(answers, calls)})?"
    rules.append(f"call_head[lazy]: {lark.ANY_TEXT} {lark.literal(calls.start)}")
    return f"call_head {calls.first} | CALL_FREE?"
