"""Task of a checkpoint, and how it pools texts: from its architecture, and the files of sentence-transformers beside
config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from msgspec.structs import replace

from minisgl.config import Task, TaskChoice
from minisgl.errors import ModelError
from minisgl.json_file import MAX_FILE_BYTES, check_size
from minisgl.models.config import ModelConfig, read_json
from minisgl.models.fields import Fields
from minisgl.models.pooling_config import DenseActivation, DenseConfig, Method, PoolingConfig
from minisgl.models.score_fields import activation_of

_METHODS: Final[Mapping[str, Method]] = {
    "cls": "first",
    "mean": "mean",
    "lasttoken": "last",
}
"""Supported values of `pooling_mode`."""
_FLAGS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older files have a flag for each of them."""
_ACTIVATIONS: Final[Mapping[str, DenseActivation]] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_MOST_MODULES: Final = 16
_MOST_TOKENIZER_BYTES: Final = 128 << 20


class _Module(msgspec.Struct, frozen=True):
    """Entry of modules.json."""

    type: str
    path: str

    @property
    def kind(self) -> str:
        """Name of its class, without the package, which differs between versions."""
        return self.type.rpartition(".")[2]


class _Model(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw


class _Tokenizer(msgspec.Struct, frozen=True):
    model: _Model


_modules_decoder: Final = msgspec.json.Decoder(list[_Module])
_tokenizer_decoder: Final = msgspec.json.Decoder(_Tokenizer)


def read_pooling(directory: str | Path, config: ModelConfig, choice: TaskChoice = "auto") -> PoolingConfig | None:
    """How the model `config` in `directory` is served for the task `choice`, or for that which its files say; None: it
    generates text. Reads files only. Raises ModelError: `wrong_task` for a task that the model cannot do."""
    folder = Path(directory)
    pooling = _read(folder, config, choice)
    return None if pooling is None else replace(pooling, max_length=_max_length(folder))


def _read(folder: Path, config: ModelConfig, choice: TaskChoice) -> PoolingConfig | None:
    modules = _modules(folder)
    found = _found_task(config, modules)
    match found if choice == "auto" else choice:
        case "generate":
            if not config.has_lm_head or not config.is_causal:
                _refuse(config, "generate", "it has no output head for the next token", found)
            return None
        case "embed":
            return _embedding(folder, config, modules)
        case "rerank":
            return _reranker(folder, config, modules, found)
        case "classify":
            if config.scores is None:
                _refuse(config, "classify", "it has no head for classes", found)
            return _scored(config, "classify")
    raise AssertionError(choice)


def _max_length(folder: Path) -> int | None:
    """`max_seq_length` of sentence-transformers. Raises ModelError."""
    file = folder / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.is_file() else None
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ModelError("invalid_config", f"{file}: max_seq_length is {length!r:.40}, not a number of tokens")
    return length


def _found_task(config: ModelConfig, modules: list[_Module]) -> Task:
    """Task that a model was made for."""
    if config.scores is not None:
        return "rerank" if len(config.scores.labels) == 1 else "classify"
    if _first(modules, "LogitScore") is not None:
        return "rerank"
    if _first(modules, "Pooling") is not None or not config.has_lm_head or not config.is_causal:
        return "embed"
    return "generate"


def _embedding(folder: Path, config: ModelConfig, modules: list[_Module]) -> PoolingConfig:
    pooling = _first(modules, "Pooling")
    if pooling is None:
        # An encoder as in sentence-transformers, but normalized. A decoder has seen the whole text at its last token.
        method: Method = "mean" if not config.is_causal else "last"
        return _with_whole_texts(
            PoolingConfig(task="embed", method=method, normalize=True, output_size=config.hidden_size), config
        )
    method = _method(_settings(folder, pooling))
    dense, size, normalize = [], config.hidden_size, False
    for module in modules[modules.index(pooling) + 1 :]:
        kind = module.kind
        if normalize or kind not in ("Dense", "Normalize", "Dropout"):
            where = " behind Normalize" if normalize else ""
            raise ModelError(
                "unsupported_pooling",
                f"modules.json: a module {kind!r:.40}{where} is not supported; supported are Pooling, then Dense, then "
                "Normalize",
            )
        if kind == "Dense":
            dense.append(_dense(folder, module, size))
            size = dense[-1].out_features
        normalize = kind == "Normalize"
    return _with_whole_texts(
        PoolingConfig(task="embed", method=method, dense=tuple(dense), normalize=normalize, output_size=size),
        config,
    )


def _reranker(folder: Path, config: ModelConfig, modules: list[_Module], found: Task) -> PoolingConfig:
    if config.scores is not None:
        if len(config.scores.labels) != 1:
            _refuse(config, "rerank", f"its head has {len(config.scores.labels)} labels, not one score", found)
        pooling = _scored(config, "rerank")
    elif config.has_lm_head and config.is_causal:
        pooling = PoolingConfig(
            task="rerank",
            method="last",
            label_tokens=_label_tokens(folder, modules, config.vocab_size),
            activation="sigmoid",
            output_size=1,
        )
    else:
        _refuse(config, "rerank", "it has no head for scores", found)
    settings = folder / "config_sentence_transformers.json"
    if settings.is_file() and (given := read_json(settings).get("activation_fn")) is not None:
        pooling = replace(pooling, activation=activation_of(given))
    return pooling


def _scored(config: ModelConfig, task: Task) -> PoolingConfig:
    scores = config.scores
    assert scores is not None
    pooling = PoolingConfig(
        task=task,
        method=scores.head.method,
        head=scores.head,
        activation=scores.activation,
        labels=scores.labels if task == "classify" else (),
        output_size=len(scores.labels),
    )
    return _with_whole_texts(pooling, config)


def _with_whole_texts(pooling: PoolingConfig, config: ModelConfig) -> PoolingConfig:
    whole = not config.is_causal or pooling.method != "last"
    if whole and config.recurrences:
        raise ModelError(
            "unsupported_pooling",
            f"{config.architecture} has layers with recurrent states, and the method of its pooling is "
            f"{pooling.method!r}; supported for such models is the last token",
        )
    return replace(pooling, whole_texts=whole)


def _refuse(config: ModelConfig, task: Task, reason: str, found: Task) -> NoReturn:
    raise ModelError(
        "wrong_task",
        f"{config.architecture} cannot be served with --task {task}: {reason}; it is made for --task {found}",
    )


def _modules(folder: Path) -> list[_Module]:
    """Modules of modules.json; empty: there is no such file."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        check_size(file, MAX_FILE_BYTES)
        modules = _modules_decoder.decode(file.read_bytes())
    except (msgspec.MsgspecError, RecursionError, ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{file} cannot be read: {error}; download the file again") from error
    if len(modules) > _MOST_MODULES or not modules or modules[0].kind != "Transformer":
        raise ModelError(
            "unsupported_pooling",
            f"modules.json: {', '.join(each.kind for each in modules[:_MOST_MODULES])!r:.200} are not supported; "
            "supported are modules Transformer, Pooling, Dense, Normalize and LogitScore, in this order",
        )
    return modules


def _first(modules: list[_Module], kind: str) -> _Module | None:
    return next((module for module in modules if module.kind == kind), None)


def _settings(folder: Path, module: _Module) -> dict[str, Any]:
    """config.json of a module."""
    if not re.fullmatch(r"[\w.-]+", module.path) or module.path.startswith("."):
        raise ModelError("malformed_json", f"modules.json: {module.path!r:.80} is not the name of a folder")
    if not (folder / module.path / "config.json").is_file():
        raise ModelError(
            "missing_file", f"modules.json names {module.path}, but {folder} has no {module.path}/config.json"
        )
    return read_json(folder / module.path / "config.json")


def _method(settings: Mapping[str, Any]) -> Method:
    """Method of a Pooling module. Raises ModelError."""
    mode = settings.get("pooling_mode")
    if mode is None:
        flags = [name for flag, name in _FLAGS.items() if settings.get(flag)]
        mode = (flags or ["mean"])[0] if len(flags) < 2 else flags
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if not isinstance(mode, str) or mode not in _METHODS:
        raise ModelError(
            "unsupported_pooling",
            f"pooling by {mode!r:.80} is not supported; supported is one of {', '.join(_METHODS)}",
        )
    if mode == "mean" and settings.get("include_prompt") is False:
        raise ModelError(
            "unsupported_pooling", "a mean without the tokens of the prompt (include_prompt: false) is not supported"
        )
    return _METHODS[mode]


def _dense(folder: Path, module: _Module, size: int) -> DenseConfig:
    """A Dense module behind `size` numbers. Raises ModelError."""
    settings = _settings(folder, module)
    fields, name = Fields(settings), f"{module.path}/config.json"
    if fields.count("in_features") != size:
        raise ModelError("invalid_config", f"{name}: in_features is {settings['in_features']}, not {size} as before it")
    activation = str(settings.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    beside = (settings.get(each, "sentence_embedding") for each in ("module_input_name", "module_output_name"))
    if activation not in _ACTIVATIONS or settings.get("use_residual") or set(beside) - {"sentence_embedding", None}:
        raise ModelError(
            "unsupported_pooling",
            f"{name} is not supported: supported are Dense modules of embeddings without a residual, with the "
            f"activations {', '.join(_ACTIVATIONS)}",
        )
    return DenseConfig(
        folder=module.path,
        in_features=size,
        out_features=fields.count("out_features"),
        bias=fields.flag("bias", default=True),
        activation=_ACTIVATIONS[activation],
    )


def _label_tokens(folder: Path, modules: list[_Module], vocab_size: int) -> tuple[int, ...]:
    """Tokens whose logits make a score: those of LogitScore, or "yes" and "no". Raises ModelError."""
    if (module := _first(modules, "LogitScore")) is not None:
        settings = _settings(folder, module)
        tokens = [settings.get("true_token_id"), settings.get("false_token_id")]
        if tokens[1] is None:
            tokens.pop()
        where = f"{module.path}/config.json"
    else:
        known = _vocabulary(folder / "tokenizer.json")
        tokens, where = [known.get(word) for word in ("yes", "no")], "tokenizer.json"
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
        raise ModelError(
            "unsupported_pooling",
            f'{where} has no tokens "yes" and "no", whose logits are the score of a reranker without a head',
        )
    return tuple(token for token in tokens if token is not None)


def _vocabulary(file: Path) -> dict[str, int]:
    """Tokens of a tokenizer.json that are not added ones; empty where they have no ids of their own."""
    try:
        check_size(file, _MOST_TOKENIZER_BYTES)
        vocabulary = _tokenizer_decoder.decode(file.read_bytes()).model.vocab
        return msgspec.json.decode(vocabulary, type=dict[str, int]) if bytes(vocabulary)[:1] == b"{" else {}
    except (msgspec.MsgspecError, RecursionError, ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{file} cannot be read: {error}; download the file again") from error
