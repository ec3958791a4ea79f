"""Tokenizer of tiny checkpoints: byte-level BPE with the control tokens and the chat template of a model family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from minisgl.errors import ModelError

_BYTES: Final = 256
_LEARNED: Final = 256
"""Maximum number of merges learned from the text."""

_TEXT: Final = """\
The rain had stopped before sunrise, and the street was quiet. A baker opened the door of the shop, looked at the
sky, and said that it would be a good day. People came one after the other: first the teacher, then the two brothers
who work at the station, then an old woman with a small dog. They asked for bread, for coffee, for the newspaper.
What is the answer to the question? The answer is that there is no short answer, but there are many long ones.
In the morning the river is grey and slow; in the evening it is bright, and boats pass under the bridge with lights.
Write a short story about a lighthouse. Once there was a lighthouse on a rock in the northern sea. Its keeper wrote
down the weather every hour: wind from the west, clouds, no ships. One night a letter arrived, and nobody knew how.
How do I sort a list of numbers in a program? You can call the function sort, or compare each number with the next.
for i in range(10): print(i * 2 + 1)   # 1, 3, 5, 7, 9, 11, 13, 15, 17, 19
def add(a, b): return a + b
{"name": "example", "values": [1, 2, 3], "nested": {"true": false, "null": null}}
Please translate: good morning, thank you, see you tomorrow, where is the station, how much does this cost?
Guten Morgen, vielen Dank, bis morgen, wo ist der Bahnhof, wie viel kostet das? Zwölf Boxkämpfer jagen Viktor quer.
Bonjour, merci beaucoup, à demain, où est la gare, combien ça coûte? Le garçon a mangé une pêche près de la forêt.
Доброе утро, большое спасибо, до завтра, где вокзал. 早上好，谢谢你，明天见，车站在哪里。こんにちは、ありがとう。
Numbers are written 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024, fractions as 1/2 and 3/4, prices as $5.99 or 7 €.
The capital of the country is a city on the coast; it has a harbour, a university, three museums and a large park.
Machines that learn from examples are called models. A model reads tokens and predicts the token that comes next.
"""


class Family(NamedTuple):
    """Control tokens and chat template of a model family."""

    control_tokens: tuple[str, ...]
    leading: bool
    """True: control tokens have the first ids of the vocabulary; False: the last ones."""
    bos: str | None
    eos: str
    pad: str
    stops: tuple[str, ...]
    """All tokens that end an answer, as in generation_config.json."""
    adds_bos: bool
    """True: the tokenizer puts BOS in front of plain text. The chat template writes its own."""
    chat_template: str


_CHATML: Final = Family(
    control_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    leading=False,
    bos=None,
    eos="<|im_end|>",
    pad="<|endoftext|>",
    stops=("<|im_end|>", "<|endoftext|>"),
    adds_bos=False,
    chat_template=(
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
)

_HEADERS: Final = Family(
    control_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|finetune_right_pad_id|>",
    ),
    leading=False,
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    pad="<|finetune_right_pad_id|>",
    stops=("<|eot_id|>", "<|end_of_text|>"),
    adds_bos=True,
    chat_template=(
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
        "{{- message.content | trim + '<|eot_id|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
)

_INSTRUCT: Final = Family(
    control_tokens=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    leading=True,
    bos="<s>",
    eos="</s>",
    pad="<unk>",
    stops=("</s>",),
    adds_bos=True,
    chat_template=(
        "{{- bos_token }}"
        "{%- set pending = namespace(system='') %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'system' %}{%- set pending.system = message.content + '\\n\\n' %}"
        "{%- elif message.role == 'user' %}"
        "{{- '[INST] ' + pending.system + message.content + ' [/INST]' }}{%- set pending.system = '' %}"
        "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
        "{%- else %}{{- raise_exception('roles are system, user and assistant, not ' + message.role) }}"
        "{%- endif %}"
        "{%- endfor %}"
    ),
)

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _HEADERS,
    "mistral": _INSTRUCT,
    "qwen2": _CHATML,
    "qwen3": _CHATML,
    "qwen3-moe": _CHATML,
}


def train_tokenizer(family: Family, vocab_size: int, text: str = _TEXT, learned: int = _LEARNED) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens, at most `learned` of them merges learned from `text`. Raises
    ModelError `invalid_tiny_model` when the bytes and control tokens alone do not fit."""
    control = list(family.control_tokens)
    if vocab_size < _BYTES + len(control):
        raise ModelError("invalid_tiny_model", f"a vocabulary of {vocab_size} tokens is too small; use 512 or more")
    plain_tokens = min(_BYTES + learned, vocab_size - len(control))
    tokenizer = train_byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        text.splitlines(keepends=True),
        plain_tokens + len(control) * family.leading,
        control if family.leading else (),
    )
    tokenizer.add_special_tokens(control)
    plain: Any = processors.ByteLevel(trim_offsets=False)
    if family.adds_bos and family.bos is not None:
        bos = processors.TemplateProcessing(
            single=f"{family.bos} $A",
            pair=f"{family.bos} $A {family.bos}:1 $B:1",
            special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))],
        )
        plain = processors.Sequence([plain, bos])
    tokenizer.post_processor = plain
    return tokenizer


def train_byte_level(
    pre_tokenizer: Any, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Train byte-level BPE of at most `vocab_size` tokens, of which `special_tokens` have the first ids.
    `pre_tokenizer` cuts texts and turns them into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def is_lone_byte(token: str) -> bool:
    """True for a token of one byte that is not printable ASCII: a part of a character, or a control character."""
    return len(token) == 1 and not "!" <= token <= "~" and token != "Ġ"
