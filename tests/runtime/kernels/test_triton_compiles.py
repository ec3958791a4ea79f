"""The CUDA kernels compile for Hopper; that needs no GPU. What they compute is tested where there is one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from minisgl.kernels import one_shot_all_reduce_triton
from minisgl.kernels.attention import (
    convolution_prefill_triton,
    gated_delta_prefill_triton,
    gather_keys_triton,
    mamba2_prefill_triton,
    recurrent_decode_triton,
    rotary_triton,
    sinks_triton,
    split_kv_decode_triton,
)
from minisgl.kernels.experts import gate_rows_triton, gemv_gluon, grouped_gemm_triton, routing_gluon, routing_triton
from minisgl.kernels.linear import dense_skinny_triton, dequantize_triton, fp4_dequantize_triton, fp8_gemv_gluon
from minisgl.kernels.pointwise import (
    activation_triton,
    gated_norm_triton,
    layer_norm_triton,
    norm_triton,
    output_gate_triton,
    step_inputs_triton,
)
from minisgl.kernels.sampling import sample_triton
from support.kernels.compiled_kernel import compiled
from support.launcher import endless_kernel

INT, FLOAT, LONGS, FLOATS, HALVES = "i32", "fp32", "*i64", "*fp32", "*bf16"
FP8S = "*fp8e4nv"

STEP_INPUTS = dict.fromkeys(("total", "decode", "pages_per_row", "page_size", "by_slot"), INT) | {"locations": LONGS}
SAMPLE = dict.fromkeys(("parameter_stride", "row_stride", "columns", "first_index", "parts"), INT)
EXPERTS = dict.fromkeys(
    ("x", "weight", "scales", "bias", "out", "shares", "logits", "weights"), HALVES
) | dict.fromkeys(("pairs", "tokens", "width"), INT)
FP8_EXPERTS = EXPERTS | {"weight": FP8S, "scales": FLOATS}
CHOICE = {"EXPERTS": 128, "BLOCK": 128, "TOP_K": 8, "PDL": True}
PLAIN = {"BIAS": False, "ALPHA": 1.0, "LIMIT": 0.0, "GELU": False, "GATED": True}
SELECTED = CHOICE | {"CHOSEN": False}
"""By kernels that also run the experts."""
ALL_AHEAD = SELECTED | {"WIDTH": 384, "HIDDEN": 2048, "AHEAD": 8, "GROUPS": 0, "BIAS": False}
GATED_DELTA = {"HEADS": 48, "KEY": 128, "VALUE": 128, "KEYS": 128}
MAMBA = {"GROUPS": 8, "HEADS": 64, "KEY": 128, "VALUE": 64, "KEYS": 128, "VALUES": 64}
SCORES = dict.fromkeys(("scores", "best_scores"), FLOATS)


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (step_inputs_triton._step_inputs, STEP_INPUTS, {"BLOCK": 128}),
        (step_inputs_triton._store_last_tokens, {"total": INT}, {"BLOCK": 128, "PDL": True}),
        (
            gather_keys_triton._locate,
            {"pages_per_row": INT, "page_size": INT},
            {"GUARD": 256, "BLOCK": 256},
        ),
        (
            gather_keys_triton._gather,
            dict.fromkeys(("keys", "values", "key_out", "value_out"), HALVES),
            {"WIDTH": 1024, "COLUMNS": 1024, "ROWS": 8, "GUARD": 256},
        ),
        (
            gather_keys_triton._gather,
            dict.fromkeys(("keys", "values"), FP8S) | dict.fromkeys(("key_out", "value_out"), HALVES),
            {"WIDTH": 1024, "COLUMNS": 1024, "ROWS": 16, "GUARD": 256},
        ),
        (
            recurrent_decode_triton._convolve_rows,
            dict.fromkeys(("x", "inputs", "weight", "bias", "out"), HALVES)
            | dict.fromkeys(("x_stride", "place_stride", "channels"), INT),
            {"TAPS": 4, "BIAS": True, "SILU": True, "BLOCK": 256, "PDL": True},
        ),
        (
            recurrent_decode_triton._gated_delta_rows,
            dict.fromkeys(("log_decay", "decay_bias", "states"), FLOATS)
            | dict.fromkeys(("mixed", "decay", "step", "out"), HALVES)
            | dict.fromkeys(("decay_stride", "step_stride", "place_stride"), INT),
            GATED_DELTA | {"KEY_HEADS": 16, "EPS": 1e-6, "VALUES": 64, "PDL": True},
        ),
        (
            recurrent_decode_triton._mamba2_rows,
            dict.fromkeys(("log_decay", "step_bias", "skip", "states"), FLOATS)
            | dict.fromkeys(("mixed", "step", "out"), HALVES)
            | dict.fromkeys(("step_stride", "place_stride"), INT),
            MAMBA | {"PDL": True},
        ),
        (
            convolution_prefill_triton._convolve_chunks,
            dict.fromkeys(("x", "inputs", "checkpoints", "weight", "bias", "out"), HALVES)
            | dict.fromkeys(("count", "x_stride", "place_stride", "checkpoint_stride", "channels"), INT),
            {"TAPS": 4, "BIAS": True, "SILU": True, "CHUNK": 64, "BLOCK": 64},
        ),
        (
            convolution_prefill_triton._keep_inputs,
            dict.fromkeys(("x", "inputs"), HALVES) | dict.fromkeys(("x_stride", "place_stride", "channels"), INT),
            {"TAPS": 4, "BLOCK": 256},
        ),
        (
            gated_delta_prefill_triton._invert_chunks,
            dict.fromkeys(("log_decay", "decay_bias"), FLOATS)
            | dict.fromkeys(("mixed", "decay", "step", "solved_out"), HALVES)
            | dict.fromkeys(("count", "decay_stride", "step_stride"), INT),
            GATED_DELTA | {"KEY_HEADS": 16, "EPS": 1e-6, "CHUNK": 64, "PRECISION": "tf32"},
        ),
        (
            gated_delta_prefill_triton._solve_chunks,
            dict.fromkeys(("log_decay", "decay_bias", "totals_out"), FLOATS)
            | dict.fromkeys(("mixed", "decay", "step", "solved_in"), HALVES)
            | dict.fromkeys(("keys_out", "values_out", "queries_out", "left_out", "scores_out"), HALVES)
            | dict.fromkeys(("count", "decay_stride", "step_stride"), INT),
            GATED_DELTA | {"KEY_HEADS": 16, "EPS": 1e-6, "VALUES": 128, "CHUNK": 64, "PRECISION": "tf32"},
        ),
        (
            gated_delta_prefill_triton._scan_chunks,
            dict.fromkeys(("keys_in", "values_in", "queries_in", "left_in", "scores_in", "out"), HALVES)
            | dict.fromkeys(("totals_in", "states"), FLOATS)
            | {"checkpoints": "*fp16"}
            | dict.fromkeys(("count", "place_stride", "checkpoint_stride"), INT),
            GATED_DELTA | {"VALUES": 64, "CHUNK": 64, "PRECISION": "tf32"},
        ),
        (
            mamba2_prefill_triton._scan_chunks,
            dict.fromkeys(("log_decay", "step_bias", "skip", "states"), FLOATS)
            | dict.fromkeys(("mixed", "step", "out"), HALVES)
            | {"checkpoints": "*fp16"}
            | dict.fromkeys(("count", "step_stride", "place_stride", "checkpoint_stride"), INT),
            MAMBA | {"CHUNK": 64, "MOST_DECAY": -30.0, "PRECISION": "tf32"},
        ),
        (
            output_gate_triton._open_heads,
            dict.fromkeys(("heads", "gates", "out"), HALVES) | dict.fromkeys(("width", "row_stride"), INT),
            {"HEAD_STRIDE": 512, "HEAD_DIM": 256, "BLOCK": 1024, "PDL": True},
        ),
        (
            output_gate_triton._add_gated,
            dict.fromkeys(("total", "part", "x", "gate", "out"), HALVES) | dict.fromkeys(("width", "hidden"), INT),
            {"WIDTH": 2048, "HIDDEN": 2048, "PDL": True},
        ),
        *(
            (
                gated_norm_triton._gated_norm,
                dict.fromkeys(("heads", "gate", "gain", "out"), HALVES)
                | dict.fromkeys(("rows", "gate_stride"), INT)
                | {"eps": FLOAT},
                {"GROUPS": 8, "WIDTH": width, "GATE_FIRST": width == 512, "ROWS": 4, "BLOCK": width, "PDL": True},
            )
            for width in (128, 512)
        ),
        *(
            (
                sample_triton._sample_part,
                SAMPLE | SCORES | {"logits": dtype},
                {"PART": 8192, "BLOCK": 2048, "PDL": True},
            )
            for dtype in (HALVES, FLOATS)
        ),
        (sample_triton._sample_row, SAMPLE | SCORES, {"PARTS": 32, "PDL": True}),
        *(
            (
                norm_triton._add_rms_norm,
                dict.fromkeys(("x", "residual", "weight", "out"), HALVES)
                | dict.fromkeys(("part_stride", "x_stride", "width"), INT)
                | {"x": FLOATS if add else HALVES, "eps": FLOAT},
                {"PARTS": 4 if add else 1, "ADD": add, "BLOCK": 1024, "PDL": add},
            )
            for add in (False, True)
        ),
        *(
            (
                layer_norm_triton._add_layer_norm,
                dict.fromkeys(("x", "residual", "gain", "bias", "out"), HALVES) | {"width": INT, "eps": FLOAT},
                {"ADD": both, "BIAS": both, "BLOCK": 1024, "PDL": both},
            )
            for both in (False, True)
        ),
        *(
            (
                activation_triton._silu_and_mul,
                dict.fromkeys(("gate_up", "out"), HALVES) | {"width": INT},
                {"BLOCK": 1024, "PDL": True, "GELU": gelu},
            )
            for gelu in (False, True)
        ),
        (
            activation_triton._relu_squared,
            dict.fromkeys(("x", "out"), HALVES) | {"width": INT},
            {"BLOCK": 1024, "PDL": True},
        ),
        *(
            (
                rotary_triton._rotate_and_store,
                dict.fromkeys(("q", "k", "v", "q_gain", "k_gain", "q_out", "kept_keys", "kept_values"), HALVES)
                | dict.fromkeys(("keys", "values"), stored)
                | dict.fromkeys(("q_stride", "k_stride", "v_stride", "kept_from"), INT)
                | {"cos_sin": FLOATS, "locations": LONGS}
                | dict.fromkeys(("eps", "key_inverse", "value_inverse"), FLOAT),
                {"Q_HEADS": 16, "K_HEADS": 8, "HALF": 64, "NORM": norm, "HEADS": 8, "PAIRS": 64, "PDL": True}
                | {"ROUNDS": stored == FP8S, "Q_HEAD_STRIDE": 256, "UNIT_OFFSET": norm, "ROUND_LAST": norm},
            )
            for norm, stored in ((False, HALVES), (True, HALVES), (True, FP8S))
        ),
        *(
            (
                dense_skinny_triton._vector,
                dict.fromkeys(("x", "residual", "gain", "weight", "bias", "out", "stream", "kept"), HALVES)
                | {"outputs": INT, "rows": INT, "eps": FLOAT},
                {"INPUTS": inputs, "ROWS": rows, "BLOCK_N": 4, "BLOCK_K": 1024}
                | dict.fromkeys(("NORM", "ADD", "KEEP"), normed)
                | {"ROUND_LAST": inputs == 2880, "BIAS": bias, "GATED": gated, "PDL": True},
            )
            for inputs, rows, normed, bias, gated in (
                (2880, 1, True, True, False),
                (3072, 1, False, False, False),
                (1024, 1, True, False, True),
                (5120, 1, True, False, False),
                (896, 1, True, True, False),
                (4864, 4, False, True, False),
            )
        ),
        (
            dense_skinny_triton._vector,
            dict.fromkeys(("x", "residual", "gain", "stream", "kept"), HALVES)
            | dict.fromkeys(("weight", "bias", "out"), FLOATS)
            | {"outputs": INT, "rows": INT, "eps": FLOAT},
            {"INPUTS": 2688, "ROWS": 1, "BLOCK_N": 1, "BLOCK_K": 1024, "BIAS": False, "GATED": False, "PDL": True}
            | dict.fromkeys(("NORM", "ADD", "KEEP", "ROUND_LAST"), True),
        ),
        *(
            (
                split_kv_decode_triton._part,
                dict.fromkeys(("q", "k", "v", "q_gain", "k_gain"), HALVES)
                | dict.fromkeys(("keys", "values"), stored)
                | dict.fromkeys(("cos_sin", "parts", "sums"), FLOATS)
                | dict.fromkeys(("q_stride", "k_stride", "v_stride", "pages_per_row"), INT)
                | dict.fromkeys(("scale", "key_inverse", "value_inverse", "eps"), FLOAT),
                {"KV_HEADS": 8, "GROUP": group, "HALF": head_dim // 2, "PAGE": 64, "BLOCK": 32, "VECTORS": 16}
                | {"SPLITS": 32, "WINDOW": window, "ROTATE": rotate, "NORM": norm, "PDL": True}
                | {"Q_HEAD_STRIDE": head_dim, "UNIT_OFFSET": head_dim == 256, "ROUND_LAST": head_dim == 256},
            )
            for group, head_dim, window, rotate, norm, stored in (
                (8, 128, 0, False, False, HALVES),
                (2, 128, 0, True, True, HALVES),
                (7, 64, 0, True, False, HALVES),
                (4, 256, 0, True, True, HALVES),
                (8, 512, 0, True, False, HALVES),
                (4, 128, 4096, True, False, HALVES),
                (5, 128, 0, True, True, FP8S),
                (7, 64, 0, False, False, FP8S),
                (8, 64, 128, True, False, FP8S),
                (2, 256, 1024, True, False, FP8S),
                (8, 512, 0, True, False, FP8S),
            )
        ),
        *(
            (
                split_kv_decode_triton._whole,
                {"parts": FLOATS, "sums": FLOATS, "sinks": HALVES, "result": HALVES, "value_scale": FLOAT},
                {"HEADS": 64, "HEAD_DIM": 128, "SPLITS": 32, "SINKS": sinks, "PDL": True},
            )
            for sinks in (False, True)
        ),
        (
            sinks_triton._scale_by_share,
            {"out": HALVES, "sums": FLOATS, "sinks": HALVES, "unit": FLOAT}
            | dict.fromkeys(("vectors", "token_stride", "head_stride"), INT),
            {"HEADS": 64, "HEAD_DIM": 64, "VECTORS": 8, "COLUMNS": 64, "PDL": True},
        ),
        (
            fp4_dequantize_triton._dequantize,
            {"words": "*i32", "scales": "*u8", "out": HALVES, "steps": INT, "inputs": INT},
            {},
        ),
        *(
            (kernel, EXPERTS, sizes | {"RENORMALIZE": renormalize})
            for renormalize in (False, True)
            for kernel, sizes in ((routing_gluon._route, CHOICE), (gemv_gluon._down, ALL_AHEAD))
        ),
        *(
            (
                routing_triton._route_by_scores,
                dict.fromkeys(("logits", "bias", "weights"), FLOATS) | dict.fromkeys(("smallest_sum", "scale"), FLOAT),
                CHOICE | {"CHOICES": 8, "SIGMOID": sigmoid, "BIASED": biased, "RENORMALIZE": biased},
            )
            for sigmoid, biased in ((True, True), (False, True), (False, False))
        ),
        (gemv_gluon._gate_up, EXPERTS, SELECTED | PLAIN | {"HIDDEN": 2048, "WIDTH": 768, "GROUPS": 0}),
        *(
            (
                gemv_gluon._gate_up,
                EXPERTS,
                CHOICE | PLAIN | {"CHOSEN": True, "HIDDEN": hidden, "WIDTH": rows, "GROUPS": 0, **gate},
            )
            # Gemma 4 26B-A4B, Nemotron 3 Nano.
            for hidden, rows, gate in ((2816, 704, {"GELU": True}), (2688, 928, {"GATED": False}))
        ),
        *(
            (
                gemv_gluon._down,
                EXPERTS | {"logits": scores},
                ALL_AHEAD | {"CHOSEN": True, "HIDDEN": hidden, "WIDTH": width, "AHEAD": ahead, "RENORMALIZE": False},
            )
            for hidden, width, ahead, scores in ((2816, 704, 8, HALVES), (2688, 1856, 3, FLOATS))
        ),
        *(
            (
                gemv_gluon._down,
                FP8_EXPERTS,
                ALL_AHEAD | {"RENORMALIZE": renormalize},
            )
            for renormalize in (False, True)
        ),
        (
            gemv_gluon._gate_up,
            FP8_EXPERTS,
            SELECTED | PLAIN | {"HIDDEN": 2048, "WIDTH": 768, "GROUPS": 0},
        ),
        *(
            (
                fp8_gemv_gluon._fp8_row,
                dict.fromkeys(("x", "residual", "gain", "bias", "out", "stream"), HALVES)
                | {"weight": FP8S, "scales": FLOATS, "units": INT, "eps": FLOAT},
                {"INPUTS": inputs, "OUTPUTS": 4, "VECTOR": 8, "PDL": True}
                | dict.fromkeys(("NORM", "ADD"), normed)
                | {"BIAS": bias, "GATED": gated, "CHANNELS": channels},
            )
            for inputs, normed, bias, gated, channels in (
                (5120, True, False, False, False),
                (5120, True, True, True, True),
                (896, True, True, True, False),
                (4864, False, False, False, False),
            )
        ),
        (
            dequantize_triton._dequantize_blocks,
            {"values": FP8S, "scales": FLOATS, "out": HALVES},
            {"INPUTS": 2048, "BLOCK": 128},
        ),
        (grouped_gemm_triton._pairs_of_experts, EXPERTS, {"BLOCK": 1024, "PDL": True}),
        *(
            (
                grouped_gemm_triton._gate_up,
                EXPERTS,
                {"INPUTS": 2048, "WIDTH": 768, "TOP_K": 8, "ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 128}
                | {"SCALED": 0, "GROUPS": 0, "PDL": True, **PLAIN, **gate},
            )
            for gate in ({}, {"GELU": True}, {"GATED": False})
        ),
        (
            grouped_gemm_triton._down,
            EXPERTS,
            {"WIDTH": 96, "OUTPUTS": 2048, "ROWS": 32, "BLOCK_N": 128, "BLOCK_K": 32}
            | {"SCALED": 0, "GROUPS": 0, "BIAS": False, "PDL": True},
        ),
        *(
            (
                grouped_gemm_triton._weighted_sum,
                EXPERTS | {"chosen": HALVES},
                {"TOP_K": 8, "PLACED": placed, "BIAS": placed, "BLOCK": 1024, "PDL": True},
            )
            for placed in (False, True)
        ),
        (
            gate_rows_triton._gate_rows,
            EXPERTS | {"product": HALVES},
            {"BLOCK": 1024, "ALPHA": 1.7, "LIMIT": 7.0, "GELU": False, "PDL": True},
        ),
        (
            dense_skinny_triton._matrix,
            dict.fromkeys(("x", "weight", "bias", "out"), HALVES) | dict.fromkeys(("outputs", "rows"), INT),
            {"INPUTS": 1024, "ROWS": 16, "BLOCK_N": 16, "BLOCK_K": 128, "BIAS": True},
        ),
        *(
            (
                one_shot_all_reduce_triton._all_reduce,
                {"message": HALVES, "memories": LONGS, "num_elements": INT, "rank": INT},
                {"RANKS": ranks, "BLOCK": 2048, "CAPACITY": 128 << 10, "FLAGS": 256 * ranks, "PDL": True},
            )
            for ranks in (2, 4, 8)
        ),
    ],
)
def test_compiles_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, int]) -> None:
    assert compiled(kernel, types, constants).asm["cubin"]


def test_the_endless_kernel_of_the_tests_never_returns_by_itself() -> None:
    assert "ld.volatile" in compiled(endless_kernel._spin, {}, {}).asm["ptx"]
