"""Kernels of recurrent states on the device: `python benchmarks/recurrent.py [MODEL...]`.

Each line has µs of all kernels of one layer between its projections: for rows that decode with the share of the
bandwidth that their states take, read and written once, and for prompts with tokens per µs.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import torch

from graph_timing import microseconds
from minisgl.attention.gated_delta import GatedDeltaRule
from minisgl.attention.mamba2 import Mamba2Rule
from minisgl.attention.recurrent import Convolution, Prompts, RecurrentStates
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.roofline import HARDWARE
from minisgl.kernels.attention.prompt_chunks import PromptChunks, Segment, chunks_of
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import GatedDeltaConfig, Mamba2Config

MODELS: Final = ("qwen3.6-27b", "nemotron-3-nano")
ROWS: Final = (1, 8, 64, 256)
PROMPTS: Final = ((64,), (1024,), (8192,), (512,) * 16)
CALLS: Final = 10


class Layer:
    def __init__(self, name: str, rows: int) -> None:
        of = ModelConfig.parse(BUILTIN_CONFIGS[name]).recurrences[0]
        self.shape = shape = of.state_shape()
        per_head = [torch.randn(shape.heads, device="cuda") for _ in range(3)]
        self.rule: GatedDeltaRule | Mamba2Rule
        if isinstance(of, GatedDeltaConfig):
            self.gates = 2
            heads = of.num_key_heads, shape.heads, shape.key_dim, shape.value_dim
            self.rule = GatedDeltaRule(*heads, per_head[0], per_head[1])
        else:
            assert isinstance(of, Mamba2Config)
            self.gates = 1
            self.rule = Mamba2Rule(shape.heads, of.num_groups, per_head[0], per_head[1], per_head[2])
        self.states = RecurrentStates([shape], rows + 1, torch.bfloat16, torch.device("cuda"))
        weight = torch.randn(shape.channels, shape.kernel_size, dtype=torch.bfloat16, device="cuda")
        self.convolution = Convolution(weight)

    def time(self, rows: int, prompts: tuple[int, ...]) -> float:
        segments = [Segment(slot, 0, length) for slot, length in enumerate(prompts)]
        tables = (torch.from_numpy(np.ascontiguousarray(each)).cuda() for each in chunks_of(segments, {}))
        chunks, ends = tables
        slots = torch.arange(rows + len(prompts), dtype=torch.int32, device="cuda")
        offsets = torch.tensor(np.cumsum([0, *prompts]), dtype=torch.int32, device="cuda")
        of = Prompts(slots[rows:], offsets, PromptChunks(chunks, ends, sum(prompts)))
        self.states.begin_cuda(slots[:rows], of if prompts else None)
        tokens = rows + sum(prompts)
        x = torch.randn(tokens, self.shape.channels, dtype=torch.bfloat16, device="cuda")
        gates = torch.randn(self.gates, tokens, self.shape.heads, dtype=torch.bfloat16, device="cuda").unbind()
        return microseconds(lambda _: self.states.mix(0, x, self.convolution, self.rule, *gates), CALLS)


def main() -> None:
    bandwidth = HARDWARE["h200"].bandwidth
    with torch.inference_mode():
        for name in sys.argv[1:] or MODELS:
            layer = Layer(name, max(ROWS))
            for rows in ROWS:
                found = layer.time(rows, ())
                floor = 2 * rows * layer.shape.num_bytes(2) / bandwidth * 1e6
                print(
                    f"{name}, {rows:4} rows: {found:8.1f} us, floor {floor:8.1f}, share {floor / found:.2f}", flush=True
                )
            for prompts in PROMPTS:
                found = layer.time(0, prompts)
                label = f"{len(prompts)} x {prompts[0]}"
                print(f"{name}, prompts {label}: {found:8.1f} us, {sum(prompts) / found:.1f} tokens/us", flush=True)


if __name__ == "__main__":
    main()
