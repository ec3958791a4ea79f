"""Progress of an answer in its grammar, and the masks of tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from minisgl.errors import GrammarError
from minisgl.grammar.limits import code_of, first_line, is_dead_end
from minisgl.grammar.tokenizer import GrammarTokenizer

DEAD_END: Final = (
    "no text can follow here: the next part of the request's grammar or schema matches nothing; correct it"
)


class Matcher:
    """State of one answer. Copies are cheap and share what was computed of the grammar."""

    __slots__ = ("__weakref__", "_tokenizer", "answers", "instance", "names_tokens", "raw")

    def __init__(
        self, raw: LLMatcher, tokenizer: GrammarTokenizer, instance: int = 0, *, names_tokens: bool = True
    ) -> None:
        """Take over a matcher without errors. `instance`: number of the compiled instance of its grammar.
        `names_tokens`: the grammar may name token ids, so that its masks need `GrammarTokenizer.clear_padding`."""
        self.raw = raw
        self.instance = instance
        self.names_tokens = names_tokens
        self.answers: Sized = ()
        """Matchers in use of its instance."""
        self._tokenizer = tokenizer

    def copy(self, instance: int | None = None) -> Matcher:
        """Return an independent matcher in the same state; `instance`: another number for it."""
        instance = self.instance if instance is None else instance
        return Matcher(self.raw.deep_copy(), self._tokenizer, instance, names_tokens=self.names_tokens)

    def consume(self, token: int) -> bool:
        """Advance by a sampled token. False: the grammar does not allow it; the matcher must not be used again."""
        return self.raw.consume_token(token)

    def replay(self, tokens: Sequence[int]) -> bool:
        """Advance by all tokens of an answer that is continued. False: as in `consume`."""
        return self.raw.consume_tokens(list(tokens))

    @property
    def is_alone(self) -> bool:
        """No other answer uses its instance: this one never waits for another."""
        return len(self.answers) <= 1

    @property
    def can_end(self) -> bool:
        """The answer may end here: EOS is allowed."""
        return self.raw.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Only EOS is allowed."""
        return self.raw.is_stopped()

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that may come next into a contiguous row of words. Raises GrammarError."""
        assert row.ndim == 1 and row.dtype == np.int32 and row.flags.c_contiguous
        self.raw.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._tokenizer.clear_padding(row[np.newaxis])
        if (error := self.error()) is not None:
            raise error

    def error(self) -> GrammarError | None:
        """Return the error that makes masks of this matcher meaningless: the answer cannot go on, because a part of the
        grammar matches nothing or a step exceeds its budget, or the library failed."""
        if not self.raw.is_error():
            return None
        problem = first_line(self.raw.get_error())
        if is_dead_end(problem):
            return GrammarError("no_allowed_token", DEAD_END)
        return GrammarError(code_of(problem, "grammar_failed"), problem)
