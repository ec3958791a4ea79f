"""The tokenizer files of a checkpoint directory, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from minisgl.errors import TokenizerError
from minisgl.json_file import MAX_FILE_BYTES, check_size, read_json_object
from minisgl.tokenizer.file_hashes import TOOL_TEMPLATE, hash_tokenizer_files
from minisgl.tokenizer.tekken import restore_tekken_pattern
from minisgl.wire.text import SamplingDefaults

MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Largest tokenizer.json. Those of vocabularies of 262,144 tokens have 33 MB."""

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_REMEDY: Final = (
    "download the complete checkpoint, or write the file with transformers: "
    "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)"
)


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of generation_config.json that are defaults of requests. The ranges are those that the scheduler
    accepts: a default outside of them would fail every request that leaves the field out."""

    temperature: Annotated[float, Meta(ge=0, le=1e5)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None


class TextPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """What sentence-transformers does with a text before it is encoded."""

    by_name: dict[str, str] = {}
    """Prompts that precede a text, by name."""
    default: str = ""
    """Name of the prompt of texts without one; empty: none."""
    lower_case: bool = False
    """Texts are turned into lower case."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the tokenizer files of a checkpoint."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token` …, under the names in the chat template; absent where the model has none."""
    chat_template: str | None
    tool_template: str | None
    """Template of chats with tools; None where the checkpoint has one template for all chats."""
    add_bos_token: bool | None
    """Explicit setting, which overrides tokenizer.json; None: not set."""
    add_eos_token: bool = False
    """Explicit setting that an EOS follows a text; only texts that are pooled get one."""
    text_prompts: TextPrompts = TextPrompts()
    defaults: SamplingDefaults
    hashes: dict[str, str]

    @property
    def template_text(self) -> str:
        """All templates, to search for what they contain."""
        return "\n".join(template for template in (self.chat_template, self.tool_template) if template)


def load_model_files(directory: str | Path) -> ModelFiles:
    """Read the tokenizer files of a checkpoint. Raises TokenizerError where one is missing or broken."""
    root = Path(directory)
    config = _read_json(root / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(root / "special_tokens_map.json"), config)
    add_bos_token = config.get("add_bos_token")
    templates = _chat_templates(root, config)
    return ModelFiles(
        tokenizer=_load_tokenizer(root),
        special_tokens=special_tokens,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        add_bos_token=add_bos_token if isinstance(add_bos_token, bool) else None,
        add_eos_token=config.get("add_eos_token") is True,
        text_prompts=_text_prompts(root),
        defaults=_sampling_defaults(root / "generation_config.json"),
        hashes=hash_tokenizer_files(root),
    )


def _load_tokenizer(root: Path) -> Tokenizer:
    path = root / "tokenizer.json"
    if not path.is_file():
        if (root / "tekken.json").is_file():
            raise TokenizerError(
                "tokenizer_missing",
                f"{root} has Mistral's tekken.json but no tokenizer.json: convert it with transformers and "
                "mistral-common (AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)), and put a "
                "chat_template.jinja beside it, or serve a copy of the model that has both",
            )
        if (root / "tokenizer.model").is_file():
            raise TokenizerError(
                "tokenizer_missing",
                f"{root} has only a sentencepiece tokenizer.model, which is not supported: {_REMEDY}",
            )
        raise TokenizerError("tokenizer_missing", f"{path} does not exist: {_REMEDY}")
    try:
        check_size(path, MAX_TOKENIZER_BYTES)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError("tokenizer_broken", f"{path} cannot be read ({error}): {_REMEDY}") from error
    # Both are settings from training that some checkpoints contain; they would cut or lengthen prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    restore_tekken_pattern(tokenizer)
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except (ValueError, OSError) as error:
        raise TokenizerError("tokenizer_broken", f"{path} cannot be read ({error}): {_REMEDY}") from error


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKENS:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _chat_templates(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name; separate files override tokenizer_config.json, as in transformers."""
    files = {"default": root / "chat_template.jinja", "tool_use": root / TOOL_TEMPLATE}
    separate = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    if "default" in separate:
        return separate
    given = _read_json(root / "chat_template.json").get("chat_template", config.get("chat_template"))
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {str(name): template for name, template in named.items() if isinstance(template, str)} | separate


def _read_template(path: Path) -> str:
    try:
        check_size(path, MAX_FILE_BYTES)
        return path.read_text("utf-8")
    except (ValueError, OSError) as error:
        raise TokenizerError("tokenizer_broken", f"{path} cannot be read ({error}): {_REMEDY}") from error


class _SentencePrompts(msgspec.Struct):
    """Fields of config_sentence_transformers.json."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class _SentenceCase(msgspec.Struct):
    """Field of sentence_bert_config.json."""

    do_lower_case: bool | None = None


def _text_prompts(root: Path) -> TextPrompts:
    named = _converted(root / "config_sentence_transformers.json", _SentencePrompts)
    prompts = {name: prompt or "" for name, prompt in (named.prompts or {}).items()}
    default = named.default_prompt_name or ""
    if default and default not in prompts:
        path = root / "config_sentence_transformers.json"
        raise TokenizerError(
            "tokenizer_broken",
            f"{path}: default_prompt_name is {default!r}, which is none of its prompts "
            f"({', '.join(sorted(prompts)) or 'it has none'}): correct the name, or remove it",
        )
    case = _converted(root / "sentence_bert_config.json", _SentenceCase)
    return TextPrompts(by_name=prompts, default=default, lower_case=bool(case.do_lower_case))


_T = TypeVar("_T", bound=msgspec.Struct)


def _converted(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(_read_json(path), kind)
    except msgspec.ValidationError as error:
        raise TokenizerError("tokenizer_broken", f"{path}: {error}. Correct the value, or remove it") from error


def _sampling_defaults(path: Path) -> SamplingDefaults:
    try:
        given = msgspec.convert(_read_json(path), GenerationConfig)
    except msgspec.ValidationError as error:
        raise TokenizerError(
            "generation_config_broken",
            f"{path}: {error}. Correct the value, or remove it to use minisgl's default",
        ) from error
    values = msgspec.structs.asdict(given)
    return SamplingDefaults(**{name: value for name, value in values.items() if value is not None})
