"""Configuration of the engine and the scheduler: frozen data, built once from the command line or by `LLM`.

A package receives the part that it needs; no package reads environment variables for these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from minisgl import hopper
from minisgl.errors import CodedError
from minisgl.options import Count, Fraction, Index, Milliseconds, closest, option, options_of

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8"]
CacheKind = Literal["radix", "naive"]
QuantizationChoice = Literal["fp8", "fp8-block", "int4"]
SpeculativeChoice = Literal["off", "auto", "ngram"]
Task = Literal["generate", "embed", "rerank", "classify"]
"""What a model is served for: to generate text, or to turn a text into an embedding, a pair of texts into a score, or a
text into the probabilities of classes."""
TaskChoice = Literal["auto", "generate", "embed", "rerank", "classify"]

MAX_RUNNING: Final = 1 << 16
"""Largest number of rows of the tables, which are allocated at the start."""
DEFAULT_PAGE_SIZE: Final[Mapping[Device, int]] = {"cuda": 64, "cpu": 16}
"""Tokens. The fast decode kernels on CUDA need 64; small pages waste less of a CPU's small pool."""
TEXT_PAGE_SIZE: Final = 16
"""Tokens of a page where texts are pooled, see `ModelConfig.text_page_size`."""
DEFAULT_STEP_TOKENS: Final = 64 * hopper.MULTIPROCESSORS
"""Matrix products of so many rows fill whole waves of the multiprocessors of an H100 or H200 with tiles of 128."""
ATTENTION_BACKENDS: Final = ("torch", "flashinfer", "xqa", "balanced", "split", "fa3", "triton")

Rows = Annotated[int, Meta(ge=1, le=MAX_RUNNING)]

Config = TypeVar("Config", bound=msgspec.Struct)


class ConfigError(CodedError, ValueError):
    """An option that is unknown, or whose value has the wrong type or is out of range."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_option", message)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one rank's engine and of the scheduler in front of it. The same on every rank but for `rank`
    and `device_index`.

    This is the only list of engine options: a field marked with `option` is a flag of every command that runs an
    engine, and a keyword of `LLM`. The other fields are set by the launcher.
    """

    model: str
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files)."""
    device: Device = "cpu"
    rank: int = 0
    rendezvous: str = ""
    """`tcp://host:port` or `file:///path` at which the ranks' collectives meet; unused with one rank."""
    device_index: Index | None = None
    """Index of the rank's device among the visible CUDA devices; None: `rank`."""
    nccl_host: str = ""
    """One host name for all ranks, when they run on one machine in containers that NCCL takes for several machines;
    empty: NCCL detects the hosts. See `TensorParallel`."""
    load_threads: Count = 4
    """Threads that read the checkpoint's weights."""

    tensor_parallel: Annotated[
        Count, option("tensor-parallel ranks, each one process and, on CUDA, one GPU", default="{} rank")
    ] = msgspec.field(default=1, name="tp")
    task: Annotated[
        TaskChoice,
        option(
            "what the model is served for: generate text, embed a text, rerank (score pairs of texts), or classify a "
            "text",
            default="auto, what the checkpoint is made for",
        ),
    ] = "auto"
    dtype: Annotated[
        DType,
        option(
            "data type of weights and KV cache",
            default="auto, that of config.json, but bfloat16 for float32 or quantized ones on a GPU, float32 on a CPU",
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationChoice | None,
        option(
            "quantize the weights of an unquantized checkpoint while they are loaded: fp8, with one scale per "
            "output channel. Quantized checkpoints need no flag. fp8-block and int4 only with --dummy-weights",
            default="the format of the checkpoint",
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None,
        option("JSON object with changes of the checkpoint's config.json", default="none", metavar="JSON"),
    ] = None
    max_running: Annotated[Rows, option("maximum number of requests in the batch", default="{} requests")] = 256
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        option("maximum tokens of prompt plus answer", default="what the model supports and the KV pool holds"),
    ] = None
    max_step_tokens: Annotated[
        Count,
        option("token budget of a step: one per decoding request, the rest for chunks of prompts", default="{} tokens"),
    ] = DEFAULT_STEP_TOKENS
    target_itl_ms: Annotated[
        Milliseconds,
        option(
            "longest time between tokens of streamed answers to aim for: a step that generates such tokens takes only "
            "as many prompt tokens along as fit, or up to 1.8 times as many if many prompts wait, while answers of a "
            "lost engine get three quarters of its time if they wait; 0: as many as --max-step-tokens allows",
            default="{:g} ms",
        ),
    ] = 30.0
    page_size: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        option(
            "tokens per page of the KV pool",
            default=f"{DEFAULT_PAGE_SIZE['cuda']} tokens on CUDA and for models with recurrent states, "
            f"{DEFAULT_PAGE_SIZE['cpu']} on a CPU, and for embeddings and scores of models with neither states nor "
            "windows, unless --num-pages is given",
        ),
    ] = None
    num_pages: Annotated[
        Count | None, option("pages of the KV pool", default="as many as fit into --memory-fraction")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        option(
            "data type of the KV cache: fp8 (e4m3) takes half the memory and changes answers a little; its scales are "
            "the checkpoint's, or 1",
            default="auto, that of the weights",
        ),
    ] = "auto"
    memory_fraction: Annotated[
        Fraction, option("share of the device's free memory for weights, KV pool and CUDA graphs together")
    ] = 0.9
    cache: Annotated[
        CacheKind, option("prefix cache: radix shares the KV of equal prompt beginnings, naive shares nothing")
    ] = "radix"
    overlap: Annotated[
        bool, option("launch a step before the result of the previous one is read", default="off, steps overlap")
    ] = True
    attention_backend: Annotated[
        str,
        option(
            f"{', '.join(ATTENTION_BACKENDS)}, or PREFILL,DECODE",
            default="auto, the fastest one that is installed and supports the model",
        ),
    ] = "auto"
    cuda_graph_max_batch: Annotated[
        Index | None,
        option("largest decode batch with a CUDA graph; 0 disables graphs", default="--max-running, in requests"),
    ] = None
    cuda_graph_max_tokens: Annotated[
        Index,
        option(
            "upper bound of the prompt tokens of a step with a CUDA graph; larger steps, and all steps with prompts of "
            "several ranks, are launched kernel by kernel. 0 disables graphs of steps with prompts",
            default="{} tokens",
        ),
    ] = DEFAULT_STEP_TOKENS
    speculative: Annotated[
        SpeculativeChoice,
        option(
            "verify several drafts of the next tokens in one step: auto and ngram find them where the last tokens "
            "occurred before, in the prompt, the answer or the request's prediction, and verify as many as save time. "
            "Answers stay the same. ngram refuses models that cannot do it, auto serves them without"
        ),
    ] = "off"
    draft_model: Annotated[
        str | None,
        option(
            "directory of a draft head that was made for the model (DFlash): it drafts the next tokens of answers, "
            "which are verified as with --speculative ngram. Needs --tp 1",
            default="drafts are only found in texts",
            metavar="DIR",
        ),
    ] = None
    dummy_weights: Annotated[
        bool, option("use random weights instead of the checkpoint's, for benchmarks; needs only config.json")
    ] = False
    audit: Annotated[
        bool,
        option("check invariants at a cost: fill freed pages with NaN, hand out pages in random order, compare ranks"),
    ] = False


class EngineArgs(TypedDict, total=False):
    """Engine options as keywords of `LLM`: the options of `EngineConfig`, with the same names and types."""

    tp: int
    task: TaskChoice
    dtype: DType
    quantization: QuantizationChoice | None
    hf_overrides: dict[str, Any] | None
    max_running: int
    max_model_len: int | None
    max_step_tokens: int
    target_itl_ms: float
    page_size: int | None
    num_pages: int | None
    kv_cache_dtype: KVCacheDType
    memory_fraction: float
    cache: CacheKind
    overlap: bool
    attention_backend: str
    cuda_graph_max_batch: int | None
    cuda_graph_max_tokens: int
    speculative: SpeculativeChoice
    draft_model: str | None
    dummy_weights: bool
    audit: bool


class PooledOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a model that does not generate."""

    task: Task
    size: int
    """Numbers of an output."""
    labels: tuple[str, ...] = ()
    """Names of the numbers of a classifier's output."""
    whole_texts: bool = False
    """A text is computed in one step, without the prefix cache."""


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a started engine that its scheduler needs."""

    num_pages: Count
    page_size: Count
    window: Count | None = None
    """Longest window of the layers that have one, whose pages are others than those of the rest; None: all layers have
    the same pages, since none has a window."""
    num_window_pages: Index = 0
    """Pages of layers with a window."""
    state_checkpoints: Index | None = None
    """Places for recurrent states behind cached prefixes, where sequences can begin; None: no layer has a state."""
    checkpoints_per_row: Count = 1
    """Further ones in the place of a row that is not in use."""
    max_running: Rows
    max_model_len: Count
    vocab_size: Count
    eos_token_ids: tuple[int, ...] = ()
    step_graphs: tuple[tuple[int, int], ...] = ()
    """Decode rows and prompt tokens of steps with prompts that are CUDA graphs. A step is padded to the first that is
    large enough; without one it is launched kernel by kernel."""
    pooling: PooledOutput | None = None
    """None: the model generates."""
    most_drafts: Index = 0
    """Most drafts of a row in a step; 0: the engine does not speculate."""
    max_decode_rows: Index = 0
    """Most decode rows of a step, if drafts make them more than `max_running`."""


class SchedulerConfig(EngineSizes, frozen=True, kw_only=True):
    """Configuration of the scheduler for the engine that was started."""

    max_step_tokens: Count
    target_itl_ms: Milliseconds = 0.0
    """See `EngineConfig.target_itl_ms`."""
    overlap: bool
    cache: CacheKind
    max_waiting: Count = 1 << 20
    """Maximum number of requests that wait for a row; one more is rejected with `queue_full`."""
    audit: bool = False
    audit_seed: int = 0


def engine_config(model: str, options: Mapping[str, object]) -> EngineConfig:
    """Configuration of rank 0 on a CPU, from options by name. Raises ConfigError that names the option."""
    known = {each.name: each for each in options_of(EngineConfig(model=model))}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{name}: unknown option; did you mean {closest(name, known)}?")
        # None stands for the default of an option that has one.
        if (choices := known[name].choices) and value is not None and value not in choices:
            raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {value!r:.60}")
    return _convert({"model": model, **options}, EngineConfig)


def checked(config: Config) -> Config:
    """`config`, if every field has the type and range that it declares. Raises ConfigError."""
    # Not `msgspec.structs.fields`: it evaluates all annotations, and `LLM` checks the parameters of every request.
    names = zip(config.__struct_fields__, config.__struct_encode_fields__, strict=True)
    return _convert({encoded: getattr(config, name) for name, encoded in names}, type(config))


def _convert(values: Mapping[str, Any], kind: type[Config]) -> Config:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise ConfigError(f"{name}: {what[:1].lower()}{what[1:]}: {values.get(name)!r:.60}") from error
