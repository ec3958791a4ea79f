from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.numerics.ranks import all_logits, load

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the station?"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Danke, 谢谢 🙂"},
]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_same_arguments_give_the_same_bytes(arch: str, tmp_path: Path) -> None:
    first = digests(write_tiny_checkpoint(tmp_path / "a", arch, seed=1))
    assert digests(write_tiny_checkpoint(tmp_path / "b", arch, seed=1)) == first
    assert digests(write_tiny_checkpoint(tmp_path / "a", arch, seed=1)) == first
    assert digests(write_tiny_checkpoint(tmp_path / "b", arch, seed=2)) != first


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_greedy_sampling_has_a_margin(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    tokens = torch.randint(0, 570, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = all_logits(load(checkpoint), [tokens])
    rounded = all_logits(load(checkpoint, dtype=torch.bfloat16), [tokens]).float()
    best = exact.topk(2).values
    gap = (best[:, 0] - best[:, 1]).median()
    error = (rounded - exact).abs().mean()
    assert gap > 10 * error


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_greedy_answers_vary_and_do_not_end_by_chance(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    model = load(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode("Tell me a story").ids
    prompt = len(tokens)
    for _ in range(48):
        tokens.append(int(all_logits(model, [tokens])[-1].argmax()))
    answer = tokens[prompt:]
    assert len(set(answer)) >= 8
    assert not set(answer) & set(model.config.eos_token_ids)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_transformers_reads_the_tokenizer_and_chat_template(arch: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Grüße, 世界! 🙂 def f(x): return x"
    plain = tokenizer(text)["input_ids"]
    assert tokenizer.decode(plain, skip_special_tokens=True) == text
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt.index("Be brief.") < prompt.index("station") < prompt.index("There.") < prompt.index("Danke")
    if arch in ("llama", "mistral"):
        assert prompt.count(tokenizer.bos_token) == 1
        assert prompt.startswith(tokenizer.bos_token)
        assert plain.count(tokenizer.bos_token_id) == 1
    else:
        assert prompt.endswith("<|im_start|>assistant\n")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert set(tokenizer.all_special_ids) & set(ids)
    assert max(ids) < ModelConfig.read(checkpoint).vocab_size


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_generation_config_lists_the_end_tokens(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    listed = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert isinstance(listed, list)
    config = ModelConfig.read(checkpoint)
    assert config.eos_token_ids == tuple(listed)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert all(tokenizer.id_to_token(token) for token in listed)


def test_shapes_for_gpu_kernels(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path, "qwen3", layers=3, hidden=256, head_dim=128, heads=4, kv_heads=2, vocab=1000, intermediate=512
    )
    config = load(checkpoint).config
    assert (config.num_layers, config.hidden_size, config.attention.head_dim, config.vocab_size) == (3, 256, 128, 1000)
    assert (config.attention.num_heads, config.attention.num_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("arch", "options", "code"),
    [
        ("gpt2", {}, "unknown_tiny_arch"),
        ("llama", {"hidden": 130}, "invalid_tiny_model"),
        ("llama", {"vocab": 100}, "invalid_tiny_model"),
        ("llama", {"kv_heads": 3}, "invalid_config"),
        ("qwen3-moe", {"experts": 129}, "invalid_tiny_model"),
    ],
)
def test_invalid_shapes_are_rejected(arch: str, options: dict[str, int], code: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as rejected:
        write_tiny_checkpoint(tmp_path, arch, **options)
    assert rejected.value.code == code
