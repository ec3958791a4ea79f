"""Built-in configurations, compared with the number of parameters that their authors publish."""

from __future__ import annotations

import pytest

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.models.build import checkpoint_parameters
from minisgl.models.config import ModelConfig
from minisgl.models.pooling_config import PoolingConfig

_PARAMETERS = {
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
}


def _parameters(config: ModelConfig) -> int:
    hidden, of = config.hidden_size, config.attention
    queries, keys = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    attention = hidden * (2 * queries + 2 * keys) + of.qkv_bias * (queries + 2 * keys)
    attention += 2 * of.head_dim * (of.query_key_norm is not None)
    attention += of.output_bias * hidden + of.sinks * of.num_heads
    feed_forward = 3 * hidden * config.layers[0].feed_forward.intermediate_size
    if config.moe is not None:
        biases = config.moe.router_bias + config.moe.expert_bias * (2 * config.moe.intermediate_size + hidden)
        feed_forward = config.moe.num_experts * (hidden * (3 * config.moe.intermediate_size + 1) + biases)
    layer = attention + feed_forward + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.decoder.tied_embeddings else 2)
    return config.num_layers * layer + embeddings + hidden


@pytest.mark.parametrize("name", _PARAMETERS)
def test_a_builtin_configuration_has_the_published_number_of_parameters(name: str) -> None:
    assert _parameters(ModelConfig.parse(BUILTIN_CONFIGS[name])) == _PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma-4-26b-a4b", 25.2),
        ("gemma-4-31b", 30.7),
        ("nemotron-3-nano", 31.6),
        ("qwen3.6-27b", 26.9),
        ("qwen3.6-35b-a3b", 34.7),
    ],
)
def test_layers_of_several_kinds_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    parameters = checkpoint_parameters(ModelConfig.parse(BUILTIN_CONFIGS[name]))
    assert round(parameters.num_elements / 1e9, 1) == billions


def test_an_encoder_has_the_published_number_of_parameters() -> None:
    # 567.75 million, without the pooler that embeddings do not use.
    config = ModelConfig.parse(BUILTIN_CONFIGS["bge-m3"])
    pooling = PoolingConfig(task="embed", method="first", output_size=config.hidden_size, whole_texts=True)
    assert checkpoint_parameters(config, pooling).num_elements == 567_754_752 - 1024 * 1025


@pytest.mark.parametrize(
    ("name", "head_dim", "query_heads_per_kv_head"), [("llama-3.2-1b", 64, 4), ("qwen2.5-0.5b", 64, 7)]
)
def test_small_models_have_heads_of_64(name: str, head_dim: int, query_heads_per_kv_head: int) -> None:
    of = ModelConfig.parse(BUILTIN_CONFIGS[name]).attention
    assert of.head_dim == head_dim
    assert of.num_heads == of.num_kv_heads * query_heads_per_kv_head
    assert of.window is None


def test_mistral_had_a_window_of_4096_tokens_at_first() -> None:
    names = [name for name in BUILTIN_CONFIGS if name.startswith("mistral")]
    windows = {name: ModelConfig.parse(BUILTIN_CONFIGS[name]).attention.window for name in names}
    assert {name: window for name, window in windows.items() if window} == {"mistral-7b-v0.1": 4096}
