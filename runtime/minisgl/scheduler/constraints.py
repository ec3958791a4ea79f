"""What single requests may generate next: grammar, reasoning, allowed tokens and bad words, as one mask per row.

The device applies the masks, before top-k, top-p and min-p. The steps of constrained rows are late: the masks depend
on the token before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from minisgl.errors import CodedError
from minisgl.scheduler.reasoning import Reasoning
from minisgl.wire.messages import Submit
from minisgl.wire.plan import IntArray

if TYPE_CHECKING:
    # Processes that only read configurations do not need llguidance.
    from minisgl.grammar.grammars import Grammars
    from minisgl.grammar.matcher import Matcher


_OPEN_SHARE: Final = 0.05
"""Share of the vocabulary from which on a mask is open. Nine in ten of the masks that take longest follow such a mask,
because they are of free text too."""
_SAMPLED_WORDS: Final = 7
"""Words of each mask that are counted for that. For arrays of more than 500 elements numpy releases the interpreter
lock, which would make the step loop and this thread wait for each other."""

_MANY_TOKENS: Final = 32
"""Tokens that take about as long to consume as another thread to wake."""


class ConstraintError(CodedError):
    """A request cannot continue under its constraint."""


class Vocabulary:
    """Token ids of a model, as masks need them."""

    def __init__(self, size: int, eos_ids: Sequence[int]) -> None:
        self.size = size
        self.words = -(-size // 32)
        self.eos_ids = frozenset(token for token in eos_ids if 0 <= token < size)
        self.eos = self.mask(self.eos_ids)
        self.all = self.mask(range(size))
        self.all_but_eos = self.all & ~self.eos
        self.bits: IntArray = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
        """Bit of a token in its word, by the token modulo 32."""

    def mask(self, tokens: Collection[int]) -> IntArray:
        """Mask [words] that allows `tokens`."""
        ids = np.fromiter(tokens, np.int64, len(tokens))
        mask = np.zeros(self.words, np.uint32)
        np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return mask.view(np.int32)


class Constraint:
    """Constraint of one request, behind the tokens that it has generated.

    EOS and stop tokens that `min_tokens` or `ignore_eos` rule out are allowed nevertheless where nothing else is.
    """

    def __init__(self, message: Submit, vocabulary: Vocabulary, matcher: Matcher | None) -> None:
        """`matcher`: of the message's grammar, at its beginning; None without one. `Submit.output` is not consumed."""
        self.matcher = matcher
        params, thinking = message.params, message.constraint.thinking
        self._reasoning = None if thinking is None else Reasoning(thinking, once=matcher is not None)
        self._vocabulary = vocabulary
        self._ignores_eos = params.ignore_eos and matcher is not None
        self._min_tokens = params.min_tokens
        stop_ids = frozenset(token for token in params.stop_token_ids if 0 <= token < vocabulary.size)
        keeps_eos = matcher is not None or not params.ignore_eos
        ends = stop_ids | vocabulary.eos_ids if keeps_eos else stop_ids
        self._ends = vocabulary.mask(ends)
        self._stop_ids = vocabulary.mask(stop_ids) if stop_ids and matcher is not None else None
        # Every answer of a grammar must be able to end; without one, the length ends it.
        self._allowed = _allowed(message, ends if matcher is not None else (), vocabulary)
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        """Those of several tokens, by their last token but one."""
        for word in message.constraint.bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._longest = max((len(word) - 1 for words in self._bad_words.values() for word in words), default=0)
        self._last: tuple[int, ...] = ()
        """Last tokens, as many as bad words need."""
        self._count = 0
        """Generated tokens."""
        self.has_ended = False
        """The answer has ended with an EOS that the request ignores, because the grammar allowed nothing else."""
        self.is_open = False
        """The grammar's mask before the next one was open, so that the next one probably takes long."""
        self._classify()

    def _classify(self) -> None:
        reasoning = self._reasoning
        within = reasoning is not None and (reasoning.is_open or reasoning.forced is not None)
        self.follows_grammar = self.matcher is not None and not within
        """The next token must continue the grammar."""
        # Behind an EOS within reasoning the grammar would have no answer.
        keeps_thinking = self.matcher is not None and within and not self._ignores_eos
        self.base = self._vocabulary.all_but_eos if keeps_thinking else self._vocabulary.all
        """Mask of the next token, if it does not continue the grammar."""
        self.restricts = (
            self._allowed is not None
            or bool(self._bad_words)
            or self._count < self._min_tokens
            or (self.follows_grammar and (self._ignores_eos or self._stop_ids is not None))
            or (reasoning is not None and (reasoning.forced is not None or reasoning.opener is not None))
        )
        """`restrict` has to complete the next mask."""
        self._is_plain = self.follows_grammar and not self.restricts and reasoning is None
        """Nothing but the matcher depends on the tokens from here on, as in most rows."""

    def advance(self, token: int) -> Matcher | None:
        """Advance by a generated token that did not end the request. Returns the matcher that must consume it, unless
        the answer `has_ended`."""
        matcher = self.matcher
        if self._is_plain:
            return matcher
        if self._reasoning is not None and self._reasoning.consume(token):
            matcher = None
        # Only `ignore_eos` lets an EOS come here.
        if self._ignores_eos and matcher is not None and token in self._vocabulary.eos_ids:
            self.has_ended = matcher.can_end
        self._count += 1
        if self._longest:
            self._last = (*self._last, token)[-self._longest :]
        if self.restricts or self._reasoning is not None:
            self._classify()
        return matcher

    def replay(self, tokens: Sequence[int]) -> None:
        """Advance by all tokens of an earlier output. Raises ConstraintError."""
        for token in tokens:
            matcher = self.advance(token)
            if matcher is not None and not matcher.consume(token):
                raise _refused(token)

    def restrict(self, mask: IntArray) -> bool:
        """Complete the mask [words] of the next token, which is that of the grammar or the base. False: it
        allows none."""
        reasoning, vocabulary = self._reasoning, self._vocabulary
        if reasoning is not None:
            if (forced := reasoning.forced) is not None:
                mask[:] = vocabulary.mask((forced,))
                return True
            if (opener := reasoning.opener) is not None:
                mask |= vocabulary.mask((opener,))
        if self.follows_grammar and self._stop_ids is not None and (mask & vocabulary.eos).any():
            mask |= self._stop_ids
        if self._allowed is not None:
            mask &= self._allowed
        for word in self._bad_words.get(self._last[-1], ()) if self._last else ():
            if self._last[1 - len(word) :] == word[:-1]:
                mask[word[-1] // 32] &= ~vocabulary.bits[word[-1] % 32]
        if self._count < self._min_tokens:
            _remove(mask, self._ends)
        elif self._ignores_eos and self.follows_grammar:
            _remove(mask, vocabulary.eos)
        return bool(mask.any())


def open_first(constraints: Sequence[Constraint]) -> list[int]:
    """Indices of the constraints whose tokens are consumed first, to begin their masks at once; none if they are most
    of all, or all are few. A matcher that shares its instance is not among them: its mask would delay the tokens of the
    others."""
    if len(constraints) < _MANY_TOKENS:
        return []
    first = [
        index
        for index, constraint in enumerate(constraints)
        if constraint.is_open and constraint.matcher is not None and constraint.matcher.is_alone
    ]
    return first if 2 * len(first) <= len(constraints) else []


def note_open(constraints: Sequence[Constraint | None], masks: IntArray) -> None:
    """Note whose masks [len(constraints), words] were open."""
    sample = masks[:, :: max(masks.shape[1] // _SAMPLED_WORDS, 1)][:, :_SAMPLED_WORDS].view(np.uint32)
    allowed = np.bitwise_count(sample).sum(axis=1)
    is_open = (allowed > _OPEN_SHARE * 32 * sample.shape[1]).tolist()
    for constraint, was_open in zip(constraints, is_open, strict=True):
        if constraint is not None:
            constraint.is_open = was_open and constraint.follows_grammar


class MatcherTokens(NamedTuple):
    """Tokens that matchers must consume before their next masks, in columns."""

    indices: list[int]
    """Index of each among the tokens of `advance_all`."""
    tokens: list[tuple[Matcher, int]]


def advance_all(tokens: Sequence[tuple[Constraint, int]]) -> tuple[list[int], MatcherTokens]:
    """Advance constraints by the tokens that were generated under their masks. Returns the indices of answers that end
    with them, and what their matchers must consume."""
    ended: list[int] = []
    consuming = MatcherTokens([], [])
    for index, (constraint, token) in enumerate(tokens):
        matcher = constraint.advance(token)
        if constraint.has_ended:
            ended.append(index)
        elif matcher is not None:
            consuming.indices.append(index)
            consuming.tokens.append((matcher, token))
    return ended, consuming


def consume_tokens(consuming: MatcherTokens, grammars: Grammars | None) -> dict[int, ConstraintError]:
    """Let matchers consume their tokens. Returns the errors by index, as `MatcherTokens` has it."""
    if not consuming.tokens:
        return {}
    assert grammars is not None
    accepted = grammars.consume(consuming.tokens)
    if all(accepted):
        return {}
    columns = zip(*consuming, accepted, strict=True)
    return {index: _refused(token) for index, (_, token), is_accepted in columns if not is_accepted}


def fill_masks(
    constraints: Mapping[int, Constraint | None],
    masks: IntArray,
    vocabulary: Vocabulary,
    grammars: Grammars | None,
    *,
    slow: bool = False,
) -> dict[int, ConstraintError]:
    """Write the masks of constraints into their rows of `masks` [rows, words]; None allows all tokens. Returns the
    errors by row, whose masks then allow all tokens. `slow`: each mask probably takes long."""
    matchers: list[tuple[Matcher, int]] = []
    restricting: list[tuple[Constraint, int]] = []
    for row, constraint in constraints.items():
        if constraint is None:
            masks[row] = vocabulary.all
            continue
        if constraint.follows_grammar:
            assert constraint.matcher is not None
            matchers.append((constraint.matcher, row))
        else:
            masks[row] = constraint.base
        if constraint.restricts:
            restricting.append((constraint, row))
    errors: dict[int, ConstraintError] = {}
    if matchers:
        assert grammars is not None
        failed = grammars.fill(matchers, masks, slow=slow)
        errors = {row: ConstraintError(error.code, error.message) for row, error in failed.items()}
    for restricted, row in restricting:
        if row not in errors and not restricted.restrict(masks[row]):
            errors[row] = ConstraintError(
                "no_allowed_token",
                "no token satisfies the request's grammar, allowed_token_ids and bad_words together; relax one of them",
            )
    for row in errors:
        masks[row] = vocabulary.all
    return errors


def _refused(token: int) -> ConstraintError:
    return ConstraintError("grammar_failed", f"the grammar does not allow token {token}, which was sampled")


def _allowed(message: Submit, more: Collection[int], vocabulary: Vocabulary) -> IntArray | None:
    """Mask of the tokens that `allowed_token_ids`, to which `more` belong, and bad words of one token leave; None:
    all."""
    bad = [word[0] for word in message.constraint.bad_words if len(word) == 1]
    allowed = message.params.allowed_token_ids
    if not (allowed or bad):
        return None
    mask = vocabulary.mask({*allowed, *more}) if allowed else vocabulary.all
    return mask & ~vocabulary.mask(bad)


def _remove(mask: IntArray, tokens: IntArray) -> None:
    """Take `tokens` out of a mask, unless nothing would remain."""
    others = mask & ~tokens
    if others.any():
        mask[:] = others
