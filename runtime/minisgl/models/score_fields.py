"""What a config.json says about the outputs of a model with a head for scores or classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from minisgl.errors import ModelError
from minisgl.models.pooling_config import HeadConfig

ScoreActivation = Literal["none", "sigmoid", "softmax"]

_MOST_LABELS = 1 << 16


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs of a head."""

    head: HeadConfig
    labels: tuple[str, ...]
    """Name of each number of an output."""
    activation: ScoreActivation


def read_scores(config: Mapping[str, Any], head: HeadConfig) -> Scores:
    """Read a config.json whose architecture has this `head`. Raises ModelError."""
    labels = _labels(config)
    given = config.get("sentence_transformers")
    given = given.get("activation_fn") if isinstance(given, dict) else None
    given = given or config.get("sbert_ce_default_activation_function")
    if given is not None:
        return Scores(head=head, labels=labels, activation=activation_of(given))
    problem = config.get("problem_type")
    if problem == "regression":
        return Scores(head=head, labels=labels, activation="none")
    several = len(labels) > 1 and problem != "multi_label_classification"
    return Scores(head=head, labels=labels, activation="softmax" if several else "sigmoid")


def activation_of(name: object) -> ScoreActivation:
    """Activation by the name of its class in torch, as files of sentence-transformers have it. Raises ModelError."""
    match str(name).rpartition(".")[2]:
        case "Identity":
            return "none"
        case "Sigmoid":
            return "sigmoid"
        case "Softmax":
            return "softmax"
    raise ModelError(
        "unsupported_pooling", f"scores with the activation {name!r:.80}; supported are Identity, Sigmoid and Softmax"
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in the order of the outputs. Transformers takes two of them where the file says nothing."""
    named, count = config.get("id2label"), config.get("num_labels")
    if named is None:
        count = 2 if count is None else count
        if isinstance(count, int) and not isinstance(count, bool) and 0 < count <= _MOST_LABELS:
            return tuple(f"LABEL_{index}" for index in range(count))
        raise ModelError("invalid_config", f"config.json: num_labels is {count!r:.80}, not a number of labels")
    by_index = {str(index): label for index, label in named.items()} if isinstance(named, dict) else {}
    labels = [by_index.get(str(index)) for index in range(len(by_index))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ModelError("invalid_config", f"config.json: id2label is {named!r:.80}, not an object of names by number")
    return tuple(map(str, labels))
