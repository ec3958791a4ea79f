"""An engine with a draft head generates what one generates without, token for token, and the head's drafts are those
that its checkpoint stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.cli.main import main
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.sampler import Sampler
from minisgl.errors import CodedError
from minisgl.hub.check import check_checkpoint
from minisgl.kernels.speculation.step_rows import SampledRows
from minisgl.toy.tiny import write_tiny_checkpoint
from minisgl.wire.messages import MOST_DRAFTS, Submit
from support.dflash import reference_logits
from support.messages import submit_of
from support.speculation import (
    check_answers,
    engine_of,
    random_numbers,
    requests_to_draft,
    same_number,
    serve,
    with_prediction,
)
from support.tiny_drafter import CONSTANT, drafter_config, write_copying_pair, write_tiny_drafter

_EXAMPLES = int(os.environ.get("DRAFT_EXAMPLES", "6"))


class _Pair(NamedTuple):
    target: Path
    head: Path
    plain: CpuEngine
    """Without drafts."""


def _pair(target: Path, head: Path) -> _Pair:
    return _Pair(target, head, engine_of("off", model=str(target)))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pair]:
    """A head whose drafts are hardly ever right."""
    folder = tmp_path_factory.mktemp("wrong")
    target = write_tiny_checkpoint(folder / "target", "qwen3", layers=4)
    pair = _pair(target, write_tiny_drafter(folder / "head", target))
    yield pair
    pair.plain.close()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pair]:
    """A head whose drafts are right: it copies its target, which generates one token for ever."""
    pair = _pair(*write_copying_pair(tmp_path_factory.mktemp("right")))
    yield pair
    pair.plain.close()


def _engine(pair: _Pair, **options: Any) -> CpuEngine:
    return engine_of("off", model=str(pair.target), draft_model=str(pair.head), **options)


@given(
    requests=requests_to_draft(),
    is_right=st.booleans(),
    predicts=st.booleans(),
    overlap=st.booleans(),
    fixed=st.sampled_from([None, "random", 1, 7]),
    pages=st.sampled_from([40, 60, 512]),
    page_size=st.sampled_from([1, 4, 16]),
    aborts=st.integers(0, 2),
    most_rows=st.sampled_from([2, 128]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_head_changes_no_answer(
    wrong: _Pair,
    right: _Pair,
    requests: list[Submit],
    is_right: bool,
    predicts: bool,
    overlap: bool,
    fixed: str | int | None,
    pages: int,
    page_size: int,
    aborts: int,
    most_rows: int,
    seed: int,
) -> None:
    pair, random = right if is_right else wrong, np.random.default_rng(seed)
    expected, _ = serve(pair.plain, requests)
    if predicts:
        requests = [with_prediction(each, expected[each.id].tokens, 0.3, random) for each in requests]
    numbers = None
    if fixed is not None:
        numbers = same_number(fixed) if isinstance(fixed, int) else random_numbers(random)
    engine = _engine(pair, num_pages=pages * 4 // page_size, page_size=page_size)
    assert engine.runner.drafting is not None
    engine.runner.drafting.most_rows = most_rows
    aborted = {each.id: int(random.integers(1, 20)) for each in requests[:aborts]}
    answers, scheduler = serve(engine, requests, overlap=overlap, numbers=numbers, aborted=aborted)
    engine.close()
    check_answers(requests, answers, expected, aborted)
    assert scheduler.pages.used == 0


def test_a_head_that_is_right_takes_few_steps(right: _Pair) -> None:
    # No part of the prompt occurs twice: without the head there are no drafts at first.
    prompt = np.arange(5, 25, dtype=np.int32).tobytes()
    submit = submit_of(id=b"1" * 16, prompt=prompt, max_tokens=9, temperature=0.0, seed=0, ignore_eos=True)
    engine = _engine(right)
    answers, scheduler = serve(engine, [submit], overlap=False, numbers=same_number(7))
    assert answers[submit.id].tokens == [CONSTANT] * 9
    # One of the prompt, and one with seven drafts.
    assert scheduler.counters.steps == 2
    assert scheduler.counters.accepted_draft_tokens == 7
    assert answers[submit.id].predicted == (0, 0)
    engine.close()


class _Drafted(NamedTuple):
    known: list[int]
    drafts: list[int]


def _watched(engine: CpuEngine) -> list[_Drafted]:
    """Drafts of the head from now on."""
    drafting, found = engine.runner.drafting, list[_Drafted]()
    texts = engine.runner.tables.texts
    assert drafting is not None and texts is not None
    draft = drafting.draft

    def watch(rows: SampledRows, sampler: Sampler) -> None:
        draft(rows, sampler)
        for slot in rows.slots.tolist():
            end = int(texts.next_position[slot]) + 1
            text = texts.texts[slot].tolist()
            found.append(_Drafted(text[:end], text[end : end + MOST_DRAFTS]))

    drafting.draft = watch  # type: ignore[method-assign]
    return found


def test_drafts_are_those_of_the_checkpoint(wrong: _Pair) -> None:
    engine = _engine(wrong, max_step_tokens=16)
    found = _watched(engine)
    prompt = np.random.default_rng(1).integers(3, 500, 37).astype(np.int32)
    first = submit_of(id=b"1" * 16, prompt=prompt.tobytes(), max_tokens=20, temperature=0.0, seed=0, ignore_eos=True)
    # Its prompt is cached, so the context before its end was stored by the other request.
    second = submit_of(
        id=b"2" * 16, prompt=prompt[:30].tobytes(), max_tokens=12, temperature=0.0, seed=0, ignore_eos=True
    )
    for each in (first, second):
        serve(engine, [each], numbers=same_number(3))
    engine.close()
    assert len(found) > 25
    for each in found[::4]:
        logits = reference_logits(wrong.target, wrong.head, each.known)[:MOST_DRAFTS]
        chosen = logits[torch.arange(MOST_DRAFTS), torch.tensor(each.drafts)]
        assert torch.allclose(chosen, logits.max(1).values, atol=1e-3)


def test_the_warm_up_changes_nothing_that_requests_read(wrong: _Pair) -> None:
    engine = _engine(wrong)
    assert engine.runner.drafting is not None
    engine.runner.drafting.warm_up(engine.runner.sampler)
    prompt = np.arange(5, 25, dtype=np.int32).tobytes()
    submit = submit_of(id=b"1" * 16, prompt=prompt, max_tokens=20, temperature=0.7, seed=1, ignore_eos=True)
    answers, expected = (serve(each, [submit])[0] for each in (engine, wrong.plain))
    assert answers[submit.id].tokens == expected[submit.id].tokens
    engine.close()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"architectures": ["Eagle3Model"]}, "draft_model_unsupported", "Eagle3Model"),
        ({"layer_types": ["sliding_attention"] * 2}, "draft_model_unsupported", "sliding"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "draft_model_unsupported",
         "quantized"),
        ({"num_target_layers": 36}, "draft_model_mismatch", "number of layers of 36"),
        ({"hidden_size": 256}, "draft_model_mismatch", "hidden size of 256"),
        ({"vocab_size": 1000}, "draft_model_mismatch", "vocabulary of 1000"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 3]}}, "draft_model_mismatch", "layers 1, 3"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [1]}}, "draft_model_mismatch", "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1], "fc_layernorm": True}},
         "draft_model_unsupported", "fc_layernorm"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 0]}}, "draft_model_unsupported", "ascending"),
        ({"dflash_config": {"mask_token_id": 2}}, "invalid_config", "target_layer_ids"),
        ({"intermediate_size": 100}, "wrong_shape", "mlp"),
    ],
)  # fmt: skip
def test_a_head_that_cannot_be_used_is_refused_by_name(
    wrong: _Pair, tmp_path: Path, changes: dict[str, Any], code: str, message: str
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(drafter_config(wrong.target, **changes)))
    (head / "model.safetensors").write_bytes((wrong.head / "model.safetensors").read_bytes())
    with pytest.raises(CodedError, match=message) as raised:
        engine_of("auto", model=str(wrong.target), draft_model=str(head))
    assert raised.value.code == code
    report = check_checkpoint(wrong.target, draft_model=head)
    assert [each.code for each in report.problems] == [code] and message in report.problems[0].message


def test_a_pair_is_checked_without_its_weights(wrong: _Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(wrong.target), "--draft-model", str(wrong.head)]) == 0
    assert "draft model      DFlash, 2 layers, blocks of 10 tokens" in capsys.readouterr().out
    report = check_checkpoint(wrong.head)
    assert "that model's --draft-model" in report.problems[0].message


def test_several_ranks_have_no_head(wrong: _Pair) -> None:
    with pytest.raises(CodedError, match="--tp 1") as raised:
        _engine(wrong, tensor_parallel=2)
    assert raised.value.code == "speculation_unsupported"
