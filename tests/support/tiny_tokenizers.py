"""Tokenizers of the two kinds that checkpoints have, small enough to build in a test, and directories that hold one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CORPUS = "Hello world, the quick brown fox jumps over the lazy dog. What is the answer to everything? 42!"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added: tuple[str, ...] = ("<think>", "</think>"),
) -> Tokenizer:
    """Byte-level BPE, as Llama 3 and Qwen have. Ids 0..255 are single bytes; `special` follow the merges, then `added`,
    which are tokens with a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in CORPUS.split():
        piece = "Ġ"
        for character in word:
            if character.isalpha() and (piece, character) not in merges:
                merges.append((piece, character))
                vocab.setdefault(piece + character, len(vocab))
            piece += character
            if piece not in vocab:
                break
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def byte_fallback(metaspace: bool = False) -> Tokenizer:
    """Sentencepiece-style BPE with byte tokens, as Llama 2 and Mistral have: <unk> 0, <s> 1, </s> 2, bytes 3..258.
    `metaspace`: spaces are handled by the Metaspace parts instead of the older normalizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(CORPUS) - {" "})]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for word in CORPUS.split():
        piece = "▁"
        for character in word:
            if (piece, character) not in merges:
                merges.append((piece, character))
                vocab.setdefault(piece + character, len(vocab))
            piece += character
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_directory(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = CHATML,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint directory, as far as the tokenizer is concerned."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, "utf-8")
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def word_pieces() -> Tokenizer:
    """WordPiece in lower case, as BERT has: [CLS] and [SEP] around texts, and a type of its own for a second one."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({character for character in CORPUS.lower() if character.isalnum()})
    words = sorted({word.strip(",.?!") for word in CORPUS.lower().split()} - {*letters})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *words, ",", ".", "?", "!"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.add_special_tokens(special)
    return tokenizer
