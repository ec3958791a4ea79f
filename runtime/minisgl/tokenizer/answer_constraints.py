"""Constraints of an answer that the engine applies: its grammar, and the markers and limit of its reasoning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from minisgl.errors import GrammarError, PromptError
from minisgl.grammar.library import is_too_large
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.answer_grammar import answer_grammar
from minisgl.parsing.call_rules import CallableTool
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.callable_tools import callable_tools
from minisgl.wire.messages import UNCONSTRAINED, AnswerConstraint, Thinking
from minisgl.wire.text import Generate

logger = logging.getLogger(__name__)

_ANY_ARGUMENTS: Final = {"type": "object"}


class PreparedConstraints(NamedTuple):
    """Constraints that were built ahead, or the error of building them."""

    state: ReasoningState
    """State of the prompt for which they were built; another one needs other constraints."""
    result: AnswerConstraint | PromptError | GrammarError

    def take(self) -> AnswerConstraint:
        """Return the constraints. Raises PromptError and GrammarError."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class AnswerConstraints:
    """Constraints of the answers in one format. The last ones are kept: a request with a large schema may have many
    choices, which follow each other."""

    def __init__(self, answers: AnswerFormat) -> None:
        self._answers = answers
        self._key = b""
        self._last = UNCONSTRAINED

    def of(self, generate: Generate, state: ReasoningState) -> AnswerConstraint:
        """Return the constraints of an answer. Raises PromptError and GrammarError."""
        options = generate.options
        if options.structured_output is None and options.tools is None and options.thinking_budget is None:
            return UNCONSTRAINED
        # Equal values need not be the same schema: 1, 1.0 and true are equal.
        fields = (options.structured_output, options.tools, options.thinking_budget, options.soft_limits)
        key = msgspec.msgpack.encode((state.name, generate.messages is None, *fields))
        if key != self._key:
            self._last = answer_constraints(generate, self._answers, state)
            self._key = key
        return self._last

    def prepare(self, generate: Generate, state: ReasoningState) -> PreparedConstraints:
        """Build the constraints of an answer ahead, on any thread: a large schema takes a tenth of a second."""
        try:
            return PreparedConstraints(state, self.of(generate, state))
        except (PromptError, GrammarError) as error:
            return PreparedConstraints(state, error)
        except BaseException:  # a panic of the library is no Exception
            logger.exception("the constraints of an answer could not be prepared")
            message = "the tools or the schema could not be read; report it with the log of the tokenizer worker"
            return PreparedConstraints(state, PromptError("internal_error", message))


def answer_constraints(generate: Generate, answers: AnswerFormat, state: ReasoningState) -> AnswerConstraint:
    """Return the constraints of an answer. Raises PromptError and GrammarError."""
    options = generate.options
    if options.structured_output is None and options.tools is None and options.thinking_budget is None:
        return UNCONSTRAINED
    grammar = _grammar(generate, answers, state)
    budget = -1 if options.thinking_budget is None else options.thinking_budget
    markers = answers.reasoning_tokens
    if budget >= 0 and not options.soft_limits and (markers is None or generate.messages is None):
        raise PromptError(
            "unsupported_parameter",
            "the reasoning of this answer cannot be limited: it is no chat, or the model's vocabulary has no tokens "
            "that mark reasoning",
            "thinking_token_budget",
        )
    if markers is None or state is ReasoningState.BEHIND or (not grammar and budget < 0):
        return AnswerConstraint(grammar=grammar)
    start, end = markers
    is_open = state is ReasoningState.WITHIN
    # With a grammar, reasoning begins with the first token or not at all.
    lead = answers.reasoning_lead if grammar else ()
    thinking = Thinking(start=(*lead, start), end=(end,), is_open=is_open, budget=budget)
    return AnswerConstraint(grammar=grammar, thinking=thinking)


def needs_grammar(generate: Generate) -> bool:
    """Return whether the answer may not be any text. Building its grammar may take long."""
    options = generate.options.tools
    if generate.options.structured_output is not None:
        return True
    if options is None or options.choice == "none":
        return False
    is_strict = any(definition["function"].get("strict") is True for definition in options.definitions)
    return options.choice != "auto" or not options.parallel or is_strict


def _grammar(generate: Generate, answers: AnswerFormat, state: ReasoningState) -> str:
    """Return the text of the grammar; empty if the answer may be any text."""
    constraint, options = generate.options.structured_output, generate.options.tools
    tools = callable_tools(generate, answers)
    if not needs_grammar(generate):
        return ""
    if options is None or not tools:
        return "" if constraint is None else answer_grammar(answers, state, constraint=constraint)

    def grammar(tools: Sequence[CallableTool]) -> str:
        return answer_grammar(
            answers,
            state,
            tools=tools,
            parallel=options.parallel and options.choice != "named",
            must_call=options.choice != "auto",
            constraint=constraint,
        )

    text = grammar(tools)
    if not is_too_large(text):
        return text
    if not all(tool.is_strict for tool in tools):
        text = grammar([tool if tool.is_strict else tool._replace(schema=_ANY_ARGUMENTS) for tool in tools])
    if is_too_large(text):
        raise PromptError(
            "grammar_too_complex",
            "the schemas of these tools are too large together; send fewer tools, or simpler parameters",
            "tools",
        )
    return text
