from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.token_bytes import TokenBytes
from support.tiny_tokenizers import byte_fallback, byte_level

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
METASPACE = byte_fallback(metaspace=True)
TABLES = {id(tokenizer): TokenBytes(tokenizer) for tokenizer in (BYTE_LEVEL, FALLBACK, METASPACE)}


def decoded(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> list[str]:
    detokenizer = Detokenizer(TABLES[id(tokenizer)], prompt)
    return [*(detokenizer.step(token) for token in answer), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer, beyond: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1 + beyond), max_size=24)


@settings(deadline=None)
@given(ids_of(BYTE_LEVEL))
def test_byte_level_pieces_equal_a_full_decode_whatever_the_tokens(answer: list[int]) -> None:
    prompt = BYTE_LEVEL.encode("Hello").ids
    assert "".join(decoded(BYTE_LEVEL, prompt, answer)) == BYTE_LEVEL.decode(prompt + answer)[len("Hello") :]


@settings(deadline=None)
@given(st.text(max_size=24), st.booleans())
def test_byte_fallback_pieces_equal_a_full_decode(text: str, metaspace: bool) -> None:
    tokenizer = METASPACE if metaspace else FALLBACK
    prompt = tokenizer.encode("Hello").ids
    answer = tokenizer.encode("Hello " + text).ids[len(prompt) :]
    expected = tokenizer.decode(prompt + answer)[len("Hello") :]
    assert "".join(decoded(tokenizer, prompt, answer)) == expected


@settings(deadline=None)
@given(ids_of(FALLBACK))
def test_byte_fallback_keeps_good_characters_beside_bad_bytes(answer: list[int]) -> None:
    raw = b"".join(
        bytes([token - 3]) if 3 <= token < 259 else (FALLBACK.id_to_token(token) or "").replace("▁", " ").encode()
        for token in answer
        if token > 2
    )
    prompt = FALLBACK.encode("Hello").ids
    assert "".join(decoded(FALLBACK, prompt, answer)) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("tokenizer", [FALLBACK, METASPACE], ids=["normalizer", "metaspace"])
def test_a_leading_space_is_kept_behind_text_and_dropped_at_its_beginning(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("world", add_special_tokens=False).ids
    assert tokenizer.decode(word) == "world"
    assert "".join(decoded(tokenizer, [1], word)) == "world"
    assert "".join(decoded(tokenizer, tokenizer.encode("Hello").ids, word)) == " world"
    # Only the first token of a text loses its space, also behind special tokens.
    assert (
        "".join(decoded(tokenizer, [1], [2, *word, *word])) == "world world" == tokenizer.decode([1, 2, *word, *word])
    )


def test_a_character_is_never_split() -> None:
    answer = BYTE_LEVEL.encode("ok 🙂!").ids
    pieces = decoded(BYTE_LEVEL, [], answer)
    assert "".join(pieces) == "ok 🙂!"
    assert "🙂" in pieces


def test_a_character_that_is_never_completed_becomes_a_replacement_character() -> None:
    answer = BYTE_LEVEL.encode("ok 🙂").ids[:-1]
    assert "".join(decoded(BYTE_LEVEL, [], answer)) == "ok �" == BYTE_LEVEL.decode(answer)


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    euro = BYTE_LEVEL.encode("€").ids
    assert "".join(decoded(BYTE_LEVEL, BYTE_LEVEL.encode("Hello ").ids + euro[:1], [*euro[1:], *euro])) == "��€"


def test_special_tokens_have_no_text_and_unknown_ids_neither() -> None:
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    think = BYTE_LEVEL.token_to_id("<think>")
    assert decoded(BYTE_LEVEL, [], [end, think, 10_000, -1]) == ["", "<think>", "", "", ""]


def test_added_tokens_with_characters_outside_of_the_byte_alphabet() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<｜a b｜>"])
    detokenizer = Detokenizer(TokenBytes(tokenizer), [])
    assert detokenizer.step(tokenizer.token_to_id("<｜a b｜>")) == "<｜a b｜>"


def test_other_decoders_decode_each_token() -> None:
    vocab = {"un": 0, "##able": 1, "to": 2, "[UNK]": 3, "a": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    detokenizer = Detokenizer(TokenBytes(tokenizer), [])
    assert [detokenizer.step(token) for token in (0, 1, 2)] == ["un", "able", " to"]
