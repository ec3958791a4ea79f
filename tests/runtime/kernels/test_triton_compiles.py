"""The CUDA kernels compile for Hopper; that needs no GPU. What they compute is tested where there is one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from minisgl.kernels import (
    activation_triton,
    choice_triton,
    norm_triton,
    rotary_triton,
    skinny_linear_triton,
    step_inputs_triton,
    store_kv_triton,
    thresholds_triton,
)

INT, INTS, LONGS, FLOATS, HALVES = "i32", "*i32", "*i64", "*fp32", "*bf16"

STEP_INPUTS = dict.fromkeys(("total", "decode", "pages_per_row"), INT) | {"locations": LONGS}
CHOOSE = dict.fromkeys(("parameter_stride", "row_stride", "columns", "first_index", "parts"), INT)
SCORES = dict.fromkeys(("scores", "best_scores", "out", "thresholds"), FLOATS)


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (step_inputs_triton._step_inputs, STEP_INPUTS, {"PAGE_SIZE": 64, "BLOCK": 128}),
        (
            store_kv_triton._store,
            dict.fromkeys(("keys", "values", "k", "v"), HALVES)
            | {"locations": LONGS, "k_stride": INT, "v_stride": INT},
            {"WIDTH": 1000, "BLOCK": 1024},
        ),
        *(
            (
                choice_triton._choose_part,
                CHOOSE | SCORES | {"logits": dtype},
                {"FILTERED": filtered, "PART": 8192, "BLOCK": 2048},
            )
            for dtype in (HALVES, FLOATS)
            for filtered in (False, True)
        ),
        (choice_triton._choose_row, CHOOSE | SCORES, {"PARTS": 32}),
        *(
            (thresholds_triton._thresholds, CHOOSE | SCORES | {"logits": dtype}, {"BLOCK": 4096})
            for dtype in (HALVES, FLOATS)
        ),
        *(
            (
                norm_triton._add_rms_norm,
                dict.fromkeys(("x", "residual", "weight", "out"), HALVES)
                | {"x_stride": INT, "width": INT, "eps": "fp32"},
                {"ADD": add, "BLOCK": 1024},
            )
            for add in (False, True)
        ),
        (
            activation_triton._silu_and_mul,
            dict.fromkeys(("gate_up", "out"), HALVES) | {"width": INT},
            {"BLOCK": 1024},
        ),
        *(
            (
                rotary_triton._norm_rope,
                dict.fromkeys(("q", "k", "q_out", "k_out", "q_weight", "k_weight"), HALVES)
                | {"cos_sin": FLOATS, "q_stride": INT, "k_stride": INT, "eps": "fp32"},
                {"Q_HEADS": 16, "K_HEADS": 8, "HALF": 64, "NORM": norm, "HEADS": 32, "PAIRS": 64},
            )
            for norm in (False, True)
        ),
        *(
            (
                kernel,
                dict.fromkeys(("x", "weight", "out"), HALVES) | dict.fromkeys(("inputs", "outputs", "rows"), INT),
                {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k},
            )
            for kernel, rows, block_n, block_k in (
                (skinny_linear_triton._vector, 1, 2, 1024),
                (skinny_linear_triton._vector, 4, 2, 1024),
                (skinny_linear_triton._matrix, 16, 16, 128),
            )
        ),
    ],
)
def test_compiles_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, int]) -> None:
    signature = {name: "constexpr" if name in constants else types.get(name, INTS) for name in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = compile(ASTSource(kernel, signature, constexprs=constexprs), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
