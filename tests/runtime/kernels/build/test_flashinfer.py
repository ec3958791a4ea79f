"""Kernels that are compiled ahead of time, and errors of machines without a compiler. The compilation itself needs
minutes and a CUDA toolkit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from minisgl.cli.main import main
from minisgl.errors import KernelBuildError
from minisgl.kernels.build import flashinfer as flashinfer_build
from minisgl.kernels.build.flashinfer import build
from minisgl.kernels.compile.flashinfer_kernels import HeadShape, PagedPrefillKernel, XqaKernel, kernels_of

BF16 = torch.bfloat16


def test_each_kernel_is_listed_once_with_the_heads_of_a_rank() -> None:
    shapes = [HeadShape(32, 4, 128, BF16, ranks) for ranks in (1, 2, 4, 8)] + [HeadShape(40, 8, 128, BF16)]
    assert kernels_of(shapes, page_size=64) == [
        PagedPrefillKernel(BF16, 128),
        XqaKernel(BF16, 64, 128, group=8),
        # Eight ranks hold four KV heads twice.
        XqaKernel(BF16, 64, 128, group=4),
        XqaKernel(BF16, 64, 128, group=5),
    ]
    assert kernels_of([HeadShape(4, 2, 32, torch.float32)], page_size=64) == []


def test_names_match_the_folders_that_flashinfer_searches() -> None:
    assert XqaKernel(BF16, 64, 128, 2).name == (
        "xqa_input_bf16_kv_cache_bf16_output_bf16_page_size_64_head_dim_128_head_group_ratio_2_use_sliding_window_False_"
        "use_spec_dec_False_spec_q_seq_len_1"
    )
    assert PagedPrefillKernel(torch.float16, 64).name == (
        "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_"
        "posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_kv_stride_equal"
    )


def test_the_command_lists_the_kernels_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", "qwen3-14b", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 2
    assert "head_group_ratio_5_" in names[1]
    assert main(["kernels", "build", "llama-3.1-8b", "--tp", "3", "--list"]) == 0
    assert capsys.readouterr().out.strip() == "", "no model can be split over three ranks"


def test_without_nvcc_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(flashinfer_build.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(KernelBuildError, match="install the CUDA toolkit") as refused:
        build([XqaKernel(BF16, 64, 128, 2)], tmp_path, architecture="9.0a")
    assert refused.value.code == "no_nvcc"
    assert main(["kernels", "build", "qwen3-14b"]) == 1
    assert "--out" in capsys.readouterr().err


def _put(kernel: XqaKernel, folder: Path) -> None:
    library = folder / kernel.name / f"{kernel.name}.so"
    library.parent.mkdir()
    library.touch()


def test_existing_kernels_are_not_compiled_again(tmp_path: Path) -> None:
    kernel = XqaKernel(BF16, 64, 128, 2)
    _put(kernel, tmp_path)
    assert build([kernel], tmp_path, architecture="9.0a") == []


@pytest.mark.parametrize("groups", [(2,), (2, 4), (4,)])
def test_a_folder_has_kernels_of_one_architecture(groups: tuple[int, ...], tmp_path: Path) -> None:
    """Also where a model needs none of those that are there."""
    _put(XqaKernel(BF16, 64, 128, 2), tmp_path)
    wanted = [XqaKernel(BF16, 64, 128, group) for group in groups]
    with pytest.raises(KernelBuildError, match=r"has kernels for GPUs of 9\.0a") as refused:
        build(wanted, tmp_path, architecture="10.0a")
    assert refused.value.code == "other_architecture"
