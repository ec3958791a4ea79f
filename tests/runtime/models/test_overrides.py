"""`--hf-overrides` changes the configuration that the model is built from, wherever it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.overrides import CONFIG_FIELDS, ROPE_FIELDS, override
from minisgl.models.weights import load_weights
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.numerics.family_checkpoints import FAMILIES, family_config
from support.numerics.ranks import all_logits

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a config.json in one object, without fields that are null."""
    found = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        found |= config.get(name) or {}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("change", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": LLAMA3},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, **LLAMA3}},
    ],
    ids=str,
)
def test_the_scaling_of_another_type_replaces_the_old_one_in_either_spelling(
    config: dict[str, Any], change: str
) -> None:
    assert rope_of(override(config, {change: YARN})) == {"rope_theta": 1e6, **YARN}
    assert rope_of(override(config, {change: None})) == {"rope_theta": 1e6}


def test_the_same_type_keeps_the_parameters_that_are_not_named() -> None:
    config = {"rope_theta": 1e6, "rope_scaling": YARN}
    assert rope_of(override(config, {"rope_scaling": {"factor": 2.0}})) == {"rope_theta": 1e6, **YARN, "factor": 2.0}
    renamed = override(config, {"rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert renamed["rope_scaling"] == {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }


def test_the_base_is_changed_wherever_the_checkpoint_has_it() -> None:
    inside = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert rope_of(override(inside, {"rope_theta": 5e5}))["rope_theta"] == 5e5
    beside = {"rope_theta": 1e4}
    assert rope_of(override(beside, {"rope_parameters": {"rope_theta": 5e5}}))["rope_theta"] == 5e5
    original = {"rope_scaling": YARN, "original_max_position_embeddings": 128}
    changed = override(original, {"rope_scaling": {"original_max_position_embeddings": 32}})
    assert changed["original_max_position_embeddings"] is None


def test_objects_are_merged_and_other_values_replaced() -> None:
    config = {"id2label": {"0": "a", "1": "b"}, "eos_token_id": [1, 2], "hidden_size": 8, "torch_dtype": "float16"}
    changed = override(config, {"id2label": {"1": "c"}, "eos_token_id": [3], "hidden_size": None, "dtype": "bfloat16"})
    assert changed["id2label"] == {"0": "a", "1": "c"}
    assert (changed["eos_token_id"], changed["hidden_size"]) == ([3], None)
    assert (changed["dtype"], changed["torch_dtype"]) == ("bfloat16", None), "either spelling replaces the other"
    assert config["id2label"] == {"0": "a", "1": "b"}, "the file's content is not changed in place"


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"rope_scalling": YARN}, "unknown_override", "did you mean rope_scaling"),
        ({"rope_scaling": {"factr": 4.0}}, "unknown_override", r"did you mean rope_scaling\.factor"),
        ({"rope_scaling": 4.0}, "invalid_config", "not an object"),
        ({"hidden_size": "large"}, "invalid_config", "hidden_size"),
    ],
)
def test_wrong_overrides_are_rejected_by_name(changes: dict[str, Any], code: str, says: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    with pytest.raises(ModelError, match=says) as refused:
        ModelConfig.read(checkpoint, changes)
    assert refused.value.code == code


_UNREAD: Final = frozenset(
    {
        # Of every configuration, of training, and of outputs that a server does not have.
        *("_name_or_path", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "model_type"),
        *("output_attentions", "output_hidden_states", "return_dict", "transformers_version", "use_cache"),
        *("attention_dropout", "embd_pdrop", "initializer_range", "output_router_logits", "pretraining_tp"),
        *("resid_pdrop", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise"),
        # The tokenizer has them.
        *("bos_token_id", "eod_token_id", "pad_token_id"),
        # transformers writes it beside `layer_types`.
        "_sliding_window_pattern",
        # That of dense layers, in a model without any; that of `use_sliding_window`; that of experts, without any.
        *("intermediate_size", "sliding_window", "num_experts_per_tok"),
        # Of kernels, of training, of what follows from other fields, and of layers that predict further tokens.
        *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("time_step_floor", "time_step_max", "time_step_min", "hidden_dropout", "rescale_prenorm_residual", "expand"),
        *("num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type"),
    }
)
_IN_EACH_LAYER: Final = frozenset(
    ("head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size_per_layer_input")
)
"""Unread where `per_layer_config` has them."""


class _Recorder(dict[str, Any]):
    """Config that records the names of the fields that are read."""

    def __init__(self, content: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(content)
        self._seen = seen

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return super().get(name, default)


def _variants(checkpoint: Path) -> Iterator[dict[str, Any]]:
    config = json.loads((checkpoint / "config.json").read_text())
    yield config
    for kind in ("linear", "llama3", "yarn"):
        yield {**config, "rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}}
    yield {**config, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    yield {**config, "dual_chunk_attention_config": {"chunk_size": 64}}


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_every_field_that_is_read_can_be_overridden(arch: str, tmp_path: Path) -> None:
    for config in _variants(write_tiny_checkpoint(tmp_path, arch)):
        seen: set[str] = set()
        ModelConfig.parse(_Recorder(config, seen))
        assert seen - CONFIG_FIELDS == set()
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        assert rope.keys() - ROPE_FIELDS == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_family_is_read_and_can_be_overridden_but_for_those_that_do_not_matter(name: str) -> None:
    config, seen = family_config(name), set[str]()
    ModelConfig.parse(_Recorder(config, seen))
    assert seen - CONFIG_FIELDS == set()
    unread = {field for field, value in config.items() if value is not None} - seen
    if config.get("per_layer_config"):
        unread -= _IN_EACH_LAYER
    # Readers take the RoPE parameters from the whole file.
    assert unread - _UNREAD - {"rope_parameters", "original_max_position_embeddings"} == set()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_yarn_by_override_gives_the_logits_of_transformers(arch: str, tmp_path: Path) -> None:
    """Sequences longer than the checkpoint's own limit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = write_tiny_checkpoint(tmp_path, arch, max_position=64)
    sequences = [[int(t) for t in torch.randint(0, 570, (200,), generator=torch.Generator().manual_seed(1))]]
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **YARN}
    reference = AutoModelForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor(sequences)).logits[0]

    ours = ModelConfig.read(checkpoint, {"rope_scaling": YARN})
    assert ours.max_model_len == 256
    model = Decoder(ours, TensorParallel(), torch.float32, "cpu")
    load_weights(model.parameters, checkpoint)
    torch.testing.assert_close(all_logits(model, sequences), expected, rtol=0, atol=1e-4)
