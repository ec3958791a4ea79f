"""Scales of an FP8 KV cache in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.errors import ModelError
from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.models.kv_scales import read_kv_scales


def _checkpoint(folder: Path, **scales: torch.Tensor) -> Path:
    tensors = {f"model.layers.{name.replace('__', '.')}": value for name, value in scales.items()}
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2), **tensors}, folder / "model.safetensors")
    return folder


def test_scales_are_one_without_any(tmp_path: Path) -> None:
    assert read_kv_scales(_checkpoint(tmp_path), [0, 1]) == [KVScales(), KVScales()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
def test_scales_of_each_layer_are_read(tmp_path: Path, key: str, value: str) -> None:
    scales = {}
    for layer in range(2):
        scales[f"{layer}__self_attn__{value}"] = torch.tensor([0.5])
        scales[f"{layer}__self_attn__{key}"] = torch.tensor(0.25 if key != value else 0.5)
    expected = KVScales(0.25 if key != value else 0.5, 0.5)
    assert read_kv_scales(_checkpoint(tmp_path, **scales), [0, 1]) == [expected, expected]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_positive_numbers_are_refused(tmp_path: Path, scale: float) -> None:
    tensors = {"0__self_attn__k_scale": torch.tensor(scale), "0__self_attn__v_scale": torch.tensor(1.0)}
    with pytest.raises(ModelError, match=r"k_scale is .*not a positive number") as refused:
        read_kv_scales(_checkpoint(tmp_path, **tensors), [0])
    assert refused.value.code == "corrupt_checkpoint"


def test_scales_of_single_heads_are_refused(tmp_path: Path) -> None:
    tensors = {f"0__self_attn__{name}": torch.ones(4) for name in ("k_scale", "v_scale")}
    with pytest.raises(ModelError, match=r"k_scale has shape \[4\]; one scale per layer"):
        read_kv_scales(_checkpoint(tmp_path, **tensors), [0])


def test_layers_without_scales_beside_others_are_refused(tmp_path: Path) -> None:
    tensors = {f"0__self_attn__{name}": torch.tensor(1.0) for name in ("k_scale", "v_scale")}
    with pytest.raises(ModelError, match="not both for layer 1") as refused:
        read_kv_scales(_checkpoint(tmp_path, **tensors), [0, 1])
    assert refused.value.code == "missing_tensor"
