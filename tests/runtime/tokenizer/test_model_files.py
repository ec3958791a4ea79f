from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from minisgl.tokenizer.errors import TokenizerError
from minisgl.tokenizer.model_files import hash_tokenizer_files, load_model_files
from minisgl.wire.text import SamplingDefaults
from support.tiny_tokenizers import CHATML, byte_level, write_directory


def test_reads_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "add_bos_token": False,
    }
    generation = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    generation |= {"eos_token_id": [1, 2], "do_sample": True}
    files = load_model_files(write_directory(tmp_path, byte_level(), config=config, generation_config=generation))
    assert files.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert files.chat_template == CHATML
    assert files.add_bos_token is False
    assert files.defaults == SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0, repetition_penalty=1.05)
    assert files.hashes == hash_tokenizer_files(tmp_path)


def test_hashes_cover_the_existing_files(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), chat_template=None)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hashes = hash_tokenizer_files(tmp_path)
    assert sorted(hashes) == ["tokenizer.json", "tokenizer_config.json"]
    assert hashes["tokenizer.json"] == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_template_sources_in_their_order(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]
    write_directory(tmp_path, byte_level(), chat_template=None, config={"chat_template": named})
    assert load_model_files(tmp_path).chat_template == "from the list"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_model_files(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_model_files(tmp_path).chat_template == "from jinja"


def test_a_missing_template_is_not_an_error(tmp_path: Path) -> None:
    assert load_model_files(write_directory(tmp_path, byte_level(), chat_template=None)).chat_template is None


def test_truncation_and_padding_of_training_time_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    files = load_model_files(write_directory(tmp_path, tokenizer))
    assert files.tokenizer.decode(files.tokenizer.encode("Hello world, 123456789").ids) == "Hello world, 123456789"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", "{", "tokenizer_broken"),
        ("tokenizer.json", '{"model": 1}', "tokenizer_broken"),
        ("tokenizer_config.json", "[1]", "tokenizer_broken"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config_broken"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, code: str) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=name) as raised:
        load_model_files(tmp_path)
    assert raised.value.code == code


def test_a_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="save_pretrained") as raised:
        load_model_files(tmp_path)
    assert raised.value.code == "tokenizer_missing"
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(TokenizerError, match=r"only a sentencepiece tokenizer\.model") as raised:
        load_model_files(tmp_path)
    assert raised.value.code == "tokenizer_missing"
