"""A length that proves a text too long never does so for one that fits."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from minisgl.errors import PromptError
from minisgl.tokenizer.longest_token import longest_token
from minisgl.tokenizer.model_files import load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import ChatMessage, fewest_tokens
from support.messages import generate_of
from support.tiny_tokenizers import CORPUS, byte_fallback, byte_level, write_directory


def with_nfc() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def split_by_a_pattern() -> Tokenizer:
    """As Llama 3 and Qwen do."""
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


BOUNDED = {
    "byte level": byte_level(),
    "NFC": with_nfc(),
    "split": split_by_a_pattern(),
    "byte fallback": byte_fallback(),
    "metaspace": byte_fallback(metaspace=True),
}

texts = st.text(alphabet=st.one_of(st.sampled_from(CORPUS + "<|im_end|> "), st.characters(exclude_categories=["Cs"])))


@given(texts, st.sampled_from(sorted(BOUNDED)))
def test_no_text_has_fewer_tokens_than_its_length_proves(text: str, kind: str) -> None:
    tokenizer = BOUNDED[kind]
    assert (longest := longest_token(tokenizer)) > 0
    for repeated in (text, text * 50):
        normal = repeated if kind != "NFC" else unicodedata.normalize("NFD", repeated)
        assert fewest_tokens(normal, longest) <= len(tokenizer.encode(normal, add_special_tokens=False).ids)


def test_a_text_of_the_longest_token_alone_has_as_many_tokens_as_its_length_proves() -> None:
    tokenizer = byte_level()
    longest = max(tokenizer.get_vocab(), key=len)
    text = longest.replace("Ġ", " ") * 20
    assert fewest_tokens(text, longest_token(tokenizer)) == len(tokenizer.encode(text).ids) == 20


def drops_blanks() -> Tokenizer:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False)])
    return tokenizer


def drops_accents() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    return tokenizer


def shortens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace("aaaa", "")
    return tokenizer


def swallows_blanks() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|assistant|>", rstrip=True)])
    return tokenizer


def has_unknown_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def has_unknown_characters() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))


@pytest.mark.parametrize(
    "make", [drops_blanks, drops_accents, shortens, swallows_blanks, has_unknown_words, has_unknown_characters]
)
def test_a_tokenizer_that_can_drop_text_proves_nothing(make: Callable[[], Tokenizer]) -> None:
    assert longest_token(make()) == 0
    assert fewest_tokens("a" * 1000, 0) == 0


def test_a_prompt_that_is_certainly_too_long_is_not_encoded(tmp_path: Path) -> None:
    encoder = PromptEncoder(load_model_files(write_directory(tmp_path, byte_level())))

    def prompt(**fields: object) -> object:
        request = generate_of(id=b"r" * 16, params=SamplingParams(), **fields)  # type: ignore[arg-type]
        return encoder.encode([request], 100)[0]

    system = ChatMessage(role="system", content="a" * 10_000)
    for refused in (prompt(prompt="a" * 10_000), prompt(messages=(system,))):
        assert isinstance(refused, PromptError) and refused.code == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in refused.message
    kept = prompt(prompt="a" * 10_000, truncate_prompt_tokens=10)
    assert not isinstance(kept, PromptError), "the request keeps the end of its prompt"
    assert not isinstance(prompt(prompt="a" * 100), PromptError)
