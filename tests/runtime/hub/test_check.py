from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.cli.main import main
from minisgl.hub.check import check_checkpoint
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.numerics.encoder_checkpoints import write_embedder, write_scorer
from support.numerics.family_checkpoints import write_family_checkpoint


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_the_report_describes_a_valid_checkpoint(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    report = check_checkpoint(checkpoint)
    assert report.servable, report.problems
    assert not report.notes
    weights = [w for file in checkpoint.glob("*.safetensors") for w in load_file(file).values()]
    assert report.num_parameters == sum(w.numel() for w in weights)
    assert report.weight_bytes == 2 * report.num_parameters
    assert report.dtype == "bfloat16"
    assert report.max_model_len == 2048
    assert report.tensor_parallel_sizes == [1, 2, 4]


def test_the_report_says_the_task_and_the_size_of_its_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_embedder(tmp_path / "gemma", "embedding-gemma")
    report = check_checkpoint(tmp_path / "gemma")
    assert (report.task, report.output_size, report.kv_bytes_per_token) == ("embed", 80, 0)
    # Dense layers are weights of the checkpoint, too.
    files = tmp_path.glob("gemma/**/model.safetensors")
    assert report.num_parameters == sum(w.numel() for file in files for w in load_file(file).values())
    assert {problem.code for problem in report.problems} == {"no_tokenizer"}
    write_scorer(tmp_path / "classes", "bert, classes")
    assert main(["models", "check", str(tmp_path / "classes")]) == 1
    printed = capsys.readouterr().out
    assert "classify: 3 classes, LABEL_0, LABEL_1, LABEL_2" in printed and "KV cache" not in printed
    assert main(["models", "check", str(tmp_path / "classes"), "--task", "generate"]) == 1
    assert "made for --task classify (wrong_task)" in capsys.readouterr().out


def test_a_dense_layer_without_its_weights_is_a_problem(tmp_path: Path) -> None:
    write_embedder(tmp_path, "embedding-gemma")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    problem = next(problem for problem in check_checkpoint(tmp_path).problems if problem.code == "no_weights")
    assert "2_Dense" in problem.message


@pytest.mark.parametrize("name", ["phi-4", "granite-moe", "ernie4.5-moe"])
def test_a_tensor_of_which_several_parameters_have_parts_counts_once(name: str, tmp_path: Path) -> None:
    report = check_checkpoint(write_family_checkpoint(tmp_path, name))
    weights = load_file(tmp_path / "model.safetensors").values()
    assert report.num_parameters == sum(w.numel() for w in weights)
    assert report.weight_bytes == 4 * report.num_parameters


@pytest.mark.parametrize(("name", "bits"), [(None, 16), ("fp8-block", 8), ("fp8-tensor", 8), ("awq", 4)])
def test_the_report_says_what_memory_the_weights_take(name: str | None, bits: int, tmp_path: Path) -> None:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    report = check_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3", quantization=name, **sizes))
    assert report.servable, report.problems
    linear = 2 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512)
    assert report.other_bytes == 2 * report.num_parameters
    assert report.cpu_bytes == 4 * report.num_parameters
    saved = report.other_bytes - report.hopper_bytes
    # A scale of a whole tensor becomes that of each of its outputs.
    outputs = 2 * (2 * 256 + 2 * 128 + 2 * 512 + 256)
    scales = {None: 0, "fp8-block": linear // 128**2 * 4, "fp8-tensor": outputs * 4, "awq": linear // 64 * 4}[name]
    assert saved == linear * (16 - bits) // 8 - scales
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 2 * 64


def test_numbers_of_ranks_that_cut_blocks_are_noted(tmp_path: Path) -> None:
    sizes = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 4, "head_dim": 64}
    report = check_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3", quantization="fp8-block", **sizes))
    assert report.servable and report.tensor_parallel_sizes == [1, 2, 4]
    (note,) = report.notes
    # A rank of four has 64 rows of queries, of keys and of values, and 64 inputs of the projection behind.
    linear, attention = 4 * 256 * 256 + 3 * 256 * 512, 4 * 256 * 256
    assert (note.code, f"{attention / linear:.0%} with --tp 4" in note.message) == ("shards_dequantized", True)
    assert "--tp 2" not in note.message


def test_ranks_that_share_a_head_of_keys_and_values_cut_no_blocks(tmp_path: Path) -> None:
    """All weights are dequantized, on one rank, too."""
    sizes = {"hidden": 192, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    report = check_checkpoint(write_tiny_checkpoint(tmp_path, "qwen3", quantization="fp8-tensor", **sizes))
    assert report.tensor_parallel_sizes == [1, 2, 4]
    assert not report.notes


def test_scales_of_the_kv_cache_are_no_unknown_tensors_but_checked(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    tensors = load_file(checkpoint / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.{each}_scale" for layer in range(2) for each in "kv"]
    save_file(tensors | {name: torch.ones(1) for name in names}, checkpoint / "model.safetensors")
    assert not check_checkpoint(checkpoint).notes
    save_file(tensors | {name: torch.ones(4) for name in names}, checkpoint / "model.safetensors")
    report = check_checkpoint(checkpoint)
    assert report.servable
    (note,) = report.notes
    assert "with --kv-cache-dtype fp8 it cannot be served" in note.message and "one scale per layer" in note.message


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen3")
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100].clone()
    tensors["extra"] = tensors["model.layers.0.input_layernorm.weight"].clone()
    save_file(tensors, checkpoint / "model.safetensors")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").write_text("{}")
    report = check_checkpoint(checkpoint)
    assert {problem.code for problem in report.problems} == {
        "missing_tensor",
        "wrong_shape",
        "no_tokenizer",
        "unexpected_tensor",
    }
    assert {note.code for note in report.notes} == {"no_chat_template"}


def test_many_missing_tensors_are_summarized(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen3")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    problems = check_checkpoint(checkpoint).problems
    assert len(problems) == 11
    assert "more tensors" in problems[-1].message


def test_files_of_an_unsupported_model_are_checked_too(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    (checkpoint / "config.json").write_text('{"architectures": ["T5Model"]}')
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    (checkpoint / "tokenizer_config.json").write_text("{")
    codes = [problem.code for problem in check_checkpoint(checkpoint).problems]
    assert codes == ["unsupported_architecture", "missing_file", "malformed_json"]


def test_a_missing_directory_is_one_problem(tmp_path: Path) -> None:
    (problem,) = check_checkpoint(tmp_path / "nowhere").problems
    assert problem.code == "model_not_found"


def test_a_window_of_some_layers_does_not_limit_the_sequence_length(tmp_path: Path) -> None:
    window = {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", config_extra={**window, "eos_token_id": None})
    (checkpoint / "generation_config.json").unlink()
    report = check_checkpoint(checkpoint)
    assert report.servable
    assert report.max_model_len == 2048
    assert [note.code for note in report.notes] == ["no_eos_token"]


def test_dual_chunk_attention_limits_the_sequence_length(tmp_path: Path) -> None:
    chunks = {"chunk_size": 512, "local_size": 64, "original_max_position_embeddings": 512}
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", config_extra={"dual_chunk_attention_config": chunks})
    report = check_checkpoint(checkpoint)
    assert (report.servable, report.max_model_len) == (True, 512)
    assert [note.code for note in report.notes] == ["dual_chunk_attention"]
    plain = check_checkpoint(checkpoint, {"dual_chunk_attention_config": None})
    assert (plain.max_model_len, plain.notes) == (2048, [])


def test_a_float32_checkpoint_is_noted(tmp_path: Path) -> None:
    report = check_checkpoint(write_tiny_checkpoint(tmp_path, "llama", dtype="float32"))
    assert report.servable
    assert [note.code for note in report.notes] == ["float32_checkpoint"]


def test_generation_settings_without_effect_are_noted(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    settings = {"do_sample": False, "max_new_tokens": 2048, "typical_p": 1.0, "suppress_tokens": None, "top_k": 20}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    report = check_checkpoint(checkpoint)
    assert report.servable
    assert [note.code for note in report.notes] == ["generation_settings_not_applied"]
    assert "do_sample False, max_new_tokens 2048;" in report.notes[0].message
