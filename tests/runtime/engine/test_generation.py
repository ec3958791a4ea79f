"""Engines driven by hand-built plans, against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minisgl.engine.cpu_engine import CpuEngine
from minisgl.errors import EngineError
from minisgl.toy.tiny import write_tiny_checkpoint
from minisgl.wire.plan import StepPlan
from support.plans import Segment, make_plan, new_row

PROMPTS = [
    np.random.default_rng(i).integers(3, 500, length).tolist() for i, length in enumerate((13, 1, 29, 8), start=1)
]
STEPS = 24


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[list[int]]:
    """Greedy continuations of PROMPTS."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(STEPS):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)), 1)
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def _pages(slot: int, tokens: int, page_size: int, free: list[int]) -> list[tuple[int, int, int]]:
    return [(slot, index, free.pop()) for index in range(-(-tokens // page_size))]


def _plans(page_size: int, num_pages: int, chunk: int) -> tuple[list[StepPlan], list[list[int]]]:
    """Prefill all prompts in chunks, one after the other, and decode meanwhile. Returns for each plan the prompts whose
    tokens it samples."""
    free = np.random.default_rng(0).permutation(num_pages).tolist()
    slots = [5, 0, 7, 2]
    plans, sampled = [], []
    decoding: dict[int, int] = {}
    waiting = [(i, start) for i, prompt in enumerate(PROMPTS) for start in range(0, len(prompt), chunk)]
    while waiting or any(done < STEPS for done in decoding.values()):
        rows = [i for i, done in decoding.items() if done < STEPS]
        decode = [(slots[i], len(PROMPTS[i]) + decoding[i] - 1) for i in rows]
        prefill, pages, new = [], [], []
        if waiting:
            i, start = waiting.pop(0)
            tokens = PROMPTS[i][start : start + chunk]
            last = start + len(tokens) == len(PROMPTS[i])
            prefill = [Segment(slots[i], start, tokens, last)]
            if start == 0:
                pages = _pages(slots[i], len(PROMPTS[i]) + STEPS, page_size, free)
                new = [new_row(slots[i])]
        for row in rows:
            decoding[row] += 1
        if prefill and last:
            rows = [*rows, i]
            decoding[i] = 1
        plans.append(make_plan(len(plans), decode=decode, prefill=prefill, pages=pages, rows=new))
        sampled.append(rows)
    return plans, sampled


def _generate(engine: CpuEngine, plans: list[StepPlan], sampled: list[list[int]], in_flight: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in PROMPTS]
    handles = []

    def collect() -> None:
        rows, handle = handles.pop(0)
        for row, token in zip(rows, engine.collect(handle).tokens.tolist(), strict=True):
            answers[row].append(token)

    for plan, rows in zip(plans, sampled, strict=True):
        handles.append((rows, engine.launch(plan)))
        if len(handles) >= in_flight:
            collect()
    while handles:
        collect()
    return answers


@pytest.mark.parametrize(("page_size", "chunk", "in_flight"), [(4, 1 << 20, 2), (1, 5, 1), (16, 1, 2), (64, 7, 2)])
def test_mixed_steps_give_the_greedy_tokens_of_transformers(
    start: Callable[..., CpuEngine], reference: list[list[int]], page_size: int, chunk: int, in_flight: int
) -> None:
    num_pages = 256 // page_size + 8
    engine = start(page_size=page_size, num_pages=num_pages)
    plans, sampled = _plans(page_size, num_pages, chunk)
    assert _generate(engine, plans, sampled, in_flight) == reference
    assert engine.stats.prefill_tokens == sum(map(len, PROMPTS))
    assert engine.stats.decode_tokens == len(PROMPTS) * (STEPS - 1)
    assert engine.stats.steps == len(plans)
    assert engine.stats.mixed_steps == sum(bool(len(p.decode_slots) and len(p.prefill_slots)) for p in plans) > 0


def test_a_prefix_stored_by_another_row_of_the_step_is_read(
    start: Callable[..., CpuEngine], reference: list[list[int]]
) -> None:
    prompt = PROMPTS[2]
    engine = start(page_size=4)
    owner = [(0, index, 10 + index) for index in range(14)]
    reader = [(1, index, 10 + index if index < 6 else 30 + index) for index in range(14)]
    plans = [
        make_plan(
            0,
            prefill=[Segment(1, 24, prompt[24:]), Segment(0, 0, prompt)],
            pages=[*owner, *reader],
            rows=[new_row(0), new_row(1)],
        )
    ]
    plans += [make_plan(i, decode=[(0, 28 + i), (1, 28 + i)]) for i in range(1, STEPS)]
    answers: list[list[int]] = [[], []]
    for plan in plans:
        tokens = engine.collect(engine.launch(plan)).tokens.tolist()
        for row, slot in enumerate(plan.sampled_slots.tolist()):
            answers[slot].append(tokens[row])
    assert answers == [reference[2], reference[2]]


def test_a_step_is_launched_while_the_one_before_it_still_runs(
    start: Callable[..., CpuEngine], reference: list[list[int]]
) -> None:
    """The input token of the next step is not copied through the host."""
    engine = start()
    prompt = PROMPTS[0]
    pages = [(3, index, 20 + index) for index in range(10)]
    handles = [engine.launch(make_plan(0, prefill=[Segment(3, 0, prompt)], pages=pages, rows=[new_row(3)]))]
    handles += [engine.launch(make_plan(i, decode=[(3, len(prompt) + i - 1)])) for i in range(1, STEPS)]
    results = [engine.collect(handle) for handle in handles]
    assert [int(result.tokens[0]) for result in results] == reference[0]
    assert [result.step for result in results] == list(range(STEPS))


def test_the_logits_hook_receives_every_sampled_row(start: Callable[..., CpuEngine], checkpoint: Path) -> None:
    engine = start()
    tapped: list[tuple[StepPlan, torch.Tensor]] = []
    engine.runner.logits_hook = lambda plan, logits: tapped.append((plan, logits.clone()))
    pages = [(slot, index, slot * 8 + index) for slot in range(2) for index in range(8)]
    segments = [Segment(0, 0, PROMPTS[0]), Segment(1, 0, PROMPTS[2][:5], sample=False)]
    plan = make_plan(0, prefill=segments, pages=pages, rows=[new_row(0), new_row(1)])
    engine.collect(engine.launch(plan))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ((seen, logits),) = tapped
    assert seen is plan
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_reading_a_poisoned_page_fails_only_its_own_request(start: Callable[..., CpuEngine]) -> None:
    engine = start()
    pages = [(slot, index, slot * 8 + index) for slot in range(2) for index in range(8)]
    both = [Segment(0, 0, PROMPTS[0]), Segment(1, 0, PROMPTS[0])]
    first = engine.collect(engine.launch(make_plan(0, prefill=both, pages=pages, rows=[new_row(0), new_row(1)])))
    at = len(PROMPTS[0])
    second = engine.collect(engine.launch(make_plan(1, decode=[(0, at), (1, at)], poison=[1])))
    third = engine.collect(engine.launch(make_plan(2, decode=[(0, at + 1), (1, at + 1)])))
    assert first.tokens[0] == first.tokens[1] >= 0
    assert second.tokens[0] == third.tokens[0] == -1
    assert second.tokens[1] >= 0 and third.tokens[1] >= 0


def test_weights_that_are_not_finite_fail_every_token(start: Callable[..., CpuEngine], tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        if "model.norm.weight" in weights:
            weights["model.norm.weight"][3] = torch.nan
            save_file(weights, file, {"format": "pt"})
    engine = start(model=str(tmp_path))
    pages = [(0, index, index) for index in range(8)]
    plan = make_plan(0, prefill=[Segment(0, 0, PROMPTS[0])], pages=pages, rows=[new_row(0, temperature=1.0)])
    assert engine.collect(engine.launch(plan)).tokens.tolist() == [-1]


def test_a_failed_step_fails_its_collect_and_every_later_step(start: Callable[..., CpuEngine]) -> None:
    engine = start()
    bad = engine.launch(make_plan(0, decode=[(99, 0)]))
    with pytest.raises(IndexError):
        engine.collect(bad)
    with pytest.raises(EngineError, match="an earlier step failed") as refused:
        engine.launch(make_plan(1, decode=[(0, 0)]))
    assert refused.value.code == "engine_failed"
