"""A tokenizer that is ready for use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.detect import find_formats
from minisgl.parsing.names import Parsers
from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.tokenizer.token_bytes import TokenBytes, added_tokens
from minisgl.wire.text import SamplingDefaults

_DETECT: Final = Parsers()


class LoadedTokenizer(msgspec.Struct, frozen=True, eq=False):
    """Everything that a worker needs from one set of tokenizer files."""

    encoder: PromptEncoder
    token_bytes: TokenBytes
    answers: AnswerFormat
    defaults: SamplingDefaults
    hashes: dict[str, str]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """See `ServedModel.capabilities`."""
        if not self.encoder.has_template:
            return ()
        reasons = self.answers.reasoning is not None
        found = {
            "chat": True,
            "tools": self.answers.tools is not None,
            "reasoning": reasons,
            "reasoning_switch": reasons and self.encoder.can_switch_thinking,
        }
        return tuple(name for name, holds in found.items() if holds)


def load(directory: str | Path, parsers: Parsers = _DETECT) -> LoadedTokenizer:
    """Load the tokenizer files in a directory. Raises TokenizerError."""
    files = load_model_files(directory)
    answers = find_formats(parsers, files.template_text, added_tokens(files.tokenizer))
    if answers.reasoning is not None and (before := answers.reasoning.before):
        lead = files.tokenizer.encode(before, add_special_tokens=False).ids
        answers = replace(answers, reasoning_lead=tuple(lead))
    encoder = PromptEncoder(files, answers)
    return LoadedTokenizer(
        encoder=encoder,
        token_bytes=TokenBytes(files.tokenizer),
        answers=replace(answers, ignores_tools=answers.tools is None and not encoder.takes_tools),
        defaults=files.defaults,
        hashes=files.hashes,
    )
