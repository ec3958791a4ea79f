"""Task and pooling of a checkpoint, as its files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl.config import TaskChoice
from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.models.pooling_config import DenseConfig, HeadConfig, PoolingConfig
from minisgl.models.pooling_files import read_pooling

BERT: Final[dict[str, Any]] = {
    "architectures": ["BertModel"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "vocab_size": 100,
}
QWEN3: Final[dict[str, Any]] = {**BERT, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
TRANSFORMER: Final = {"type": "sentence_transformers.models.Transformer", "path": ""}


def written(folder: Path, config: dict[str, Any], **files: Any) -> tuple[Path, ModelConfig]:
    """A checkpoint without weights, with these JSON files, `/` in a name written as `__`."""
    for name, content in {"config": config, **files}.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder, ModelConfig.read(folder)


def modules(*kinds: str, package: str = "sentence_transformers.models") -> list[dict[str, Any]]:
    others = [{"type": f"{package}.{kind}", "path": f"{i + 1}_{kind}"} for i, kind in enumerate(kinds)]
    return [TRANSFORMER, *others]


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": {str(index): name for index, name in enumerate(names)}}


def test_the_files_of_sentence_transformers_say_how_texts_are_pooled(tmp_path: Path) -> None:
    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    old = written(tmp_path / "old", BERT, modules=modules("Pooling", "Normalize"), **{"1_Pooling__config": mean})
    expected = PoolingConfig(task="embed", method="mean", normalize=True, output_size=16, whole_texts=True)
    assert read_pooling(*old) == expected
    package = "sentence_transformers.sentence_transformer.modules"
    files = {"modules": modules("Pooling", package=package), "1_Pooling__config": {"pooling_mode": "cls"}}
    new = read_pooling(*written(tmp_path / "new", BERT, **files))
    assert new == PoolingConfig(task="embed", method="first", output_size=16, whole_texts=True)
    last = {"modules": modules("Pooling", "Normalize"), "1_Pooling__config": {"pooling_mode_lasttoken": True}}
    decoder = read_pooling(*written(tmp_path / "decoder", QWEN3, **last))
    assert decoder == PoolingConfig(task="embed", method="last", normalize=True, output_size=16)


def test_dense_layers_change_the_size_of_embeddings(tmp_path: Path) -> None:
    files = {
        "modules": modules("Pooling", "Dense", "Dense", "Normalize"),
        "1_Pooling__config": {"pooling_mode_mean_tokens": True},
        "2_Dense__config": {"in_features": 16, "out_features": 64, "bias": False}
        | {"activation_function": "torch.nn.modules.linear.Identity"},
        "3_Dense__config": {"in_features": 64, "out_features": 8},
    }
    pooling = read_pooling(*written(tmp_path, BERT, **files))
    assert pooling is not None
    assert pooling.dense == (
        DenseConfig(folder="2_Dense", in_features=16, out_features=64, bias=False),
        DenseConfig(folder="3_Dense", in_features=64, out_features=8, bias=True, activation="tanh"),
    )
    assert (pooling.output_size, pooling.normalize) == (8, True)
    wrong = {**files, "3_Dense__config": {"in_features": 63, "out_features": 8}}
    with pytest.raises(ModelError, match="in_features is 63, not 64"):
        read_pooling(*written(tmp_path / "wrong", BERT, **wrong))


@pytest.mark.parametrize(
    ("config", "task", "method", "size", "activation"),
    [
        ({"architectures": ["BertForSequenceClassification"], **labels("x")}, "rerank", "first", 1, "sigmoid"),
        ({"architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1}, "rerank", "first", 1, "sigmoid"),
        (
            {"architectures": ["BertForSequenceClassification"], **labels("x")}
            | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            *("rerank", "first", 1, "none"),
        ),
        ({"architectures": ["ModernBertForSequenceClassification"]}, "classify", "first", 2, "softmax"),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "problem_type": "multi_label_classification"}
            | {"classifier_pooling": "mean", **labels("a", "b", "c")},
            *("classify", "mean", 3, "sigmoid"),
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"], **labels("x")}, "rerank", "last", 1, "sigmoid"),
    ],
)
def test_a_head_for_scores_decides_the_task(
    config: dict[str, Any], task: str, method: str, size: int, activation: str, tmp_path: Path
) -> None:
    pooling = read_pooling(*written(tmp_path, BERT | config))
    assert pooling is not None and pooling.head is not None
    assert (pooling.task, pooling.method, pooling.output_size) == (task, method, size)
    assert (pooling.activation, len(pooling.labels)) == (activation, size if task == "classify" else 0)
    assert pooling.whole_texts == (method != "last")
    embedding = read_pooling(*written(tmp_path, BERT | config), "embed")
    assert embedding is not None and (embedding.head, embedding.output_size) == (None, 16)


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"label {index}" for index in range(12)]
    shuffled = {"id2label": {str(index): names[index] for index in sorted(range(12), key=str)}}
    pooling = read_pooling(*written(tmp_path, {**BERT, "architectures": ["BertForSequenceClassification"], **shuffled}))
    assert pooling is not None and pooling.labels == tuple(names)
    assert pooling.head == HeadConfig(output="classifier", output_bias=True, dense="model.pooler.dense")


def test_a_reranker_without_a_head_scores_by_the_logits_of_two_tokens(tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"no": 5, "yes": 7}}}
    folder, config = written(tmp_path / "plain", QWEN3, tokenizer=vocabulary)
    assert read_pooling(folder, config) is None
    expected = PoolingConfig(task="rerank", method="last", label_tokens=(7, 5), activation="sigmoid", output_size=1)
    assert read_pooling(folder, config, "rerank") == expected
    files = {
        "modules": modules("LogitScore", package="sentence_transformers.cross_encoder.modules.logit_score"),
        "1_LogitScore__config": {"true_token_id": 9, "false_token_id": None},
        "config_sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    }
    single = read_pooling(*written(tmp_path / "files", QWEN3, **files))
    assert single == PoolingConfig(task="rerank", method="last", label_tokens=(9,), output_size=1)
    with pytest.raises(ModelError, match='no tokens "yes" and "no"') as refused:
        read_pooling(*written(tmp_path / "without", QWEN3, tokenizer={"model": {"vocab": [["yes", -1.0]]}}), "rerank")
    assert refused.value.code == "unsupported_pooling"


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("Qwen3ForCausalLM", "last"), ("Qwen3Model", "last"), ("BertModel", "mean"), ("BertForMaskedLM", "mean")],
)
def test_embeddings_without_files_are_normalized(architecture: str, method: str, tmp_path: Path) -> None:
    config = {**QWEN3, "architectures": [architecture]}
    pooling = read_pooling(*written(tmp_path, config), "embed" if architecture == "Qwen3ForCausalLM" else "auto")
    assert pooling is not None
    assert (pooling.task, pooling.method, pooling.normalize, pooling.output_size) == ("embed", method, True, 16)


@pytest.mark.parametrize(
    ("config", "choice", "says"),
    [
        ({}, "generate", "--task generate: it has no output head.*made for --task embed"),
        ({}, "rerank", "--task rerank: it has no head for scores.*made for --task embed"),
        ({}, "classify", "--task classify"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "classify", "made for --task generate"),
        ({"architectures": ["Qwen3Model"]}, "generate", "no output head"),
        ({"architectures": ["BertForSequenceClassification"]}, "rerank", "2 labels.*made for --task classify"),
    ],
)
def test_a_task_that_a_model_cannot_do_is_refused(
    config: dict[str, Any], choice: TaskChoice, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says) as refused:
        read_pooling(*written(tmp_path, BERT | config), choice)
    assert refused.value.code == "wrong_task"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"modules": {"0": 1}}, "malformed_json"),
        ({"modules": [{"type": "a.Transformer"}]}, "malformed_json"),
        ({"modules": modules("Pooling")[1:]}, "unsupported_pooling"),
        ({"modules": modules("Pooling")}, "missing_file"),
        ({"modules": [TRANSFORMER, {"type": "a.Pooling", "path": "../x"}]}, "malformed_json"),
        (
            {"modules": modules("Pooling"), "1_Pooling__config": {"pooling_mode_max_tokens": True}},
            "unsupported_pooling",
        ),
        (
            {"modules": modules("Pooling"), "1_Pooling__config": {"pooling_mode": ["cls", "mean"]}},
            "unsupported_pooling",
        ),
        (
            {"modules": modules("Pooling"), "1_Pooling__config": {"include_prompt": False}},
            "unsupported_pooling",
        ),
        ({"modules": modules("Pooling", "LSTM"), "1_Pooling__config": {}}, "unsupported_pooling"),
        ({"modules": modules("Pooling", "Normalize", "Dense"), "1_Pooling__config": {}}, "unsupported_pooling"),
        (
            {"modules": modules("Pooling", "Dense"), "1_Pooling__config": {}}
            | {"2_Dense__config": {"in_features": 16, "out_features": 8, "use_residual": True}},
            "unsupported_pooling",
        ),
    ],
)
def test_files_that_are_not_supported_are_refused(files: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        read_pooling(*written(tmp_path, BERT, **files))
    assert refused.value.code == code


def test_a_mean_over_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    config = {**QWEN3, "architectures": ["Lfm2Model"], "layer_types": ["conv", "full_attention"]}
    mean = {"modules": modules("Pooling"), "1_Pooling__config": {"pooling_mode_mean_tokens": True}}
    with pytest.raises(ModelError, match="recurrent states") as refused:
        read_pooling(*written(tmp_path, config, **mean))
    assert refused.value.code == "unsupported_pooling"
