"""Markers of reasoning and tool calls for checkpoints that were not trained with any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from support.frontend.chat_templates import AGENT

MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_OPENED: Final = "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}"


def add_markers(folder: Path) -> int:
    """Add the markers to a checkpoint's tokenizer, and a template that has tools and opens the reasoning of requests
    that enable it. Returns the size of the vocabulary, for which the caller adapts the weights."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, special=False) for name in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = AGENT.rstrip() + _OPENED + "{%- endif %}"
    path.write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())
