"""Check whether a checkpoint directory can be served, from its JSON files and safetensors headers. Torch, which gives
the names and shapes of the model's parameters, is imported by the check itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.config import EngineConfig, Task, TaskChoice
from minisgl.errors import ModelError
from minisgl.models.checkpoint import check_tensor, stored_tensors
from minisgl.models.config import ModelConfig, read_json
from minisgl.models.pooling_config import PoolingConfig
from minisgl.models.pooling_files import read_pooling

_MAX_LISTED = 10
"""Problems with the same code that are listed one by one."""

_NOT_APPLIED: Final[Mapping[str, tuple[object, ...]]] = {
    "do_sample": (True,),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "num_beams": (1,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "stop_strings": (),
}
"""Fields of generation_config.json that change the answers of transformers, and not ours, with values that change
nothing there either."""


class Finding(msgspec.Struct, frozen=True):
    """Problem or note: a stable code, and a message with what is wrong and what to do."""

    code: str
    message: str


class CheckpointReport(msgspec.Struct, kw_only=True):
    directory: str
    architecture: str | None = None
    task: Task | None = None
    """What the model is made for."""
    output_size: int = 0
    """Numbers of an embedding, scores or classes; 0: it generates text."""
    labels: list[str] = []
    """Names of its classes."""
    dtype: str | None = None
    quantization: str | None = None
    """Format of quantized weights."""
    num_parameters: int = 0
    weight_bytes: int = 0
    """Bytes of the stored weights."""
    hopper_bytes: int = 0
    """Memory for the weights on one Hopper GPU, whose kernels take most quantized weights as they are."""
    other_bytes: int = 0
    """The same on other GPUs, in 16 bits."""
    cpu_bytes: int = 0
    """The same on a CPU, in float32."""
    kv_bytes_per_token: int = 0
    """Bytes of a token in a KV cache in 16 bits, as on a GPU; 0: it needs none."""
    window: int | None = None
    """Window of some layers that is shorter than the longest sequence; None: there is none."""
    kv_bytes_behind_window: int = 0
    """Bytes of a token behind the window, which only the other layers keep."""
    longest_bytes: int = 0
    """Bytes of the longest sequence in the KV cache, which are fewer than those of its tokens with a window."""
    max_model_len: int | None = None
    """Tokens of the longest sequence that can be served."""
    tensor_parallel_sizes: list[int] = []
    """Numbers of ranks that the model can be split over."""
    draft_model: str | None = None
    """What the draft head is, if one is checked and fits."""
    draft_parameters: int = 0
    problems: list[Finding] = []
    """Reasons why the checkpoint cannot be served."""
    notes: list[Finding] = []
    """Other findings; the checkpoint can be served in spite of them."""

    @property
    def servable(self) -> bool:
        return not self.problems


def check_checkpoint(
    directory: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    task: TaskChoice = "auto",
    headers_only: bool = False,
    draft_model: str | Path | None = None,
) -> CheckpointReport:
    """Check everything, and report all problems instead of raising the first one. `overrides`: changes of
    config.json. `task`: what the model is to be served for. `headers_only`: the weight files have no tensors; see
    `fetch_headers`. `draft_model`: directory of a draft head for the model."""
    folder = Path(directory)
    report = CheckpointReport(directory=str(folder))
    config = pooling = None
    try:
        config = ModelConfig.read(folder, overrides)
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
    if folder.is_dir():
        if config is not None:
            _describe(config, report)
            pooling = _check_pooling(folder, config, task, report)
        _check_weights(folder, config, pooling, report, headers_only)
        _check_tokenizer(folder, report)
        _check_generation(folder, report)
    if draft_model is not None and config is not None:
        _check_drafter(Path(draft_model), config, report)
    return report


def _check_drafter(folder: Path, target: ModelConfig, report: CheckpointReport) -> None:
    from minisgl.distributed.tensor_parallel import TensorParallel
    from minisgl.models.drafter import Drafter, DrafterConfig
    from minisgl.models.weights import unexpected_tensors, unread_tensors

    try:
        config = DrafterConfig.read(folder)
        config.check_target(target)
        parameters = Drafter.of_headers(config, TensorParallel()).parameters
        tensors = stored_tensors(folder)
        for source in parameters.sources:
            for name, spec in source.tensors.items():
                check_tensor(name, spec, tensors)
        if unexpected := unread_tensors(tensors, parameters).unexpected:
            raise unexpected_tensors(unexpected, tensors)
    except ModelError as error:
        report.problems.append(Finding(error.code, f"--draft-model: {error}"))
        return
    report.draft_model = f"DFlash, {config.model.num_layers} layers, blocks of {config.block_size} tokens"
    report.draft_parameters = parameters.num_elements


def _describe(config: ModelConfig, report: CheckpointReport) -> None:
    report.architecture = config.architecture
    report.dtype = config.dtype
    report.quantization = None if config.quantization is None else config.quantization.name
    report.max_model_len = config.max_model_len
    report.kv_bytes_per_token = 2 * config.kv_numbers_per_token()
    layout = config.kv_layout(EngineConfig(model="", device="cuda"), config.max_model_len)
    report.window = layout.window
    report.kv_bytes_behind_window = layout.full_bytes // layout.page_size
    report.longest_bytes = layout.sequence_bytes(config.max_model_len)
    report.tensor_parallel_sizes = config.tensor_parallel_sizes()
    try:
        config.check_length(config.max_model_len)
    except ModelError as error:
        report.max_model_len = config.dual_chunk_after or config.max_model_len
        report.notes.append(Finding(error.code, str(error)))
    if config.dtype == "float32":
        message = "the checkpoint is float32: on a GPU it runs in bfloat16, unless --dtype float32 is given"
        report.notes.append(Finding("float32_checkpoint", message))
    if not config.eos_token_ids and config.has_lm_head:
        message = "neither generation_config.json nor config.json has an eos_token_id: answers end by length only"
        report.notes.append(Finding("no_eos_token", message))


def _check_pooling(
    folder: Path, config: ModelConfig, task: TaskChoice, report: CheckpointReport
) -> PoolingConfig | None:
    try:
        pooling = read_pooling(folder, config, task)
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
        return None
    report.task = "generate" if pooling is None else pooling.task
    if pooling is not None:
        report.output_size, report.labels = pooling.output_size, list(pooling.labels)
        if pooling.whole_texts:
            report.kv_bytes_per_token = 0
    return pooling


def _check_weights(
    folder: Path,
    config: ModelConfig | None,
    pooling: PoolingConfig | None,
    report: CheckpointReport,
    headers_only: bool,
) -> None:
    from minisgl.models.build import checkpoint_parameters
    from minisgl.models.kv_scales import read_kv_scales
    from minisgl.models.weights import left_out_message, unexpected_tensors, unread_tensors

    # Without a pooling that can be read, the weights of an encoder are not known.
    parameters = None
    if config is not None and (pooling is not None or report.task == "generate"):
        parameters = checkpoint_parameters(config, pooling)
    try:
        tensors = stored_tensors(folder, () if parameters is None else parameters.folders)
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
        return
    if config is None or parameters is None:
        return
    report.hopper_bytes = report.other_bytes = parameters.num_bytes
    report.cpu_bytes = checkpoint_parameters(config, pooling, dtype="float32").num_bytes
    if config.quantization is not None:
        kept = checkpoint_parameters(config, pooling, keep_quantized=True)
        report.hopper_bytes = kept.num_bytes
        _check_shards(config, pooling, kept.dequantized_share, report)
    by_code: dict[str, list[Finding]] = {}
    counted: set[str] = set()
    for source in parameters.sources:
        report.num_parameters += source.num_taken
        # Several sources may be parts of one tensor.
        new = {name: spec for name, spec in source.tensors.items() if name not in counted}
        counted |= new.keys()
        for name, spec in new.items():
            try:
                stored = check_tensor(name, spec, tensors)
            except ModelError as error:
                by_code.setdefault(error.code, []).append(Finding(error.code, str(error)))
            else:
                report.weight_bytes += stored.bytes_of(math.prod(stored.shape))
    for code, findings in by_code.items():
        report.problems += findings[:_MAX_LISTED]
        if len(findings) > _MAX_LISTED:
            report.problems.append(Finding(code, f"… and {len(findings) - _MAX_LISTED} more tensors"))
    try:
        unread = unread_tensors(tensors, parameters)
        if unread.unexpected:
            raise unexpected_tensors(unread.unexpected, tensors)
        if unread.left_out:
            report.notes.append(Finding("left_out_tensors", left_out_message(unread.left_out)))
    except ModelError as error:
        report.problems.append(Finding(error.code, str(error)))
    if headers_only or config.encoder is not None:
        return
    try:
        read_kv_scales(folder, config.kv_layer_numbers)
    except ModelError as error:
        report.notes.append(Finding(error.code, f"with --kv-cache-dtype fp8 it cannot be served: {error}"))


def _check_shards(config: ModelConfig, pooling: PoolingConfig | None, alone: float, report: CheckpointReport) -> None:
    """Note the numbers of ranks with a larger share of weights in 16 bits than one rank has, which is `alone`."""
    from minisgl.models.build import checkpoint_parameters

    shares = []
    for ranks in [each for each in report.tensor_parallel_sizes if each > 1]:
        parameters = checkpoint_parameters(config, pooling, keep_quantized=True, ranks=ranks)
        # Heads of keys and values that several ranks have change it a little, too.
        if parameters.dequantized_share > alone + 0.01:
            shares.append(f"{parameters.dequantized_share:.0%} with --tp {ranks}")
    if shares:
        message = f"on Hopper GPUs some shards cut blocks of quantized weights and take 16 bits: {', '.join(shares)}"
        report.notes.append(Finding("shards_dequantized", message))


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
    generates = report.task in (None, "generate")
    if generates and "chat_template" not in settings and not (folder / "chat_template.jinja").is_file():
        message = "no chat template: /v1/completions works, /v1/chat/completions does not; add chat_template.jinja"
        report.notes.append(Finding("no_chat_template", message))


def _check_generation(folder: Path, report: CheckpointReport) -> None:
    try:
        settings = read_json(folder / "generation_config.json")
    except ModelError:
        # Absent, or a problem that `ModelConfig.read` has reported.
        return
    given = {name: settings.get(name) for name in _NOT_APPLIED}
    listed = [f"{name} {value}" for name, value in given.items() if value not in (None, *_NOT_APPLIED[name])]
    if listed:
        message = f"generation_config.json: no effect on answers: {', '.join(listed)}; requests decide"
        report.notes.append(Finding("generation_settings_not_applied", message))
