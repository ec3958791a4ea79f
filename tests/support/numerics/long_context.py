"""Logits behind a long context with a KV cache in FP8, and distances to models in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.models.decoder import Decoder
from minisgl.toy.tiny import write_tiny_checkpoint
from minisgl.wire.plan import StepPlan
from support.engines import create_engine
from support.numerics.compare import ROUNDED
from support.numerics.gpu_engine import run
from support.numerics.ranks import load
from support.numerics.rounded_kv import RoundedKV, RoundedKVAttention, e4m3, exact, rounded
from support.plans import Segment, make_plan, new_row

_SHARPER = 1.5
"""Queries are larger than in a random model by this factor. Otherwise each token attends to thousands of others about
equally, and the errors of single keys and values cancel."""


@dataclass(frozen=True)
class Distances:
    """Relative to the size of the logits (L2)."""

    to_taken_over: float
    """From a model in float32 that attends to the numbers in the engine's KV cache."""
    of_engine: float
    """From the model in float32 without quantization."""
    of_quantization: float
    """Of the model in float32 that rounds keys and values by itself, from the one that does not."""
    to_quantized: float
    """From the model in float32 that rounds keys and values by itself."""


def write_sharp_checkpoint(folder: Path, arch: str, longest: int) -> Path:
    """A tiny checkpoint for contexts of `longest` tokens, whose attention prefers few tokens."""
    write_tiny_checkpoint(
        folder, arch, hidden=256, heads=4, kv_heads=2, head_dim=128, max_position=longest, rope="default", tied=False
    )
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        # The norm of heads would undo a factor of the projection.
        part = "q_norm.weight" if arch.startswith("qwen3") else "q_proj.weight"
        sharp = {name: (tensor * _SHARPER if part in name else tensor) for name, tensor in tensors.items()}
        save_file(sharp, file, {"format": "pt"})
    return folder


def measure(config: EngineConfig, prompt: list[int], shared: int, steps: int) -> Distances:
    """Serve `prompt` in chunks, then another prompt with the same first `shared` tokens, which it finds in the cache;
    decode both for `steps` steps, the first one alone before and both together. `shared` is a multiple of the page
    size."""
    assert config.page_size is not None and shared % config.page_size == 0
    other = [*prompt[:shared], *reversed(prompt[shared:])]
    pages = _pages(len(prompt) + 2 * steps, shared, config.page_size)
    engine = create_engine(config)
    logits: list[torch.Tensor] = []
    engine.runner.logits_hook = lambda plan, tapped: logits.append(tapped.clone().float())
    plans = _plans(prompt, other, pages, shared, config.max_step_tokens, steps)
    tokens = run(engine, plans)
    decoded = [step for step in tokens if step]
    answers = [[step[0] for step in decoded[: steps + 1]], [decoded[steps + 1][0]]]
    for step in decoded[steps + 2 :]:
        for answer, token in zip(answers, step, strict=True):
            answer.append(token)
    by_row = [logits[: steps + 1], [logits[steps + 1]]]
    for step_logits in logits[steps + 2 :]:
        for answered, line in zip(by_row, step_logits.split(1), strict=True):
            answered.append(line)
    ours = torch.cat([torch.cat(answered) for answered in by_row])
    sequences = [[*start, *answer[:-1]] for start, answer in zip((prompt, other), answers, strict=True)]
    [kv] = engine.runner.kv.groups
    assert kv.keys.dtype == torch.float8_e4m3fn
    stored = []
    for row, sequence in enumerate(sequences):
        own = torch.tensor(pages[row], device=kv.keys.device)
        stored.append(
            [
                [
                    pool[layer].view(torch.uint8)[own].view(pool.dtype).flatten(0, 1)[: len(sequence)].float()
                    for pool in (kv.keys, kv.values)
                ]
                for layer in range(kv.keys.shape[0])
            ]
        )
    assert all(scale == (1.0, 1.0) for scale in kv.scales)
    engine.close()
    model = load(Path(config.model), device=config.device)
    counts = [len(answer) for answer in answers]

    def reference(kvs: list[RoundedKV]) -> torch.Tensor:
        parts = zip(sequences, counts, kvs, strict=True)
        return torch.cat([_last_logits(model, sequence, count, kv) for sequence, count, kv in parts])

    unquantized = reference([rounded(exact, exact)] * 2)
    quantized = reference([rounded(e4m3, e4m3)] * 2)
    taken_over = reference([_taken_over(layers) for layers in stored])
    return Distances(
        _distance(ours, taken_over),
        _distance(ours, unquantized),
        _distance(quantized, unquantized),
        _distance(ours, quantized),
    )


def _pages(length: int, shared: int, page_size: int) -> list[list[int]]:
    """Pages of two rows that share the first ones."""
    count, common = -(-length // page_size), shared // page_size
    first = list(range(count))
    return [first, first[:common] + list(range(count, 2 * count - common))]


def _plans(
    prompt: list[int], other: list[int], pages: list[list[int]], shared: int, chunk: int, steps: int
) -> list[StepPlan]:
    """One sampled token by each last chunk and by each decode step."""
    plans: list[StepPlan] = []
    updates = [(row, index, page) for row, own in enumerate(pages) for index, page in enumerate(own)]
    for row, tokens, start in ((0, prompt, 0), (1, other, shared)):
        for first in range(start, len(tokens), chunk):
            part = tokens[first : first + chunk]
            segment = Segment(row, first, part, sample=first + chunk >= len(tokens))
            new = {"pages": updates, "rows": [new_row(0), new_row(1)]} if not plans else {}
            plans.append(make_plan(len(plans), prefill=[segment], **new))  # type: ignore[arg-type]
        if row == 0:
            plans += [make_plan(len(plans) + step, decode=[(0, len(prompt) + step)]) for step in range(steps)]
    for step in range(steps):
        decode = [(0, len(prompt) + steps + step), (1, len(other) + step)]
        plans.append(make_plan(len(plans), decode=decode))
    return plans


@torch.inference_mode()
def _last_logits(model: Decoder, sequence: list[int], count: int, kv: RoundedKV) -> torch.Tensor:
    tokens = torch.tensor(sequence, device=model.parameters.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    hidden = model.forward(tokens, positions, RoundedKVAttention(kv), positions[-count:])
    return model.local_logits(hidden)[:, : model.config.vocab_size].float()


def _taken_over(stored: list[list[torch.Tensor]]) -> RoundedKV:
    """What the engine stored, if it is as near to these keys and values as rounding to bfloat16, then to FP8."""

    def take(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for theirs, own in zip(stored[layer], (k, v), strict=True):
            rounding, size = float((e4m3(own) - own).norm()), float(own.norm())
            assert float((theirs - own).norm()) <= math.hypot(rounding, ROUNDED * size), "the cache holds other numbers"
        return stored[layer][0], stored[layer][1]

    return take


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())
