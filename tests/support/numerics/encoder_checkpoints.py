"""Tiny checkpoints of encoders, and of decoders that make embeddings, from transformers; and what they should give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.models.build import build_pooled, packed_attention
from minisgl.models.config import ModelConfig
from minisgl.models.pooling_config import PoolingConfig
from minisgl.models.pooling_files import read_pooling
from minisgl.models.weights import load_weights
from support.numerics.family_checkpoints import randomize

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Attention tells tokens apart, so that it matters to which ones a token attends.
    "initializer_range": 0.08,
}
_MODERNBERT: Final = {"local_attention": 16, "cls_token_id": 0, "sep_token_id": 2, "norm_bias": True}
_DECODER: Final = {"num_key_value_heads": 2, "head_dim": 24}
_ONE_LABEL: Final = {"num_labels": 1}
_GEMMA: Final = {
    **_DECODER,
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 40,
}
MEAN: Final = {"pooling_mode_mean_tokens": True}
CLS: Final = {"pooling_mode_cls_token": True}
LAST: Final = {"pooling_mode_lasttoken": True}

EMBEDDERS: Final[Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any], int]]] = {
    "bert": ("AutoModel", "bert", {}, MEAN, 0),
    "bert, masked tokens": ("AutoModelForMaskedLM", "bert", {"hidden_act": "gelu_new"}, CLS, 0),
    "roberta": ("AutoModel", "roberta", {}, MEAN, 0),
    "xlm-roberta": ("AutoModel", "xlm-roberta", {"type_vocab_size": 1}, CLS, 0),
    "xlm-roberta, masked tokens": ("AutoModelForMaskedLM", "xlm-roberta", {"pad_token_id": 3}, MEAN, 1),
    "nomic-bert": ("AutoModel", "nomic_bert", {}, MEAN, 0),
    "modernbert": ("AutoModel", "modernbert", {**_MODERNBERT, "norm_bias": False}, CLS, 0),
    "modernbert, masked tokens, biases": (
        "AutoModelForMaskedLM",
        "modernbert",
        {**_MODERNBERT, "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 2},
        MEAN,
        0,
    ),
    "gte": ("AutoModel", "gte", {"type_vocab_size": 2}, CLS, 0),
    "gte without token types": ("AutoModel", "gte", {"type_vocab_size": 0}, CLS, 0),
    "embedding-gemma": ("AutoModel", "gemma3_text", _GEMMA, MEAN, 2),
    "qwen3": ("AutoModelForCausalLM", "qwen3", {**_DECODER, "tie_word_embeddings": False}, LAST, 0),
    "qwen3, body alone": ("AutoModel", "qwen3", _DECODER, LAST, 0),
    "qwen3, mean": ("AutoModel", "qwen3", _DECODER, MEAN, 0),
    "mistral": ("AutoModel", "mistral", {**_DECODER, "sliding_window": 12}, LAST, 0),
}
"""Class and type of a model, settings beyond the sizes, pooling, and number of dense layers, by the name of a case."""

SCORERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert": ("bert", _ONE_LABEL),
    "bert, classes": ("bert", {"num_labels": 3}),
    "roberta": ("roberta", _ONE_LABEL),
    "xlm-roberta": ("xlm-roberta", _ONE_LABEL),
    "modernbert": ("modernbert", {**_MODERNBERT, **_ONE_LABEL, "norm_bias": False}),
    "modernbert, mean": (
        "modernbert",
        {**_MODERNBERT, "num_labels": 4, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "nomic-bert": ("nomic_bert", _ONE_LABEL),
    "gte": ("gte", _ONE_LABEL),
    "qwen3": ("qwen3", {**_DECODER, **_ONE_LABEL}),
    "llama, classes": ("llama", {"num_key_value_heads": 2, "num_labels": 3}),
}
"""Type of a model with a head for scores or classes, and settings beyond the sizes."""

TEXTS: Final = [
    [int(t) for t in torch.randint(4, 300, (n,), generator=torch.Generator().manual_seed(n))]
    for n in (37, 5, 1, 70, 5, 33, 36, 2)
]


def write_embedder(folder: Path, name: str, **changes: Any) -> torch.nn.Module:
    """Write the checkpoint of a case in float32, with the files of sentence-transformers. Returns its model."""
    kind, family, settings, pooling, num_dense = EMBEDDERS[name]
    model = _write(folder, kind, family, {**settings, **changes})
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **pooling})
    modules = ["Transformer", "Pooling", *["Dense"] * num_dense, "Normalize"]
    for number, size in enumerate(range(2, 2 + num_dense)):
        _write_dense(folder / f"{size}_Dense", 64 + 8 * number, 72 + 8 * number)
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{each}" if i else "", "type": f"sentence_transformers.models.{each}"}
        for i, each in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return model


def write_scorer(folder: Path, name: str) -> torch.nn.Module:
    """Write the checkpoint of a case in float32. Returns its model."""
    family, settings = SCORERS[name]
    return _write(folder, "AutoModelForSequenceClassification", family, settings)


def _write(folder: Path, kind: str, family: str, settings: Mapping[str, Any]) -> torch.nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = getattr(transformers, kind).from_config(config, attn_implementation="eager").float().eval()
        randomize(model)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def _write_dense(folder: Path, in_features: int, out_features: int) -> None:
    from safetensors.torch import save_file

    settings = {"in_features": in_features, "out_features": out_features, "bias": True}
    _write_json(folder / "config.json", {**settings, "activation_function": "torch.nn.modules.activation.Tanh"})
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    tensors = {"linear.weight": weight, "linear.bias": torch.randn(out_features, generator=generator)}
    save_file(tensors, folder / "model.safetensors")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@torch.inference_mode()
def reference_embedding(folder: Path, model: Any, text: Sequence[int], pooling: PoolingConfig) -> torch.Tensor:
    """Embedding of one text, in plain torch."""
    from safetensors.torch import load_file

    body = getattr(model, model.base_model_prefix, model)
    hidden = body(torch.tensor([text])).last_hidden_state[0]
    x = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling.method]
    for dense in pooling.dense:
        weights = load_file(folder / dense.folder / "model.safetensors")
        x = torch.tanh(weights["linear.weight"] @ x + weights["linear.bias"])
    embedding: torch.Tensor = x / x.norm()
    return embedding


class Served:
    """A checkpoint as it is served."""

    def __init__(
        self,
        folder: Path,
        parallel: TensorParallel | None = None,
        *,
        config: ModelConfig | None = None,
        pooling: PoolingConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`config` and `pooling`: those of the checkpoint by default."""
        self.config = config or ModelConfig.read(folder)
        found = pooling or read_pooling(folder, self.config)
        assert found is not None
        self.pooling, parallel = found, parallel or TensorParallel()
        self.model, self.pooler = build_pooled(self.config, found, parallel, dtype, device)
        load_weights(self.model.parameters, folder, threads=2)
        self.attention = packed_attention(self.config, parallel, dtype, torch.device(device))

    @torch.inference_mode()
    def outputs(self, texts: Sequence[Sequence[int]], second_texts: Sequence[int] | None = None) -> torch.Tensor:
        """Outputs of `texts` [S, size], all of one step. `second_texts`: where the second text of each pair begins."""
        device = self.model.parameters.device
        lengths = np.array([len(text) for text in texts], np.int32)
        offsets = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32)).to(device)
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(length, dtype=torch.int32, device=device) for length in lengths])
        self.attention.begin(offsets, lengths)
        if second_texts is None:
            hidden = self.model.forward(tokens, positions, self.attention)
        else:
            types = [int(i >= start) for text, start in zip(texts, second_texts, strict=True) for i in range(len(text))]
            hidden = self.model.forward(tokens, positions, self.attention, torch.tensor(types, device=device))
        return self.pooler.output(self.pooler.take(hidden, offsets))


def cosines(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cosine of each row."""
    return F.cosine_similarity(one.double(), other.double(), dim=-1)
