"""Sampling parameters of the measured variants."""

from __future__ import annotations

import pytest

from minisgl.bench.sampling import VARIANTS, Sampling, variants
from minisgl.bench.workloads import WORKLOADS, Sizes
from minisgl.errors import BenchError
from minisgl.wire.messages import SamplingParams


def _params(variant: str, requests: int = 8) -> list[SamplingParams]:
    return WORKLOADS["A"](Sizes(requests=requests), 1000, 0).params(variants([variant], Sampling())[0])  # type: ignore[list-item]


def test_the_plain_variant_leaves_the_workload_as_it_is() -> None:
    assert _params("plain") == WORKLOADS["A"](Sizes(requests=8), 1000, 0).params()


def test_each_variant_changes_its_parameters_only() -> None:
    for name, changed in {
        "topk": {"top_k": 20, "top_p": 0.95},
        "penalty": {"presence_penalty": 1.0, "frequency_penalty": 0.2},
        "logprobs": {"logprobs": 5},
    }.items():
        [params] = _params(name, requests=1)
        assert {key: getattr(params, key) for key in changed} == changed
        [plain] = _params("plain", requests=1)
        assert {key for key in SamplingParams.__struct_fields__ if getattr(params, key) != getattr(plain, key)} == {
            *changed
        }


def test_the_mixed_variant_gives_a_quarter_of_the_requests_each() -> None:
    mixed = _params("mixed")
    for index, name in enumerate(("plain", "topk", "penalty", "logprobs")):
        assert mixed[index::4] == _params(name)[index::4]


def test_prompts_of_one_variant_are_not_in_the_cache_of_another_one() -> None:
    for name in ("A", "D", "L"):
        workload = WORKLOADS[name](Sizes(requests=5, context_length=50), 300, 0)  # type: ignore[index]
        runs = [workload.uncached(variant.number, 300) for variant in VARIANTS.values()]
        assert runs[0] == workload, "the plain variant has the published prompts"
        for requests in zip(*(run.prompts for run in runs), strict=True):
            assert len({prompt[0] for prompt in requests}) == len(VARIANTS)
            assert len({tuple(prompt[1:]) for prompt in requests}) == 1
    assert len({prompt[0] for prompt in WORKLOADS["D"](Sizes(), 300, 0).uncached(3, 300).prompts}) == 1


def test_parameters_of_a_variant_get_its_name() -> None:
    assert variants([], Sampling()) == (VARIANTS["plain"],)
    assert variants([], Sampling(top_k=20, top_p=0.95)) == (VARIANTS["topk"],)
    assert variants(["topk", "plain", "topk"], Sampling()) == (VARIANTS["topk"], VARIANTS["plain"])


def test_other_parameters_get_a_name_that_lists_them() -> None:
    [variant] = variants([], Sampling(top_p=0.9, temperature=0))
    assert variant.name == "temperature0_top_p0.9"
    assert variant.of_request(3) == Sampling(top_p=0.9, temperature=0)


def test_variants_and_parameters_exclude_each_other() -> None:
    with pytest.raises(BenchError, match="leave out either it or --top-k, --min-p"):
        variants(["mixed"], Sampling(top_k=5, min_p=0.1))
