"""Compiled grammars and the tokenizer that they are compiled for."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.errors import GrammarError
from minisgl.grammar import compiler as module
from minisgl.grammar import lark
from minisgl.grammar.build import build
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.tokenizer import GrammarTokenizer
from minisgl.grammar.validate import validate
from minisgl.wire.text import StructuredOutput
from support.grammar.walk import PADDING, eos_tokens, grammars, next_tokens, tokenizer
from support.panic import Panic
from support.tiny_checkpoint import tiny_checkpoint
from support.tiny_tokenizers import byte_fallback, byte_level, write_directory


def grammar(text: str) -> str:
    return lark.grammar(f"start: {lark.literal(text)}")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled."""
    texts: list[str] = []

    def counting(vocabulary: LLTokenizer, text: str, **options: Any) -> LLMatcher:
        texts.append(text)
        return LLMatcher(vocabulary, text, **options)

    monkeypatch.setattr(module, "LLMatcher", counting)
    return texts


def new_compiler(cache_bytes: int = 1 << 30) -> GrammarCompiler:
    vocabulary = GrammarTokenizer(
        tiny_checkpoint(), vocab_size=tokenizer().get_vocab_size(), eos_token_ids=eos_tokens()
    )
    return GrammarCompiler(vocabulary, cache_bytes)


def test_a_grammar_is_compiled_once_while_it_is_kept(compiled: list[str]) -> None:
    compiler = new_compiler()
    one, other = compiler.compile(grammar("a")), compiler.compile(grammar("a"))
    assert compiled == [grammar("a")]
    token = tokenizer().token_to_id("a")
    assert one.consume(token) and one.is_stopped and not other.is_stopped


def test_grammars_that_were_not_used_for_longest_make_room(compiled: list[str]) -> None:
    size = module._size(grammar("a"))
    compiler = new_compiler(cache_bytes=2 * size)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(grammar(text))
    assert compiled == [grammar(text) for text in ("a", "b", "c", "b")]


def test_equal_grammars_that_arrive_at_once_are_compiled_once(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = new_compiler()
    begun, go_on = threading.Event(), threading.Event()
    compile_one = compiler._compile

    def wait(text: str) -> object:
        begun.set()
        assert go_on.wait(60)
        return compile_one(text)

    monkeypatch.setattr(compiler, "_compile", wait)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(compiler.compile, grammar("a"))
        assert begun.wait(60)
        others = [threads.submit(compiler.compile, grammar("a")) for _ in range(2)]
        go_on.set()
        matchers = [future.result(60) for future in [first, *others]]
    assert len(compiled) == 1
    assert len(set(map(id, matchers))) == 3


def test_errors_are_not_kept(compiled: list[str]) -> None:
    compiler = new_compiler()
    for _ in range(2):
        with pytest.raises(GrammarError) as error:
            compiler.compile("start: missing")
        assert error.value.code == "invalid_grammar"
    assert len(compiled) == 2


def test_a_grammar_without_answers_is_refused() -> None:
    for text in ("start: a\na: a", "start: <[99999999]>"):
        with pytest.raises(GrammarError) as error:
            new_compiler().compile(text)
        assert error.value.code == "invalid_grammar"


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: object, **options: object) -> None:
        raise Panic("assertion failed")

    compiler = new_compiler()
    monkeypatch.setattr(module, "LLMatcher", panic)
    with pytest.raises(GrammarError, match="assertion failed") as error:
        compiler.compile(grammar("a"))
    assert error.value.code == "invalid_grammar"


def test_ids_that_are_no_tokens_are_never_allowed_even_if_a_grammar_names_them() -> None:
    last = tokenizer().get_vocab_size() + PADDING - 1
    matcher = grammars().matcher(f"start: <[0-{last}]>")
    assert max(next_tokens(matcher)) == tokenizer().get_vocab_size() - 1
    masks = np.zeros((2, grammars().mask_words), np.int32)
    assert grammars().fill([(matcher, 1)], masks) == {}
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert bits.sum(axis=1).tolist() == [0, tokenizer().get_vocab_size()]


def test_a_tokenizer_with_byte_tokens_works(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "bytes", byte_fallback())
    size = byte_fallback().get_vocab_size()
    vocabulary = GrammarTokenizer(folder, vocab_size=size, eos_token_ids=[2])
    matcher = GrammarCompiler(vocabulary).compile(grammar("Hello ü"))
    assert matcher.replay(vocabulary.tokens.tokenize_str("Hello ü")) and matcher.is_stopped


def test_eos_tokens_that_are_no_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "bytes", byte_level())
    size = byte_level().get_vocab_size()
    end = byte_level().token_to_id("<|im_end|>")
    vocabulary = GrammarTokenizer(folder, vocab_size=size + 10, eos_token_ids=[end, size + 5])
    assert vocabulary.tokens.eos_tokens == [end]
    with pytest.raises(GrammarError) as error:
        GrammarTokenizer(folder, vocab_size=size + 10, eos_token_ids=[size + 5])
    assert error.value.code == "grammar_unavailable"


@pytest.mark.parametrize("content", ["", "{}", None])
def test_a_tokenizer_that_cannot_be_used_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(GrammarError) as error:
        GrammarTokenizer(tmp_path, vocab_size=100, eos_token_ids=[1])
    assert error.value.code == "grammar_unavailable"
    assert str(tmp_path) in error.value.message


def test_a_tokenizer_that_makes_the_library_panic_is_an_error(tmp_path: Path) -> None:
    long = json.loads(byte_level().to_str())
    vocabulary = long["model"]["vocab"]
    for length in range(2, 2000):
        vocabulary["a" * length] = len(vocabulary)
    taken = max(vocabulary.values())
    long["added_tokens"] = [{**token, "id": taken + 1 + i} for i, token in enumerate(long["added_tokens"])]
    (tmp_path / "tokenizer.json").write_text(json.dumps(long))
    with pytest.raises(GrammarError) as error:
        GrammarTokenizer(tmp_path, vocab_size=taken + 100, eos_token_ids=[taken + 1])
    assert error.value.code == "grammar_unavailable"


def test_grammars_that_name_special_tokens_are_left_to_the_engine() -> None:
    text = "start: /[a-z]+/ <|im_end|>"
    validate(StructuredOutput("grammar", text))
    grammars().matcher(build(StructuredOutput("grammar", text)))
    unknown = StructuredOutput("grammar", "start: <|nonsense|>")
    validate(unknown)
    with pytest.raises(GrammarError) as error:
        grammars().matcher(build(unknown))
    assert error.value.code == "invalid_grammar"


def test_answers_at_once_get_instances_of_their_own_and_later_ones_reuse_them(compiled: list[str]) -> None:
    vocabulary = new_compiler()._tokenizer
    compiler = GrammarCompiler(vocabulary, most_instances=3)
    for _ in range(4):
        # Each is dropped before the next one is made.
        compiler.compile(grammar("a"))
    assert len(compiled) == 1
    at_once = [compiler.compile(grammar("a")) for _ in range(6)]
    assert len(compiled) == 3
    assert sorted(matcher.instance for matcher in at_once) == [0, 0, 1, 1, 2, 2]
    assert not any(matcher.is_alone for matcher in at_once)
    kept = {matcher.instance: matcher for matcher in at_once}
    del at_once
    gc.collect()
    assert all(matcher.is_alone for matcher in kept.values())


def test_a_compiled_instance_without_answers_is_ready_at_once(compiled: list[str]) -> None:
    compiler = GrammarCompiler(new_compiler()._tokenizer, most_instances=2)
    assert compiler.ready(grammar("a")) is None
    kept = compiler.compile(grammar("a"))
    assert compiler.ready(grammar("a")) is None
    assert kept.consume(tokenizer().token_to_id("a"))
    del kept
    gc.collect()
    first = compiler.ready(grammar("a"))
    assert first is not None and first.is_alone and not first.is_stopped
    assert compiler.ready(grammar("a")) is None
    second = compiler.compile(grammar("a"))
    assert compiled == [grammar("a")] * 2 and {first.instance, second.instance} == {0, 1}
    with pytest.raises(GrammarError):
        compiler.compile("start: /(/")
    assert compiler.ready("start: /(/") is None


def test_a_slow_grammar_gets_few_instances(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", -1.0)
    compiler = GrammarCompiler(new_compiler()._tokenizer, most_instances=64)
    at_once = [compiler.compile(grammar("a")) for _ in range(20)]
    assert len(compiled) == 3 and len({id(matcher) for matcher in at_once}) == 20


def test_the_error_of_a_grammar_is_not_kept_as_an_answer(compiled: list[str]) -> None:
    compiler = GrammarCompiler(new_compiler()._tokenizer, most_instances=2)
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.compile("start: /(/")
    assert len(compiled) == 2
