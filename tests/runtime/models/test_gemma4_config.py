"""Configurations of Gemma 4: heads of two sizes, shared keys and values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig

_HUB = BUILTIN_CONFIGS["gemma-4-31b"]


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.parse({**_HUB, **changes})


def test_layers_without_a_window_have_other_heads() -> None:
    config = parse()
    heads = [(of.num_kv_heads, of.head_dim, of.window, of.key_is_value) for of in (x.attention for x in config.layers)]
    assert heads[4:6] == [(16, 256, 1024, False), (4, 512, None, True)]
    assert 2 * config.kv_numbers_per_token() == (50 * 16 * 2**10 + 10 * 8 * 2**10)
    assert 2 * config.kv_numbers_per_token(ranks=8) == (50 * 2 * 2**10 + 10 * 2 * 2**10)


def test_files_of_transformers_have_an_object_for_each_layer() -> None:
    given = {name: value for name, value in _HUB.items() if "global" not in name}
    by_layer = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    assert ModelConfig.parse({**given, "per_layer_config": by_layer}) == parse()


def test_a_multimodal_file_has_the_text_model_in_an_object() -> None:
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": _HUB, "eos_token_id": [1, 106, 50]}
    config = ModelConfig.parse({**whole, "vision_config": {}, "audio_config": None})
    assert config.layers == parse().layers and config.eos_token_ids == (1, 106, 50)


def test_sharing_layers_read_the_last_one_of_their_type_and_take_no_memory() -> None:
    config = parse(num_kv_shared_layers=20)
    assert config.kv_layers == [*range(40), *(35 if (layer + 1) % 6 == 0 else 39 for layer in range(40, 60))]
    assert 2 * config.kv_numbers_per_token() == 34 * 16 * 2**10 + 6 * 8 * 2**10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "Gemma3nForConditionalGeneration, .*AltUp"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 58}, "num_kv_shared_layers is 58"),
        ({"rope_parameters": {"full_attention": {}}}, "without an object for sliding_attention"),
        ({"per_layer_config": {"5": {"sliding_window": 7}}}, "per_layer_config"),
        ({"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8}, "8 experts per token of only 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        parse(**changes)
