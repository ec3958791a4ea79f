"""Embeddings and scores against Hugging Face transformers and pooling in plain torch, in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.hub.check import check_checkpoint
from minisgl.models.build import packed_attention
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import DecoderConfig
from minisgl.models.encoder_config import EncoderConfig
from minisgl.models.pooling_files import read_pooling
from minisgl.models.random_weights import fill_random
from support.numerics.encoder_checkpoints import (
    EMBEDDERS,
    SCORERS,
    TEXTS,
    Served,
    cosines,
    reference_embedding,
    write_embedder,
    write_scorer,
)
from support.numerics.family_checkpoints import write_family_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    model = write_embedder(checkpoint, name)
    served = Served(checkpoint)
    expected = torch.stack([reference_embedding(checkpoint, model, text, served.pooling) for text in TEXTS])
    packed = served.outputs(TEXTS)
    assert packed.dtype == torch.float32 and packed.shape == (len(TEXTS), served.pooling.output_size)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-4)
    assert cosines(packed, expected).min() >= 0.9999
    # Embeddings are different enough to tell one from another.
    assert cosines(packed[:1], packed[3:4]) < 0.995
    alone = torch.cat([served.outputs([text]) for text in TEXTS])
    torch.testing.assert_close(alone, packed, rtol=0, atol=1e-5)
    torch.testing.assert_close(served.outputs(TEXTS[::-1]).flip(0), packed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model: Any = write_scorer(tmp_path, name)
    served = Served(tmp_path)
    texts = [text for text in TEXTS if len(text) > 4]
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([text])).logits for text in texts])
    expected = torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, -1)
    assert expected.std(0).min() > 0.001
    torch.testing.assert_close(served.outputs(texts), expected, rtol=0, atol=1e-4)
    assert served.pooling.task == ("rerank" if logits.shape[1] == 1 else "classify")


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "gte"])
def test_token_types_tell_the_second_text_of_a_pair(name: str, tmp_path: Path) -> None:
    model: Any = write_scorer(tmp_path, name) if name != "gte" else write_embedder(tmp_path, name)
    served = Served(tmp_path)
    text, start = TEXTS[0], 20
    found = served.outputs([text, TEXTS[5]], [start, len(TEXTS[5])])
    types = torch.tensor([[int(i >= start) for i in range(len(text))]])
    with torch.inference_mode():
        made = model(torch.tensor([text]), token_type_ids=types)
    if name == "gte":
        expected = made.last_hidden_state[:, 0] / made.last_hidden_state[:, 0].norm()
    else:
        expected = torch.sigmoid(made.logits)
    torch.testing.assert_close(found[:1], expected, rtol=0, atol=1e-4)
    without = served.outputs([text, TEXTS[5]])
    assert (without[0] - found[0]).abs().max() > 1e-3
    torch.testing.assert_close(without[1], found[1], rtol=0, atol=1e-5)


def test_a_reranker_without_a_head_compares_two_logits(tmp_path: Path) -> None:
    model: Any = write_embedder(tmp_path, "qwen3")
    (tmp_path / "modules.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"no": 11, "yes": 7}}}')
    served = Served(tmp_path, pooling=read_pooling(tmp_path, ModelConfig.read(tmp_path), "rerank"))
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([text])).logits[:, -1, [11, 7]] for text in TEXTS])
    torch.testing.assert_close(served.outputs(TEXTS), torch.softmax(logits, -1)[:, 1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "modernbert", "gte", "embedding-gemma", "qwen3"])
def test_ranks_give_the_same_embeddings(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_embedder(checkpoint, name)
    expected = Served(checkpoint).outputs(TEXTS)

    def rank_outputs(parallel: TensorParallel) -> torch.Tensor:
        return Served(checkpoint, parallel).outputs(TEXTS)

    for outputs in run_ranks(2, tmp_path, rank_outputs):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4)


def _attention(body: EncoderConfig | DecoderConfig, **changes: Any) -> EncoderConfig | DecoderConfig:
    layers = tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in body.layers)
    return replace(body, layers=layers)


def _feed_forward(body: EncoderConfig, **changes: Any) -> EncoderConfig:
    layers = tuple(replace(layer, feed_forward=replace(layer.feed_forward, **changes)) for layer in body.layers)
    return replace(body, layers=layers)


_WITHOUT: Final[Mapping[tuple[str, str], Callable[[Any], EncoderConfig | DecoderConfig]]] = {
    ("xlm-roberta", "first position"): lambda body: replace(body, first_position=0),
    ("xlm-roberta", "row of token types"): lambda body: replace(body, token_types=0),
    ("bert", "positions"): lambda body: replace(body, positions=0),
    ("bert", "exact gelu"): lambda body: _feed_forward(body, activation="relu"),
    ("bert", "biases"): lambda body: _attention(body, qkv_bias=False),
    ("bert", "attention to later tokens"): lambda body: _attention(body, causal=True),
    ("nomic-bert", "rope"): lambda body: _attention(body, rope=None),
    ("gte", "order of gate and value"): lambda body: replace(body, names=replace(body.names, gate_is_second=False)),
    ("modernbert", "windows"): lambda body: _attention(body, window=None),
    ("modernbert", "size of windows"): lambda body: replace(
        body,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=layer.attention.window and 8))
            for layer in body.layers
        ),
    ),
    ("modernbert", "two ropes"): lambda body: _attention(body, rope=body.layers[0].attention.rope),
    ("embedding-gemma", "attention to later tokens"): lambda body: _attention(body, causal=True),
    ("embedding-gemma", "windows"): lambda body: _attention(body, window=None),
}
"""What a family has, and its body without it."""


@pytest.mark.parametrize(("name", "what"), _WITHOUT)
def test_embeddings_need_everything_that_a_family_has(name: str, what: str, tmp_path: Path) -> None:
    write_embedder(tmp_path, name)
    config = ModelConfig.read(tmp_path)
    expected = Served(tmp_path).outputs(TEXTS)
    body = _WITHOUT[name, what](config.body)
    body = replace(body, names=replace(body.names, left_out=("model.",)))
    without = Served(tmp_path, config=replace(config, body=body)).outputs(TEXTS)
    # Cosines of the longest texts.
    assert cosines(without, expected)[[0, 3]].max() < 0.9999


def test_texts_may_be_as_long_as_positions_are_left(tmp_path: Path) -> None:
    write_embedder(tmp_path / "roberta", "xlm-roberta")
    assert ModelConfig.read(tmp_path / "roberta").max_model_len == 126
    assert Served(tmp_path / "roberta").outputs([[5] * 126]).isfinite().all()
    write_embedder(tmp_path / "bert", "bert")
    assert ModelConfig.read(tmp_path / "bert").max_model_len == 128


def test_a_tensor_without_a_place_is_an_error_and_heads_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_embedder(tmp_path, "bert")
    report = check_checkpoint(tmp_path)
    assert "model.pooler" in next(note.message for note in report.notes if note.code == "left_out_tensors")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "embeddings.adapter.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no place for embeddings\.adapter\.weight"):
        Served(tmp_path)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2", "gemma4, shared layers", "glm4", "olmo3", "granite"])
def test_decoders_of_all_kinds_run_without_a_kv_pool(name: str, tmp_path: Path) -> None:
    model = load(write_family_checkpoint(tmp_path, name))
    expected = all_logits(model, TEXTS)
    attention = packed_attention(model.config, TensorParallel(), torch.float32, torch.device("cpu"))
    lengths = np.array([len(text) for text in TEXTS], np.int32)
    attention.begin(torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)), lengths)
    tokens = torch.tensor([token for text in TEXTS for token in text])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        logits = model.local_logits(model.forward(tokens, positions, attention))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic-bert", "embedding-gemma", "qwen3"])
def test_random_weights_keep_embeddings_finite_and_apart(name: str, tmp_path: Path) -> None:
    write_embedder(tmp_path, name)
    served = Served(tmp_path, dtype=torch.bfloat16)
    fill_random(served.model.parameters)
    outputs = served.outputs(TEXTS)
    assert outputs.isfinite().all()
    assert cosines(outputs[:1], outputs[3:4]) < 0.999


@pytest.mark.parametrize("name", ["bert", "modernbert", "embedding-gemma", "qwen3"])
def test_embeddings_in_16_bits_are_close_whatever_the_batch(name: str, tmp_path: Path) -> None:
    """The bound for embeddings of one text alone and among others, beside the error of the data type itself."""
    write_embedder(tmp_path, name)
    exact = Served(tmp_path).outputs(TEXTS)
    served = Served(tmp_path, dtype=torch.bfloat16)
    packed = served.outputs(TEXTS)
    alone = torch.cat([served.outputs([text]) for text in TEXTS])
    assert cosines(packed, exact).min() > 0.995
    assert cosines(packed, alone).min() > 0.999
