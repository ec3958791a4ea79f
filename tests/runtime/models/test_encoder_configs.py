"""Configurations of published encoders, and wrong values in them."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.models.overrides import CONFIG_FIELDS

_BERT: Final = {
    **{"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "type_vocab_size": 2},
    **{"initializer_range": 0.02, "layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "use_cache": True},
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "all-MiniLM-L6-v2": {
        **_BERT,
        **{"architectures": ["BertModel"], "model_type": "bert", "pad_token_id": 0, "vocab_size": 30522},
        **{"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12, "num_hidden_layers": 6},
        "max_position_embeddings": 512,
    },
    "bge-m3": {
        **_BERT,
        **{"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "torch_dtype": "float32"},
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
        **{"layer_norm_eps": 1e-5, "type_vocab_size": 1, "vocab_size": 250002, "max_position_embeddings": 8194},
        **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "output_past": True},
    },
    "bge-reranker-v2-m3": {
        **_BERT,
        **{"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"},
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
        **{"layer_norm_eps": 1e-5, "type_vocab_size": 1, "vocab_size": 250002, "max_position_embeddings": 8194},
        **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "id2label": {"0": "LABEL_0"}},
        "label2id": {"LABEL_0": 0},
    },
    "nomic-embed-text-v1.5": {
        **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu"},
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        **{"n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "vocab_size": 30528},
        **{"max_trained_positions": 2048, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0},
        **{"layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "prenorm": False, "qkv_proj_bias": False},
        **{"mlp_fc1_bias": False, "mlp_fc2_bias": False, "causal": False, "rotary_emb_interleaved": False},
        **{"rotary_emb_scale_base": None, "use_rms_norm": False, "parallel_block": False},
    },
    "gte-modernbert-base": {
        **{"architectures": ["ModernBertModel"], "model_type": "modernbert", "torch_dtype": "float16"},
        **{"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12, "num_hidden_layers": 22},
        **{"attention_bias": False, "mlp_bias": False, "norm_bias": False, "norm_eps": 1e-5, "vocab_size": 50368},
        **{"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 128},
        **{"local_rope_theta": 10000.0, "hidden_activation": "gelu", "max_position_embeddings": 8192},
        **{"classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean"},
        **{"pad_token_id": 50283, "cls_token_id": 50281, "sep_token_id": 50282},
    },
    "ModernBERT with a head": {
        **{"architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert"},
        **{"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12, "num_hidden_layers": 22},
        **{"vocab_size": 50368, "max_position_embeddings": 8192, "classifier_pooling": "mean", "num_labels": 3},
    },
    "gte-multilingual-base, for transformers": {
        **_BERT,
        **{"architectures": ["GteModel"], "model_type": "gte", "vocab_size": 250048, "type_vocab_size": 1},
        **{"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
        **{"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}},
    },
    "embeddinggemma-300m": {
        **{"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "use_bidirectional_attention": True},
        **{"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 3, "num_key_value_heads": 1},
        **{"head_dim": 256, "num_hidden_layers": 24, "sliding_window": 512, "vocab_size": 262144},
        **{"max_position_embeddings": 2048, "query_pre_attn_scalar": 256, "rope_theta": 1000000.0},
        **{"rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    },
}


@pytest.mark.parametrize(
    ("name", "layers", "head_dim", "longest", "window"),
    [
        ("all-MiniLM-L6-v2", 6, 32, 512, None),
        ("bge-m3", 24, 64, 8192, None),
        ("bge-reranker-v2-m3", 24, 64, 8192, None),
        ("nomic-embed-text-v1.5", 12, 64, 2048, None),
        ("gte-modernbert-base", 22, 64, 8192, 65),
        ("gte-multilingual-base, for transformers", 12, 64, 8192, None),
        ("embeddinggemma-300m", 24, 256, 2048, 257),
    ],
)
def test_published_configs_are_read(name: str, layers: int, head_dim: int, longest: int, window: int | None) -> None:
    config = ModelConfig.parse(CONFIGS[name])
    assert (config.num_layers, config.attention.head_dim, config.max_model_len) == (layers, head_dim, longest)
    assert {of.window for of in config.attentions} == {None, window}
    assert not config.is_causal and not config.has_lm_head
    assert config.kv_numbers_per_token() == (0 if config.encoder else 24 * 2 * 256)


def test_layers_of_modernbert_alternate() -> None:
    windows, ropes = zip(
        *(
            (of.window, of.rope.theta if of.rope else 0)
            for of in ModelConfig.parse(CONFIGS["gte-modernbert-base"]).attentions
        ),
        strict=True,
    )
    assert windows[:4] == (None, 65, 65, None)
    assert ropes[:4] == (160000.0, 10000.0, 10000.0, 160000.0)


@pytest.mark.parametrize(
    ("name", "changes", "code", "says"),
    [
        ("bge-m3", {"position_embedding_type": "relative_key"}, "unsupported_architecture", "relative_key"),
        ("bge-m3", {"is_decoder": True}, "unsupported_architecture", "is_decoder"),
        ("bge-m3", {"max_position_embeddings": 2}, "invalid_config", "the first 2 are not used"),
        ("nomic-embed-text-v1.5", {"moe_every_n_layers": 2}, "unsupported_architecture", "moe_every_n_layers"),
        ("nomic-embed-text-v1.5", {"rotary_emb_fraction": 0.5}, "unsupported_architecture", "rotary_emb_fraction"),
        ("gte-modernbert-base", {"layer_types": ["linear"] * 22}, "unsupported_layer", "linear"),
        ("all-MiniLM-L6-v2", {"architectures": ["NewModel"]}, "unsupported_architecture", "its own code"),
        ("all-MiniLM-L6-v2", {"hidden_act": "xielu"}, "unsupported_activation", "xielu"),
        ("all-MiniLM-L6-v2", {"num_key_value_heads": 3}, "unsupported_architecture", "num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        ModelConfig.parse({**CONFIGS[name], **changes})
    assert refused.value.code == code


WRONG: Final = (True, False, 0, -1, 1.5, math.inf, math.nan, 10**30, "", "x", [], [1], [None], {}, {"a": {}}, [{}])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_value_is_read_or_rejected_with_a_code(name: str) -> None:
    for field in CONFIG_FIELDS | {"problem_type", "id2label"}:
        for value in (None, *WRONG):
            try:
                parsed = ModelConfig.parse({**CONFIGS[name], field: value})
            except (ModelError, ArithmeticError):
                # `ModelConfig.read` makes a ModelError of both.
                continue
            assert parsed.max_model_len >= 1
            assert parsed.tensor_parallel_sizes()[0] == 1


def test_fields_by_the_names_of_the_authors_can_be_overridden() -> None:
    config = CONFIGS["nomic-embed-text-v1.5"]
    read = ModelConfig.parse(config)
    assert read.attention.rope is not None and read.attention.rope.theta == 1000
    assert ModelConfig.parse(config, overrides={"max_trained_positions": 1024}).max_model_len == 1024
    assert ModelConfig.parse(config, overrides={"hidden_size": 384, "head_dim": 32}).hidden_size == 384
