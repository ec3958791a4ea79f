"""Can this checkpoint be served? Reads configs and headers only, no weights."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.models.checkpoint import ITEM_BYTES, StoredTensor, check_tensor, stored_tensors
from minisgl.models.config import ModelConfig, read_json
from minisgl.models.decoder import Decoder
from minisgl.models.errors import ModelError
from minisgl.models.weights import unknown_tensors

_NAMED = 10
"""Problems of one kind that are listed one by one."""


class Finding(msgspec.Struct, frozen=True):
    """`code` is stable; the message names what is wrong and what to do."""

    code: str
    message: str


class CheckpointReport(msgspec.Struct, kw_only=True):
    directory: str
    architecture: str | None = None
    dtype: str | None = None
    num_parameters: int = 0
    weight_bytes: int = 0
    max_model_len: int | None = None
    """Longest sequence in tokens that can be served."""
    tensor_parallel_sizes: list[int] = []
    """Numbers of ranks that the model can be split over."""
    problems: list[Finding] = []
    """Any of them keeps the checkpoint from being served."""
    notes: list[Finding] = []
    """What does not keep it from being served, but should be known."""

    @property
    def servable(self) -> bool:
        return not self.problems


def check_checkpoint(directory: str | Path) -> CheckpointReport:
    """Find everything that is wrong, not just the first thing. Raises nothing for what is wrong with the directory."""
    folder = Path(directory)
    report = CheckpointReport(directory=str(folder))
    config = None
    try:
        config = ModelConfig.read(folder)
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
    if folder.is_dir():
        if config is not None:
            _describe(config, report)
        _check_weights(folder, config, report)
        _check_tokenizer(folder, report)
    return report


def _describe(config: ModelConfig, report: CheckpointReport) -> None:
    report.architecture = config.architecture
    report.dtype = config.dtype
    report.max_model_len = config.max_model_len
    report.tensor_parallel_sizes = config.tensor_parallel_sizes()
    if config.sliding_window is not None and config.sliding_window < config.max_model_len:
        report.max_model_len = config.sliding_window
        try:
            config.check_sliding_window(config.max_model_len)
        except ModelError as error:
            report.notes.append(Finding(error.code, str(error)))
    if not config.eos_token_ids:
        message = "neither generation_config.json nor config.json names an eos_token_id: answers end by length only"
        report.notes.append(Finding("no_eos_token", message))


def _check_weights(folder: Path, config: ModelConfig | None, report: CheckpointReport) -> None:
    try:
        tensors = stored_tensors(folder)
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
        return
    if config is None:
        return
    parameters = Decoder(config, TensorParallel(), torch.bfloat16, "meta", max_position=1).parameters
    found: dict[str, list[Finding]] = {}
    for source in parameters.sources:
        try:
            stored = check_tensor(source.name, source.shape, tensors)
        except ModelError as error:
            found.setdefault(error.code, []).append(Finding(error.code, str(error)))
        else:
            report.num_parameters += math.prod(stored.shape)
            report.weight_bytes += math.prod(stored.shape) * ITEM_BYTES[stored.dtype]
    for code, findings in found.items():
        report.problems += findings[:_NAMED]
        if len(findings) > _NAMED:
            report.problems.append(Finding(code, f"… and {len(findings) - _NAMED} more tensors like these"))
    _note_unknown(unknown_tensors(tensors, parameters), tensors, report)


def _note_unknown(unknown: list[str], tensors: dict[str, StoredTensor], report: CheckpointReport) -> None:
    if unknown:
        file = tensors[unknown[0]].file.name
        message = f"{len(unknown)} tensors are not used, the first is {unknown[0]} in {file}"
        report.notes.append(Finding("unknown_tensors", message))


def _check_tokenizer(folder: Path, report: CheckpointReport) -> None:
    if not (folder / "tokenizer.json").is_file():
        message = f"{folder} has no tokenizer.json; download it, or convert the tokenizer with transformers"
        report.problems.append(Finding("no_tokenizer", message))
    settings = {}
    if (folder / "tokenizer_config.json").is_file():
        try:
            settings = read_json(folder / "tokenizer_config.json")
        except ModelError as error:
            report.problems.append(Finding(error.code, str(error)))
    if "chat_template" not in settings and not (folder / "chat_template.jinja").is_file():
        message = (
            "there is no chat template: /v1/completions works, /v1/chat/completions does not; add chat_template.jinja"
        )
        report.notes.append(Finding("no_chat_template", message))
