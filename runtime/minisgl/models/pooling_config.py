"""What becomes of the hidden states of a text in models that do not generate."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.config import Task


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer behind the pooling, with an activation (`2_Dense` of sentence-transformers)."""

    folder: str
    """Folder of its weights in the checkpoint."""
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh", "gelu"] = "identity"


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """From the hidden states of a text, behind the last norm, to its output."""

    task: Task
    """Not `generate`."""
    method: Literal["last", "first", "mean"]
    """Hidden state of the last or first token (`[CLS]`), or the mean over all tokens."""
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    """Divide the output by its L2 norm."""
    head: Literal["none", "linear", "tanh_linear", "tokens"] = "none"
    """Behind the pooling: a linear layer, one behind another with tanh (BERT, RoBERTa), or the logits of the tokens in
    `label_tokens` (Qwen3-Reranker)."""
    label_tokens: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax", "softmax_last"] = "none"
    """Of the head's outputs; `softmax_last`: the probability of the last one alone."""
    labels: tuple[str, ...] = ()
    output_size: int
    """Numbers of an output."""
    whole_texts: bool = False
    """A text is computed in one step, without the prefix cache: its tokens attend to later ones, or all of them are
    pooled."""
