"""The tokenizer of a checkpoint, as grammars need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from minisgl.grammar.errors import GrammarError


class GrammarTokenizer:
    """Texts of all tokens of a vocabulary, in a tree."""

    def __init__(self, directory: str | Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read tokenizer.json, which takes up to a second or two. `vocab_size`: number of logits, which may be more
        than tokens. Raises GrammarError `grammar_unavailable`."""
        path = Path(directory) / "tokenizer.json"
        try:
            self.tokens = LLTokenizer(path.read_text("utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (OSError, ValueError) as error:
            raise GrammarError(
                "grammar_unavailable", f"{path} cannot be used for constrained answers: {error}"
            ) from error
        self.vocab_size = vocab_size
        self.mask_words = (vocab_size + 31) // 32
        """int32 words of one row of a mask."""
