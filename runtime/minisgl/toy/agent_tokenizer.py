"""Tokenizer of the agent model. Each word of its world is one token, and a value that is copied from a question into a
call is the same token in both: values never include the spaces around them. A key of a call is one token with all that
separates it from its value, so that the token in front of a value tells which one it is."""

from __future__ import annotations

import random
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from minisgl.toy.agent_formats import CONTROL_TOKENS, MARKERS
from minisgl.toy.agent_rows import conversation
from minisgl.toy.agent_world import FOODS, ROOMS, TOOLS, words
from minisgl.toy.tiny_tokenizer import Family, train_byte_level

_MAX_VOCAB: Final = 4096
_CONVERSATIONS: Final = 200
_CONVERSATION_SEGMENTS: Final = 10

_VALUES: Final = "|".join((*ROOMS, *FOODS, *TOOLS, "true", "false", "on", "off"))
_WORDS: Final = "|".join(
    (
        r"- \w+\n",
        r'(?:\{|"?, )?"\w+": ["{]?',
        r"<function=|</function>\n|<parameter=\w+>\n|\n</parameter>\n",
        rf"(?:{_VALUES})(?!\w)",
        r"\p{Lu}\w*|\w*_\w*|\d+",
        rf"(?! (?:{_VALUES})(?!\w)) ?\p{{Ll}}+(?!\w) ?",
        r" ?[^\s\w]+(?: [^\s\w]+)*[ \n]*",
        r"\s+",
    )
)
"""Keys of calls with what is around them, words with spaces, and values, names and numbers without."""


def agent_tokenizer() -> Tokenizer:
    byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), byte_level])
    tokenizer = train_byte_level(cut, _texts(), _MAX_VOCAB)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


def family(chat_template: str) -> Family:
    """Return what belongs to the tokenizer in a checkpoint with this chat template."""
    return Family(
        control_tokens=CONTROL_TOKENS,
        leading=False,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
        adds_bos=False,
        chat_template=chat_template,
    )


def _texts() -> list[str]:
    """Return the parts of conversations between control tokens, and all values."""
    source = random.Random(0)
    texts = list(words())
    for _ in range(_CONVERSATIONS):
        text = ""
        for number, segment in enumerate(conversation(source, held_out=False)):
            text += segment.text
            if number == _CONVERSATION_SEGMENTS:
                break
        for token in (*CONTROL_TOKENS, *MARKERS):
            text = text.replace(token, "\0")
        texts += text.split("\0")
    return texts
