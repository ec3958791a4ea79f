"""What becomes of the hidden states of a text in models that do not generate."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.config import Task

Method = Literal["last", "first", "mean"]
"""Hidden state of the last or first token (`[CLS]`), or the mean over all tokens."""
DenseActivation = Literal["identity", "tanh", "gelu", "gelu_tanh", "relu", "silu", "sigmoid"]


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer behind the pooling, with an activation (`2_Dense` of sentence-transformers)."""

    folder: str
    """Folder of its weights in the checkpoint."""
    in_features: int
    out_features: int
    bias: bool
    activation: DenseActivation = "identity"


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that make scores of a pooled hidden state: a linear one, in most encoders behind another."""

    output: str
    """Name of the last layer, which has a row for each label."""
    output_bias: bool
    dense: str | None = None
    """Name of a layer before it, of the hidden size; None: there is none."""
    dense_bias: bool = True
    activation: DenseActivation = "tanh"
    """Behind `dense`."""
    norm: str | None = None
    """Name of a layer norm between the two (ModernBERT)."""
    norm_bias: bool = False
    norm_eps: float = 1e-5
    method: Method = "first"
    """Which hidden state it takes."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """From the hidden states of a text, behind the last norm, to its output."""

    task: Task
    """Not `generate`."""
    method: Method
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    """Divide the output by its L2 norm."""
    head: HeadConfig | None = None
    label_tokens: tuple[int, ...] = ()
    """Instead of a head, the output is the logit of the first of these tokens, less that of the second one, if there is
    one: "yes" and "no" (Qwen3-Reranker)."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Of the outputs of the head, or of that logit."""
    labels: tuple[str, ...] = ()
    """Names of the numbers of an output that are classes."""
    output_size: int
    """Numbers of an output."""
    max_length: int | None = None
    """Tokens of the longest text that the checkpoint was made for, if it says so."""
    whole_texts: bool = False
    """A text is computed in one step, without the prefix cache: its tokens attend to later ones, or all of them are
    pooled."""
