"""Model configuration from a Hugging Face checkpoint's config.json and generation_config.json, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from minisgl.attention.state_shape import StateShape
from minisgl.config import DEFAULT_PAGE_SIZE, TEXT_PAGE_SIZE, Device, DType, EngineConfig
from minisgl.errors import ModelError
from minisgl.json_file import read_json_object
from minisgl.kv_layout import KVLayout
from minisgl.layers.weights.formats import (
    Quantization,
    read_quantization,
    refuse_modelopt,
    requested_quantization,
    unsupported_quantization,
)
from minisgl.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    Mamba2Config,
    MoeConfig,
    Recurrence,
    attentions,
    kv_layers,
    recurrences,
)
from minisgl.models.encoder_config import EncoderConfig
from minisgl.models.families import ENCODERS, FAMILIES, MISSING, Family, family_of
from minisgl.models.families.common import MAX_POSITIONS, max_positions
from minisgl.models.fields import Fields
from minisgl.models.overrides import override
from minisgl.models.score_fields import Scores, read_scores


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer."""

    architecture: str
    hidden_size: int
    vocab_size: int
    body: DecoderConfig | EncoderConfig
    """What the model is made of."""
    has_lm_head: bool = True
    """It has an output head over the vocabulary, and so it can generate text."""
    scores: Scores | None = None
    """What a model with a head of its own for scores or classes makes of texts."""
    max_position_embeddings: int
    dtype: Literal["float32", "bfloat16", "float16"]
    """Element type of the checkpoint; if config.json names none, bfloat16, or float32 of an encoder."""
    eos_token_ids: tuple[int, ...]
    """All tokens that end an answer: those of generation_config.json, then those of config.json."""
    dual_chunk_after: int | None = None
    """Tokens up to which attention is plain; longer sequences need dual chunk attention, which is not supported."""
    quantization: Quantization | None = None
    """Quantization of the checkpoint's weights."""

    @property
    def decoder(self) -> DecoderConfig:
        """The body of a decoder. Encoders have none."""
        assert isinstance(self.body, DecoderConfig)
        return self.body

    @property
    def encoder(self) -> EncoderConfig | None:
        """The body of an encoder; None: the model is a decoder."""
        return self.body if isinstance(self.body, EncoderConfig) else None

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Layers of a decoder; an encoder has none of this kind."""
        return self.body.layers if isinstance(self.body, DecoderConfig) else ()

    @property
    def num_layers(self) -> int:
        return len(self.body.layers)

    @property
    def attention(self) -> AttentionConfig:
        """That of the first layer with keys and values."""
        return self.attentions[0]

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Attention of the layers with keys and values."""
        if isinstance(self.body, EncoderConfig):
            return tuple(layer.attention for layer in self.body.layers)
        return tuple(attentions(self.body.layers))

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """What the layers with a recurrent state have in place of attention."""
        return tuple(recurrences(self.layers))

    def state_shapes(self, ranks: int = 1) -> list[StateShape]:
        """State of each layer that has one, on one of `ranks` ranks."""
        return [of.state_shape(ranks) for of in self.recurrences]

    @property
    def is_causal(self) -> bool:
        """No token attends to later ones."""
        return all(of.causal for of in self.attentions)

    @property
    def moe(self) -> MoeConfig | None:
        """Experts of the layers that have some, the same in all of them."""
        return next((moe for layer in self.layers if (moe := layer.moe)), None)

    def dtype_on(self, device: Device, choice: DType = "auto") -> Literal["float32", "bfloat16", "float16"]:
        """Data type of weights and KV cache. `auto` is the checkpoint's, but float32 on a CPU, and on a GPU bfloat16
        for float32, which would take twice the memory and has no fast attention, and for quantized weights, whose
        kernels compute in it: AWQ and GPTQ checkpoints are usually float16."""
        if choice != "auto":
            return choice
        if device == "cpu":
            return "float32"
        return "bfloat16" if self.dtype == "float32" or self.quantization is not None else self.dtype

    def kv_numbers_per_token(self, ranks: int = 1) -> int:
        """Numbers of the keys and values of a token, in all layers of one of `ranks` ranks."""
        return sum(_kv_numbers(self.attentions[layer], ranks) for layer in {*self.kv_layers})

    def page_size(self, config: EngineConfig) -> int:
        """Tokens of a page of the KV cache."""
        # Checkpoints of states lie 64 tokens apart: requests that begin at one could not share smaller pages behind it.
        return config.page_size or (64 if self.recurrences else DEFAULT_PAGE_SIZE[config.device])

    def text_page_size(self, config: EngineConfig) -> int:
        """`page_size` where texts are pooled. A hundred documents begin with the same instruction and query, and each
        of them computes what these have behind their last whole page; no row decodes, which is faster from large
        pages."""
        page = self.page_size(config)
        # A given number of pages was chosen for the usual ones. Prompts behind windows are read in whole pages.
        keeps = config.page_size or config.num_pages or self.recurrences or any(of.window for of in self.attentions)
        return page if keeps else min(page, TEXT_PAGE_SIZE)

    def kv_layout(self, config: EngineConfig, max_model_len: int) -> KVLayout:
        """What the pages of the KV cache take on one rank of an engine that serves sequences of up to `max_model_len`
        tokens."""
        wide = self.dtype_on(config.device, config.dtype) == "float32"
        page_size = self.page_size(config)
        activation_bytes = 4 if wide else 2
        number_bytes = 1 if config.kv_cache_dtype == "fp8" else activation_bytes
        full, in_window, windows = 0, 0, [0]
        for of in (self.attentions[layer] for layer in {*self.kv_layers}):
            size = page_size * number_bytes * _kv_numbers(of, config.tensor_parallel)
            # A window that no sequence exceeds releases nothing.
            if of.window is None or of.window >= max_model_len:
                full += size
            else:
                in_window += size
                windows.append(of.window)
        shapes = self.state_shapes(config.tensor_parallel)
        return KVLayout(
            page_size=page_size,
            full_bytes=full,
            window_bytes=in_window,
            window=max(windows) or None,
            state_bytes=sum(of.row_bytes(activation_bytes) for of in shapes),
            checkpoints_per_row=shapes[0].checkpoints_per_row(activation_bytes) if shapes else 1,
            caches_states=config.cache == "radix",
            max_model_len=max_model_len,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
        )

    @property
    def kv_layers(self) -> list[int]:
        """See `decoder_config.kv_layers`."""
        return kv_layers(self.layers)

    @property
    def kv_layer_numbers(self) -> list[int]:
        """`kv_layers` as numbers of layers of the model."""
        numbers = [number for number, each in enumerate(self.layers) if isinstance(each.attention, AttentionConfig)]
        return [numbers[layer] for layer in self.kv_layers]

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the position embedding supports."""
        # Qwen's instructions add yarn to config.json and leave max_position_embeddings at the pre-training length.
        ropes = {of.rope for of in self.attentions} - {None}
        extended = [int(rope.factor * rope.original_max_position) for rope in ropes if rope and rope.kind == "yarn"]
        # Tables of learned positions may begin with rows for padding.
        unused = 0 if self.encoder is None else self.encoder.first_position
        return max([self.max_position_embeddings - unused, *extended])

    def check_length(self, max_model_len: int) -> None:
        """Raise ModelError if sequences of `max_model_len` tokens need attention that is not supported."""
        if self.dual_chunk_after is not None and max_model_len > self.dual_chunk_after:
            raise ModelError(
                "dual_chunk_attention",
                f"sequences of more than {self.dual_chunk_after} tokens need the model's dual chunk attention, which "
                f"is not supported; start with --max-model-len {self.dual_chunk_after} or less (it is {max_model_len})",
            )

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ModelError if the model cannot be split over `size` ranks; the message lists sizes that fit."""
        if not self._splits(size):
            heads, kv_heads, feed_forward = (" and ".join(map(str, sizes)) for sizes in self._split_sizes())
            groups = {of.num_groups for of in self.recurrences if isinstance(of, Mamba2Config)}
            in_groups = f" in {' and '.join(map(str, groups))} groups" if groups else ""
            raise ModelError(
                "tensor_does_not_divide",
                f"{heads} attention heads{in_groups}, {kv_heads} KV heads and feed-forward size {feed_forward} "
                f"cannot be split over {size} ranks; use --tp with one of "
                + ", ".join(map(str, self.tensor_parallel_sizes())),
            )

    def tensor_parallel_sizes(self) -> list[int]:
        """Tensor-parallel sizes that the model can be split over, ascending."""
        return [size for size in range(1, self.attention.num_heads + 1) if self._splits(size)]

    def _splits(self, size: int) -> bool:
        heads, kv_heads, feed_forward = self._split_sizes()
        groups = [of.num_groups for of in self.recurrences if isinstance(of, Mamba2Config)]
        kv_split = all(count % size == 0 or size % count == 0 for count in (*kv_heads, *groups))
        return kv_split and math.gcd(*heads, *feed_forward) % size == 0

    def _split_sizes(self) -> tuple[list[int], list[int], list[int]]:
        """Numbers of query heads and KV heads, and intermediate sizes, of all layers, those of experts first."""
        blocks, parts = self.attentions, [part for layer in self.body.layers if (part := layer.feed_forward)]
        experts = [moe for layer in self.layers if (moe := layer.moe)]
        shared = [part.shared for part in experts if part.shared is not None]
        recurrent = [of.parts for of in self.recurrences]
        every = (
            [*(of.num_heads for of in blocks), *recurrent],
            [of.num_kv_heads for of in blocks],
            [part.intermediate_size for part in (*experts, *parts, *shared)],
        )
        heads, kv_heads, feed_forward = (list(dict.fromkeys(sizes)) for sizes in every)
        return heads, kv_heads, feed_forward

    @staticmethod
    def read(
        directory: str | Path, overrides: Mapping[str, Any] | None = None, quantization: str | None = None
    ) -> ModelConfig:
        """Read a checkpoint directory. `overrides`: changes of config.json, see `overrides.override`; `quantization`:
        format in which to quantize the weights. Raises ModelError with the problem and the remedy."""
        folder = Path(directory)
        if not folder.is_dir():
            raise ModelError("model_not_found", f"{folder} is not a directory; give that of a downloaded checkpoint")
        if not (folder / "config.json").is_file():
            if any(folder.glob("*.gguf")):
                raise unsupported_quantization("GGUF")
            raise ModelError(
                "config_not_found",
                f"{folder} has no config.json; give the directory of a Hugging Face checkpoint, the one that holds "
                "config.json and *.safetensors",
            )
        config = read_json(folder / "config.json")
        modelopt = folder / "hf_quant_config.json"
        if config.get("quantization_config") is None and modelopt.is_file():
            refuse_modelopt(read_json(modelopt))
        generation = folder / "generation_config.json"
        settings = read_json(generation) if generation.is_file() else None
        try:
            parsed = ModelConfig.parse(config, settings, overrides, quantization)
            longest = parsed.max_model_len
        except ArithmeticError as error:
            raise ModelError(
                "invalid_config", f"config.json: its numbers are out of range ({error}); download the file again"
            ) from error
        if longest > MAX_POSITIONS:
            raise ModelError(
                "invalid_config", f"config.json: sequences of {longest} tokens; at most {MAX_POSITIONS} are supported"
            )
        return parsed

    @staticmethod
    def parse(
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        quantization: str | None = None,
    ) -> ModelConfig:
        """Parse the contents of config.json, with `overrides`, and generation_config.json. `quantization`: format in
        which to quantize the weights, see `requested_quantization`."""
        if overrides:
            config = override(config, overrides)
        name, family = _family(config)
        config = _with_aliases(config, family.aliases)
        scores = read_scores(config, family.head(Fields(config))) if family.head is not None else None
        config = _text_config(config)
        stored = read_quantization(config)
        if quantization is not None:
            stored = requested_quantization(quantization, stored)
        fields = Fields(config)
        return ModelConfig(
            architecture=name,
            hidden_size=fields.count("hidden_size"),
            vocab_size=fields.count("vocab_size"),
            body=family.read(fields),
            has_lm_head=family.has_lm_head,
            scores=scores,
            max_position_embeddings=max_positions(fields),
            # Encoders' files that name none are older than 16-bit checkpoints.
            dtype=_dtype(config, "bfloat16" if name not in ENCODERS else "float32"),
            eos_token_ids=_eos_token_ids(generation or {}, config),
            dual_chunk_after=_dual_chunk_after(config),
            quantization=stored,
        )


def _kv_numbers(attention: AttentionConfig, ranks: int) -> int:
    """Numbers of the keys and values of a token in a layer."""
    return 2 * max(1, attention.num_kv_heads // ranks) * attention.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError when the file is not one."""
    try:
        return read_json_object(path)
    except (ValueError, OSError) as error:
        raise ModelError("malformed_json", f"{path} cannot be read: {error}; download the file again") from error


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The supported one of `architectures`, and its family."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError("invalid_config", f"config.json: architectures is {names!r:.80}, not a list of names")
    for name in names:
        if isinstance(name, str) and (family := family_of(name)) is not None:
            return name, family
    lacks = next((f", which needs {MISSING[each]}," for each in map(str, names) if each in MISSING), "")
    raise ModelError(
        "unsupported_architecture",
        f"architecture {', '.join(map(str, names[:10])) or '(none given)':.500}{lacks} is not supported; supported are "
        + ", ".join((*FAMILIES, *ENCODERS)),
    )


def _with_aliases(config: Mapping[str, Any], aliases: Mapping[str, tuple[str, ...]]) -> Mapping[str, Any]:
    """Fields by our names, where the file has others."""
    if not aliases:
        return config
    found = {
        name: next((config[other] for other in others if config.get(other) is not None), None)
        for name, others in aliases.items()
        if config.get(name) is None
    }
    return {**config, **{name: value for name, value in found.items() if value is not None}}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the text model, which multimodal checkpoints keep in an object of their own. What stands beside it is
    about the whole checkpoint."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise ModelError("invalid_config", f"config.json: text_config is {text!r:.80}, not an object")
    whole = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    beside = {name: config[name] for name in whole if config.get(name) is not None}
    return {**beside, **{name: value for name, value in text.items() if value is not None or name not in beside}}


def _dtype(config: Mapping[str, Any], default: str) -> Literal["float32", "bfloat16", "float16"]:
    name = config.get("dtype") or config.get("torch_dtype") or default
    match str(name).removeprefix("torch."):
        case "float32":
            return "float32"
        case "bfloat16":
            return "bfloat16"
        case "float16":
            return "float16"
    raise ModelError("unsupported_dtype", f"config.json: dtype {name!r:.80} is not one of float32, bfloat16, float16")


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**31:
                ids[token] = None
            elif token is not None:
                raise ModelError(
                    "invalid_config", f"eos_token_id {value!r:.80} is neither a token id nor a list of them"
                )
    return tuple(ids)


def _dual_chunk_after(config: Mapping[str, Any]) -> int | None:
    """Length of the model's plain pre-training, behind which it needs dual chunk attention; None: it never does."""
    parameters = config.get("dual_chunk_attention_config")
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ModelError(
            "invalid_config", f"config.json: dual_chunk_attention_config is {parameters!r:.80}, not an object or null"
        )
    fields = Fields(parameters)
    original = "original_max_position_embeddings"
    return fields.count("chunk_size" if parameters.get(original) is None else original)
