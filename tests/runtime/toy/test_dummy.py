from __future__ import annotations

from pathlib import Path

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.models.config import ModelConfig
from minisgl.models.pooling_files import read_pooling
from minisgl.tokenizer.model_files import load_model_files
from minisgl.toy.tiny import dummy_word, write_dummy_checkpoint


def test_every_id_has_a_text_and_eos_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    write_dummy_checkpoint(tmp_path, {**BUILTIN_CONFIGS["qwen3-0.6b"], "vocab_size": 3000})
    model, files = ModelConfig.read(tmp_path), load_model_files(tmp_path)
    assert (model.num_layers, model.vocab_size) == (28, 3000)
    assert {files.tokenizer.id_to_token(index) for index in model.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    texts = [files.tokenizer.decode([index], skip_special_tokens=False) for index in range(3000)]
    assert all(texts)
    assert files.tokenizer.decode([2999]) == f" {dummy_word(2999)}"
    assert files.tokenizer.encode(f"Where is {dummy_word(1500)} {dummy_word(2999)}").ids[-2:] == [1500, 2999]


def test_it_can_score_pairs(tmp_path: Path) -> None:
    write_dummy_checkpoint(tmp_path, {**BUILTIN_CONFIGS["qwen3-0.6b"], "vocab_size": 3000})
    pooling = read_pooling(tmp_path, ModelConfig.read(tmp_path), "rerank")
    tokenizer = load_model_files(tmp_path).tokenizer
    assert pooling is not None
    assert [tokenizer.id_to_token(index) for index in pooling.label_tokens] == ["yes", "no"]
