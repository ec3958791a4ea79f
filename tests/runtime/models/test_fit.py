"""Options that cannot fit are refused by the model's configuration and the device's memory alone."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.models.fit import check_fit

MODEL = ModelConfig.parse(BUILTIN_CONFIGS["qwen3-0.6b"])
# 28 layers with 8 heads of 128, in 64 tokens of 16 bits.
PAGE_BYTES = 2 * 28 * 8 * 128 * 64 * 2


def check(memory: int | None = None, **options: Any) -> None:
    check_fit(MODEL, EngineConfig(model="", device="cuda", **options), memory)


@pytest.mark.parametrize(
    ("options", "memory", "code", "words"),
    [
        ({"tensor_parallel": 3}, None, "tensor_does_not_divide", "cannot be split over 3 ranks"),
        ({"max_model_len": 50000}, None, "max_model_len_too_large", "exceeds the model's limit of 40960 tokens"),
        ({"max_model_len": 65, "num_pages": 1}, None, "kv_pool_too_small", "the KV pool holds 64 tokens"),
        ({"num_pages": 11}, 10 * PAGE_BYTES, "out_of_memory", "--num-pages 11 needs 0.1 GiB"),
        ({"num_pages": 21, "tensor_parallel": 2}, 10 * PAGE_BYTES, "out_of_memory", "use fewer pages"),
        ({"num_pages": 21, "kv_cache_dtype": "fp8"}, 10 * PAGE_BYTES, "out_of_memory", "use fewer pages"),
        ({"num_pages": 6, "dtype": "float32"}, 10 * PAGE_BYTES, "out_of_memory", "use fewer pages"),
    ],
)
def test_what_cannot_fit_is_refused(options: dict[str, Any], memory: int | None, code: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        check(memory, **options)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pages": 10},
        {"num_pages": 20, "tensor_parallel": 2},
        {"num_pages": 20, "kv_cache_dtype": "fp8"},
        {"num_pages": 1},
        {"max_model_len": 64, "num_pages": 1},
    ],
)
def test_what_may_fit_is_not_refused(options: dict[str, Any]) -> None:
    check(10 * PAGE_BYTES, **options)
