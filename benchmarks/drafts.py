"""Decoding with drafts against decoding without, in one process and in turn.

    python benchmarks/drafts.py --model qwen3-14b --rows 1 32 128 --lengths 3.7 5.43 8 --json drafts.json

Weights and prompts are random, so the number of accepted drafts is pinned: a hash of row and position decides on each
draft whether the sampled token is replaced by it. `length` is the mean number of tokens of a row and step that follows,
with seven drafts. Without a head they cost nothing here but their verification. What the scheduler verifies, it decides
itself.

`--head-layers 5` adds a draft head of so many layers with random weights (DFlash), which runs behind each step of
the runs with drafts: the speed is that of the whole pair. The runs without drafts keep its context, too.

`--check` generates greedily with drafts from a prediction, and prints how far each token is from the most likely one
by the log-probabilities of a prompt, and how many drafts were accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.drafting import MOST_DRAFTED_ROWS
from minisgl.engine.engine import create_engine
from minisgl.engine.pooling_engine import PoolingEngine
from minisgl.engine.runner import PlainSample, Runner
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.wire.messages import SamplingParams, Submit

DRAFT, OTHER = 5, 6
BLOCK = 16
"""Tokens of a block of the draft head."""


class Pinned:
    """Takes the place of `Runner.verify`: every row always has drafts, of which `rate` are accepted."""

    def __init__(self, runner: Runner) -> None:
        self.rate: float | None = None
        self._verify = runner.verify
        self._texts = runner.tables.texts
        runner.verify = self  # type: ignore[method-assign]

    def __call__(self, plain: PlainSample) -> torch.Tensor | None:
        texts, sampled = self._texts, plain.step.sampled
        if self.rate is None or texts is None or sampled is None or not plain.packed.sampled:
            return self._verify(plain)
        count = plain.packed.sampled
        slots, positions = plain.step.sample_slots[:count].long(), plain.step.sample_positions[:count].long()
        hashed = (slots * 7919 + positions * 104_729) * 2_654_435_761 % 2**32 % 65_537
        plain.tokens.copy_(torch.where(hashed < self.rate * 65_537, DRAFT, OTHER))
        verified = self._verify(plain)
        rows = sampled.slots.long()
        behind = (texts.origin + texts.next_position)[rows].long()[:, None] + torch.arange(1, 8, device=rows.device)
        texts.texts[rows[:, None], behind] = DRAFT
        return verified


def rate_of(length: float) -> float:
    """Share of accepted drafts with which a row of eight has so many tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(8)) < length else (low, middle)
    return low


def head_config(target: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """config.json of a draft head with the layers of its target, as published ones have."""
    deepest = target["num_hidden_layers"] - 3
    tapped = [1 + round(place * (deepest - 1) / 4) for place in range(5)]
    own = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": layers, "block_size": BLOCK}
    return {**target, **own, "dflash_config": {"mask_token_id": 0, "target_layer_ids": tapped}}


def decode_rate(
    engine: CpuEngine | CudaEngine, options: EngineConfig, rows: int, sizes: tuple[int, int], *, drafts: bool
) -> float:
    """Tokens a second while all `rows` decode, with prompts and answers of these sizes."""
    scheduler = Scheduler(scheduler_config(options, engine.limits))
    if not drafts:
        scheduler.drafts._numbers = lambda slots, most: np.zeros_like(slots)  # type: ignore[method-assign]
    if (head := engine.runner.drafting) is not None:
        head.most_rows = MOST_DRAFTED_ROWS if drafts else 0
    loop = StepLoop(scheduler, engine)
    random = np.random.default_rng(rows)
    for row in range(rows):
        prompt = random.integers(10, 500, sizes[0]).astype(np.int32)
        params = SamplingParams(max_tokens=sizes[1], seed=row, temperature=1.0, ignore_eos=True)
        scheduler.submit(Submit(id=row.to_bytes(16, "big"), prompt=prompt.tobytes(), params=params))
    counters, begun, before, ended = scheduler.counters, 0.0, 0, 0.0
    while scheduler.has_work:
        loop.step()
        if (
            not begun
            and counters.generated_tokens >= rows
            and not scheduler.table.in_prefill
            and not len(scheduler.queue)
        ):
            begun, before = time.perf_counter(), counters.generated_tokens
        if begun and not ended and counters.finished:
            ended, tokens = time.perf_counter(), counters.generated_tokens - before
            steps = counters.steps
    if drafts:
        print(
            f"    {counters.drafts} rows with drafts, {counters.draft_tokens} drafts, accepted "
            f"{counters.accepted_draft_tokens}; {steps} steps",
            flush=True,
        )
    return tokens / (ended - begun)


def check(engine: CpuEngine | CudaEngine, options: EngineConfig) -> dict[str, float]:
    """Greedy answers with drafts: distance of each token from the most likely one, and steps."""
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 500, 64 + 16 * row).astype(np.int32) for row in range(8)]

    def answers(predictions: list[bytes], drafts: bool) -> tuple[list[list[int]], Scheduler]:
        scheduler = Scheduler(scheduler_config(options, engine.limits))
        if not drafts:
            scheduler.drafts._numbers = lambda slots, most: np.zeros_like(slots)  # type: ignore[method-assign]
        loop = StepLoop(scheduler, engine)
        found: list[list[int]] = [[] for _ in prompts]
        for row, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True)):
            params = SamplingParams(max_tokens=200, seed=0, temperature=0.0, ignore_eos=True)
            identifier = row.to_bytes(16, "big")
            scheduler.submit(Submit(id=identifier, prompt=prompt.tobytes(), params=params, prediction=prediction))
        while scheduler.has_work:
            if (output := loop.step()) is None:
                continue
            for row in range(len(output.tokens)):
                found[int.from_bytes(output.ids[row].tobytes(), "big")].append(int(output.tokens[row]))
        return found, scheduler

    def distances(texts: list[list[int]]) -> list[float]:
        scheduler = Scheduler(scheduler_config(options, engine.limits))
        loop = StepLoop(scheduler, engine)
        found: list[float] = []
        for row, (prompt, answer) in enumerate(zip(prompts, texts, strict=True)):
            whole = np.concatenate((prompt, np.array(answer, np.int32))).tobytes()
            params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)
            scheduler.submit(Submit(id=row.to_bytes(16, "big"), prompt=whole, params=params))
        while scheduler.has_work:
            if (output := loop.step()) is None:
                continue
            for _, part in output.prompt_logprobs:
                row = int.from_bytes(part.id, "big")
                chosen, top = (np.frombuffer(each, "<f4") for each in (part.logprobs.chosen, part.logprobs.top))
                first = max(len(prompts[row]) - part.start, 0)
                found += (top - chosen)[first:].tolist()
        return found

    none = [b""] * len(prompts)
    plain, before = answers(none, drafts=False)
    predicted = [np.array(answer, np.int32).tobytes() for answer in plain]
    drafted, after = answers(predicted, drafts=True)
    equal = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(plain, drafted, strict=True)]
    return {
        "steps_without": before.counters.steps,
        "steps_with": after.counters.steps,
        "drafts": after.counters.draft_tokens,
        "accepted": after.counters.accepted_draft_tokens,
        "equal_tokens": sum(equal) / sum(map(len, plain)),
        "worst_distance_without": max(distances(plain)),
        "worst_distance_with": max(distances(drafted)),
        "mean_distance_without": statistics.mean(distances(plain)),
        "mean_distance_with": statistics.mean(distances(drafted)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-14b")
    parser.add_argument("--quantization")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-layers", type=int, default=0, help="layers of a draft head; 0: there is none")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--lengths", type=float, nargs="*", default=[3.7, 5.43, 8.0])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="minisgl-config-") as folder:
        config, head = BUILTIN_CONFIGS[arguments.model], Path(folder) / "head"
        (Path(folder) / "config.json").write_text(json.dumps(config))
        head.mkdir()
        (head / "config.json").write_text(json.dumps(head_config(config, arguments.head_layers)))
        options = EngineConfig(
            model=folder,
            device=arguments.device,
            quantization=arguments.quantization,
            dummy_weights=True,
            speculative="ngram",
            draft_model=str(head) if arguments.head_layers else None,
            max_model_len=arguments.max_model_len,
        )
        engine = create_engine(options)
        assert not isinstance(engine, PoolingEngine)
        print("start", {name: round(value, 2) for name, value in engine.stats.start_seconds.items()}, flush=True)
        if arguments.check:
            found["check"] = check(engine, options)
            print(found["check"], flush=True)
        pinned = Pinned(engine.runner)
        while engine.use_idle_time():
            pass
        for rows in arguments.rows:
            for length in arguments.lengths:
                pinned.rate = rate_of(length)
                rates: dict[bool, list[float]] = {False: [], True: []}
                sizes = arguments.prompt, arguments.tokens
                for repeat in range(arguments.repeat + 1):
                    for drafts in (False, True):
                        rate = decode_rate(engine, options, rows, sizes, drafts=drafts)
                        if repeat:
                            rates[drafts].append(rate)
                without, with_drafts = (statistics.median(rates[drafts]) for drafts in (False, True))
                pair = f"{arguments.model} {arguments.quantization or 'bf16'}"
                if arguments.head_layers:
                    pair += f" with a head of {arguments.head_layers} layers"
                key = f"{pair} rows {rows} length {length}"
                found[key] = {"without": without, "with": with_drafts, "ratio": with_drafts / without}
                print(f"{key}: {without:,.1f} {with_drafts:,.1f} x{with_drafts / without:.2f}", flush=True)
        print("compiled after ready:", engine.stats.compiled_after_ready, flush=True)
        engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
