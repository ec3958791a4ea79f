from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.models.checkpoint import stored_tensors
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import fill_random
from minisgl.models.weights import load_weights
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.numerics.family_checkpoints import write_family_checkpoint
from support.numerics.ranks import all_logits, load, run_ranks


def empty(checkpoint: Path, parallel: TensorParallel | None = None) -> Decoder:
    return Decoder(ModelConfig.read(checkpoint), parallel or TensorParallel(), torch.float32, "cpu")


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_every_parameter_is_filled_exactly_once(arch: str, size: int, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", arch, vocab=575)

    def check(parallel: TensorParallel) -> None:
        model = empty(checkpoint, parallel)
        padding = max(0, model.vocab_start + model.vocab_local - 575)
        tables = 1 if model.config.decoder.tied_embeddings else 2
        for source in model.parameters.sources:
            source.into.zero_()
        for source in model.parameters.sources:
            assert not source.into.isnan().any(), f"{source.name} overlaps another source"
            source.into.fill_(torch.nan)
        filled = sum(source.into.numel() for source in model.parameters.sources)
        assert 4 * (filled + tables * padding * model.config.hidden_size) == model.parameter_bytes
        load_weights(model.parameters, checkpoint)
        for source in model.parameters.sources:
            assert source.into.isfinite().all(), source.name

    run_ranks(size, tmp_path, check)


def test_weights_in_a_second_format_are_not_read(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "mistral")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])
    (checkpoint / "consolidated.safetensors").write_bytes(b"not read")
    (checkpoint / "model.safetensors.index.json").unlink()
    assert torch.equal(all_logits(load(checkpoint), [[1, 2, 3]]), expected)


def test_a_rank_reads_only_its_part_and_reports_progress(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "mistral")
    whole = load_weights(empty(checkpoint).parameters, checkpoint)
    assert whole == sum(w.nbytes for file in checkpoint.glob("*.safetensors") for w in load_file(file).values())

    def read(parallel: TensorParallel) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        load_weights(empty(checkpoint, parallel).parameters, checkpoint, progress=lambda *at: seen.append(at))
        return seen

    for seen in run_ranks(2, tmp_path, read):
        total = seen[0][1]
        assert total <= 0.6 * whole
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (total, total)


def failure(checkpoint: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_weights(empty(checkpoint).parameters, checkpoint)
    return caught.value


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    edit(checkpoint / "model.safetensors", lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    error = failure(checkpoint)
    assert error.code == "missing_tensor"
    assert "model.layers.1.self_attn.k_proj.bias" in str(error)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    edit(checkpoint / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(64)}))
    error = failure(checkpoint)
    assert error.code == "wrong_shape"
    assert all(part in str(error) for part in ("model.safetensors", "model.norm.weight", "[64]", "[128]"))


def test_an_element_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    edit(
        checkpoint / "model.safetensors",
        lambda t: t.update({"model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)}),
    )
    error = failure(checkpoint)
    assert error.code == "wrong_dtype"
    assert "F8_E4M3" in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) * 2 // 3],
        lambda data: data[:5],
        lambda data: data + b"more",
        lambda data: data[:20] + b"\xff" * 8 + data[28:],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: b"<html>not found</html>",
    ],
    ids=["cut in the data", "cut in the length", "longer", "bad header", "bad length", "a list", "a web page"],
)
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    file = checkpoint / "model-00002-of-00002.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    error = failure(checkpoint)
    assert error.code == "corrupt_checkpoint"
    assert file.name in str(error)
    assert "download" in str(error)


def test_missing_files_are_named(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    error = failure(checkpoint)
    assert error.code == "missing_file"
    assert "model-00002-of-00002.safetensors" in str(error)
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert failure(checkpoint).code == "malformed_json"
    for file in checkpoint.glob("model*"):
        file.unlink()
    assert failure(checkpoint).code == "no_weights"
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    assert "convert" in str(failure(checkpoint))


def test_tensors_that_nobody_expects_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    derived = {"lm_head.weight": torch.zeros(576, 128), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(checkpoint / "model.safetensors", lambda t: t.update(derived))
    with caplog.at_level(logging.WARNING):
        load(checkpoint)
    assert not caplog.records
    unexpected = {"model.layers.0.mlp.gate_scale": torch.ones(1), "vision_tower.weight": torch.ones(1)}
    edit(checkpoint / "model.safetensors", lambda t: t.update(unexpected))
    error = failure(checkpoint)
    assert error.code == "unexpected_tensor"
    assert "model.layers.0.mlp.gate_scale and 1 more tensors" in str(error)


def test_biases_of_quantized_layers_without_one_must_be_zero(tmp_path: Path) -> None:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen3", quantization="gptq", **sizes)
    name = "model.layers.0.mlp.down_proj.bias"
    edit(checkpoint / "model.safetensors", lambda t: t.update({name: torch.zeros(256)}))
    load(checkpoint)
    edit(checkpoint / "model.safetensors", lambda t: t.update({name: torch.ones(256)}))
    assert name in str(failure(checkpoint))


def test_quantized_experts_in_one_tensor_are_refused_and_those_of_a_dense_checkpoint_stay_as_they_are(
    tmp_path: Path,
) -> None:
    checkpoint = write_family_checkpoint(tmp_path, "granite-moe")
    config = ModelConfig.read(checkpoint, quantization="fp8")
    load(checkpoint, config=config)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = ModelConfig.read(checkpoint, overrides={"quantization_config": blocks})
    with pytest.raises(ModelError, match=r"input_linear\.weight has all experts of a layer") as refused:
        Decoder(stored, TensorParallel(), torch.float32, "cpu")
    assert refused.value.code == "quantized_checkpoint"


@pytest.mark.parametrize("name", ["granite-moe", "glm4-moe", "phi-4"])
@pytest.mark.parametrize("size", [1, 2])
def test_random_weights_do_not_depend_on_the_ranks_and_fill_every_parameter(
    name: str, size: int, tmp_path: Path
) -> None:
    config = ModelConfig.read(write_family_checkpoint(tmp_path / "checkpoint", name))

    def logits(parallel: TensorParallel) -> torch.Tensor:
        model = Decoder(config, parallel, torch.float32, "cpu")
        for source in model.parameters.sources:
            source.into.fill_(torch.nan)
        fill_random(model.parameters)
        return all_logits(model, [[1, 2, 3]], parallel)

    alone = logits(TensorParallel())
    assert bool(alone.isfinite().all())
    for each in run_ranks(size, tmp_path, logits):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4-moe", "model.layers.4.eh_proj.weight"),
        ("minimax-m2", "model.layers.6.eh_proj.weight"),
        ("ernie4.5-moe", "model.mtp_block.0.mlp.up_proj.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    name: str, tensor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_family_checkpoint(tmp_path, name, num_mtp_modules=3)
    edit(checkpoint / "model.safetensors", lambda t: t.update({tensor: torch.ones(1)}))
    with caplog.at_level(logging.INFO):
        load(checkpoint)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    prefix = "1 tensors of the checkpoint are left out on purpose: "
    assert record.getMessage().startswith(prefix)
    assert tensor.startswith(record.getMessage().removeprefix(prefix).removesuffix(" (1)"))


def test_weights_without_an_index_may_be_in_any_files(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    expected = all_logits(load(checkpoint), [[1, 2, 3]])
    (checkpoint / "model.safetensors.index.json").unlink()
    assert torch.equal(all_logits(load(checkpoint), [[1, 2, 3]]), expected)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_random_weights_give_finite_logits_that_do_not_depend_on_the_split(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", arch)

    def logits(parallel: TensorParallel) -> torch.Tensor:
        model = empty(checkpoint, parallel)
        fill_random(model.parameters, seed=3)
        return all_logits(model, [list(range(30))], parallel)

    alone = logits(TensorParallel())
    assert alone.isfinite().all()
    assert 0.3 < alone.std() < 3
    torch.testing.assert_close(run_ranks(2, tmp_path, logits)[1], alone, rtol=1e-4, atol=1e-4)


def test_an_index_cannot_name_files_outside_the_directory(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((checkpoint / "model-00001-of-00002.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    error = failure(checkpoint)
    assert error.code == "malformed_json"
    assert "outside" in str(error)


def index_of(checkpoint: Path) -> Path:
    return checkpoint / "model.safetensors.index.json"


def test_an_index_may_name_the_tensors_of_many_quantized_experts(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    expected = stored_tensors(checkpoint)
    files = [file.name for file in checkpoint.glob("model-*.safetensors")]
    layers = (f"model.layers.{n % 61}.mlp.experts.{n}.gate_proj" for n in range(80_000))
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    names = (f"{layer}.{part}" for layer in layers for part in parts)
    index = {"weight_map": {name: files[n % len(files)] for n, name in enumerate(names)}}
    index_of(checkpoint).write_text(json.dumps(index, indent=2))
    assert stored_tensors(checkpoint) == expected


def test_an_index_without_end_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    index_of(checkpoint).write_text('{"weight_map": {' + ",".join(['"a":""'] * 1_000_000) + "}}")
    error = failure(checkpoint)
    assert error.code == "malformed_json" and "entries are more than 1000000" in str(error)
    os.truncate(index_of(checkpoint), (128 << 20) + 1)
    error = failure(checkpoint)
    assert error.code == "malformed_json" and "bytes are more than" in str(error)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}', "[" * 100_000],
    ids=["nothing", "list", "no map", "list in it", "number in it", "list for a file", "nested"],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    index_of(checkpoint).write_text(content)
    error = failure(checkpoint)
    assert error.code == "malformed_json" and index_of(checkpoint).name in str(error) and "download" in str(error)


@pytest.mark.parametrize(
    "name", ["a" * 100_000, "\x00", "..", "é" * 200], ids=["long", "NUL", "parent", "long in bytes"]
)
def test_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    index_of(checkpoint).write_text(json.dumps({"weight_map": {"a": name}}))
    error = failure(checkpoint)
    assert error.code == "missing_file" and len(str(error)) < 1_000
