from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from minisgl.config import SchedulerConfig
from minisgl.errors import TokenizerError
from minisgl.scheduler.validation import request_from
from minisgl.tokenizer.file_hashes import hash_tokenizer_files
from minisgl.tokenizer.model_files import GenerationConfig, load_model_files
from minisgl.wire.messages import REQUEST_ID_BYTES, SamplingParams, Submit
from minisgl.wire.text import SamplingDefaults
from support.tiny_tokenizers import CHATML, byte_level, write_directory


def test_reads_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "add_bos_token": False,
    }
    generation: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    generation |= {"eos_token_id": [1, 2], "do_sample": True}
    files = load_model_files(write_directory(tmp_path, byte_level(), config=config, generation_config=generation))
    assert files.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert files.chat_template == CHATML
    assert files.add_bos_token is False
    assert files.defaults == SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0, repetition_penalty=1.05)
    assert files.hashes == hash_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": None, "top_k": None, "top_p": None, "repetition_penalty": None}, {}),
        ({"temperature": 0, "top_k": 0}, {"temperature": 0.0, "top_k": 0}),
        ({"temperature": 0.01, "top_k": 1, "top_p": 0.001}, {"temperature": 0.01, "top_k": 1, "top_p": 0.001}),
        ({"top_k": -1, "top_p": 1, "min_p": 0.05}, {"top_k": -1, "min_p": 0.05}),
        ({"repetition_penalty": 1.1, "max_new_tokens": 2048}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "max_new_tokens": 2048}, {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
    ],
    ids=str,
)
def test_sampling_defaults_of_a_checkpoint(
    generation: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """`do_sample` is not read, as in vLLM and SGLang."""
    files = load_model_files(write_directory(tmp_path, byte_level(), generation_config=generation))
    assert files.defaults == SamplingDefaults(**expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 1e6, "hot", [0.6], True]),
        ("top_k", [-2, 2**31, 2.5, "20"]),
        ("top_p", [0, 1.01, -1]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, 1e4]),
    ],
)
def test_sampling_defaults_that_would_fail_every_request_are_rejected(
    name: str, values: list[Any], tmp_path: Path
) -> None:
    for value in values:
        write_directory(tmp_path, byte_level(), generation_config={name: value})
        with pytest.raises(TokenizerError, match=rf"generation_config\.json.*{name}") as raised:
            load_model_files(tmp_path)
        assert raised.value.code == "generation_config_broken"


@pytest.mark.parametrize(
    "bounds",
    [
        {"temperature": 0.0, "top_k": -1, "top_p": 1e-9, "min_p": 0.0, "repetition_penalty": 1e-3},
        {"temperature": 1e5, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 1e3},
    ],
)
def test_the_scheduler_accepts_all_sampling_defaults(bounds: dict[str, Any]) -> None:
    assert bounds.keys() == {*SamplingDefaults.__struct_fields__}
    params = SamplingParams(**msgspec.structs.asdict(msgspec.convert(bounds, GenerationConfig)), seed=0, max_tokens=1)
    submit = Submit(id=bytes(REQUEST_ID_BYTES), prompt=bytes(4), params=params)
    limits = SchedulerConfig(
        num_pages=4,
        page_size=16,
        max_running=1,
        max_model_len=64,
        vocab_size=100,
        max_step_tokens=64,
        overlap=True,
        cache="radix",
    )
    request_from(submit, client=0, arrival=0, now=0.0, config=limits)


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


def test_a_vocabulary_that_only_mistrals_library_reads_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tekken\.json but no tokenizer\.json: convert it") as raised:
        load_model_files(tmp_path)
    assert raised.value.code == "tokenizer_missing"


TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")


@pytest.mark.parametrize("is_tekken", [True, False])
def test_texts_are_split_as_mistrals_vocabulary_was_trained(tmp_path: Path, is_tekken: bool) -> None:
    control = (*TEKKEN, "[/TOOL_RESULTS]", "[TOOL_CALLS]") if is_tekken else TEKKEN
    vocab = {text: number for number, text in enumerate((*control, "S", "e", "r", "rS"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("r", "S")]))
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\P{L}+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.add_special_tokens([*control])
    loaded = load_model_files(write_directory(tmp_path, tokenizer)).tokenizer
    # A capital behind small letters begins a part, and no token goes on from one part to the next.
    across = ["r", "S"] if is_tekken else ["rS"]
    assert loaded.encode("SerSer").tokens == ["S", "e", *across, "e", "r"]
