"""Jinja source of a chat template, compiled and rendered in a sandbox as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minisgl.errors import PromptError

MAX_RENDERED_CHARACTERS: Final = 32 << 20
"""Longest text that a template may make, in characters."""

_MAX_ERROR_CHARACTERS: Final = 300


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; only its body is rendered here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's way)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """`namespace()` that cannot be used to reach the internals of Python objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter: templates may write namespace(self=…).
        self = args[0]
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # A function in place of the class: a template sees no attributes of it.
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML characters and non-ASCII letters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class CompiledTemplate:
    """A template that cannot be compiled fails each chat request, not the process: completions still work."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.variables: frozenset[str] = frozenset()
        """Names of the variables that the template reads without setting them before."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_PublicNamespace
        )
        self._template: jinja2.Template | None = None
        self._error = ""
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except RecursionError:
            self._error = "it is nested too deeply"
        except Exception as error:  # the compilers of Jinja and Python can fail in any way for odd sources
            self._error = _short(error)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text for these values of the variables. Raises PromptError."""
        if self._template is None:
            raise PromptError(
                "chat_template_error",
                f"the model's chat template cannot be compiled ({self._error}): fix it, or use /v1/completions",
            )
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise PromptError(
                        "chat_template_error",
                        f"the model's chat template renders these messages to more than {MAX_RENDERED_CHARACTERS} "
                        "characters; send less",
                        "messages",
                    )
                pieces.append(piece)
        except (PromptError, MemoryError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise PromptError(
                "chat_template_error",
                f"the model's chat template does not accept these messages: {_short(error)}",
                "messages",
            ) from error
        return "".join(pieces)


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARACTERS else text[:_MAX_ERROR_CHARACTERS] + "…"
