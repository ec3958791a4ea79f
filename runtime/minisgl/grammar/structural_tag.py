"""Structural tags: text with structured parts, in the forms that vLLM and SGLang accept.

The newer form is a tree of formats in `format`. The older one has `structures` with `begin`, `schema` and `end`, which
begin where the text contains one of `triggers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.ebnf import to_lark
from minisgl.grammar.lark import Fragment
from minisgl.grammar.schema.refusals import Path

MAX_DEPTH: Final = 16
MAX_REPEATS: Final = 1000

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=0, le=MAX_REPEATS)]
_Some = Annotated[list[_T], Meta(min_length=1, max_length=4096)]
_Text = Annotated[str, Meta(min_length=1)]


class ConstString(msgspec.Struct, tag="const_string", forbid_unknown_fields=True):
    value: str


class JsonSchema(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool


class AnyText(msgspec.Struct, tag="any_text", forbid_unknown_fields=True):
    excludes: list[_Text] = []
    excluded_str: list[_Text] = []
    """Another name of `excludes`."""


class Grammar(msgspec.Struct, tag="grammar", forbid_unknown_fields=True):
    grammar: str


class Regex(msgspec.Struct, tag="regex", forbid_unknown_fields=True):
    pattern: str


class Series(msgspec.Struct, tag="sequence", forbid_unknown_fields=True):
    elements: _Some[Format]


class Or(msgspec.Struct, tag="or", forbid_unknown_fields=True):
    elements: _Some[Format]


class Optional(msgspec.Struct, tag="optional", forbid_unknown_fields=True):
    content: Format


class Plus(msgspec.Struct, tag="plus", forbid_unknown_fields=True):
    content: Format


class Star(msgspec.Struct, tag="star", forbid_unknown_fields=True):
    content: Format


class Repeat(msgspec.Struct, tag="repeat", forbid_unknown_fields=True):
    content: Format
    min: _Count = 0
    max: _Count | None = None
    """None: any number."""


class Tag(msgspec.Struct, tag="tag", forbid_unknown_fields=True):
    begin: str
    content: Format
    end: str | _Some[str]


class ListedTag(msgspec.Struct, forbid_unknown_fields=True):
    """A tag in a list, where `type` may be left out."""

    begin: str
    content: Format
    end: str | _Some[str]
    type: str = "tag"


class TriggeredTags(msgspec.Struct, tag="triggered_tags", forbid_unknown_fields=True):
    triggers: _Some[_Text]
    tags: _Some[ListedTag]
    at_least_one: bool = False
    """The answer begins with a tag."""
    stop_after_first: bool = False


class TagsWithSeparator(msgspec.Struct, tag="tags_with_separator", forbid_unknown_fields=True):
    tags: _Some[ListedTag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | AnyText
    | Grammar
    | Regex
    | Series
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct):
    """The whole definition. Either `format`, or `structures` and `triggers`."""

    type: str = "structural_tag"
    format: Format | None = None
    structures: _Some[Structure] | None = None
    triggers: _Some[_Text] | None = None


_decoder: Final = msgspec.json.Decoder(StructuralTag)


def structural_tag(definition: str, name: str, added_tokens: Mapping[str, int]) -> Fragment:
    """Return a definition in JSON as a fragment; `name` begins the names of its rules. A text that begins or ends a tag
    also matches the token in `added_tokens` with this text. Raises GrammarError."""
    decoded = _decoded(definition)
    format = decoded.format
    if decoded.structures is not None and decoded.triggers is not None and format is None:
        tags = [ListedTag(part.begin, JsonSchema(part.schema), part.end) for part in decoded.structures]
        format = TriggeredTags(decoded.triggers, tags)
    if format is None:
        raise GrammarError("invalid_grammar", "a structural tag has `format`, or `structures` and `triggers`")
    writer = _Writer(name, added_tokens)
    start = writer.write(format, MAX_DEPTH)
    rules = "\n".join([f"start: {start}", f"TEXT: {lark.ANY_TEXT}", *writer.rules])
    return Fragment(f"@{name}", ((name, rules), *writer.grammars))


def parts(definition: str) -> Iterator[tuple[Path, Regex | Grammar]]:
    """Yield the regular expressions and grammars of a definition, with their paths. Raises GrammarError."""
    format = _decoded(definition).format
    if format is not None:
        yield from _parts(format, ("format",))


def _parts(format: msgspec.Struct, path: Path) -> Iterator[tuple[Path, Regex | Grammar]]:
    if isinstance(format, Regex | Grammar):
        yield (*path, format.__struct_fields__[0]), format
    for name in format.__struct_fields__:
        value = getattr(format, name)
        if isinstance(value, msgspec.Struct):
            yield from _parts(value, (*path, name))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if isinstance(one, msgspec.Struct):
                    yield from _parts(one, (*path, name, i))


def _decoded(definition: str) -> StructuralTag:
    try:
        return _decoder.decode(definition)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError("invalid_grammar", f"the structural tag is not valid: {error}") from None


class _Writer:
    """Collects the rules of one definition."""

    def __init__(self, name: str, added_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.grammars: list[tuple[str, str]] = []
        self._name = name
        self._tokens = sorted(added_tokens.items(), key=lambda token: -len(token[0]))

    def write(self, format: Format, depth: int) -> str:
        """Return the expression of a format."""
        if depth == 0:
            raise GrammarError("grammar_too_complex", f"the structural tag is nested more than {MAX_DEPTH} deep")
        match format:
            case ConstString(value):
                return self._text(value)
            case JsonSchema(schema):
                return lark.json_schema(schema)
            case AnyText():
                return self._any_text(format)
            case Grammar(text):
                name = f"{self._name}_{len(self.grammars)}"
                self.grammars.append((name, to_lark(text)))
                return f"@{name}"
            case Regex(pattern):
                return lark.regex(pattern)
            case Series(elements):
                return "(" + " ".join(self.write(element, depth - 1) for element in elements) + ")"
            case Or(elements):
                return lark.one_of([self.write(element, depth - 1) for element in elements])
            case Optional(content):
                return f"({self.write(content, depth - 1)})?"
            case Plus(content):
                return f"({self.write(content, depth - 1)})+"
            case Star(content):
                return f"({self.write(content, depth - 1)})*"
            case Repeat(content, least, most):
                if most is not None and most < least:
                    raise GrammarError("invalid_grammar", f"a repeat has min {least} above max {most}")
                return f"({self.write(content, depth - 1)}){{{least},{'' if most is None else most}}}"
            case Tag(begin, content, end):
                return f"({self._text(begin)} {self._closed(content, end, depth)})"
            case TriggeredTags():
                return self._triggered(format, depth)
            case TagsWithSeparator():
                tags = lark.one_of([self._listed(tag, tag.begin, depth) for tag in format.tags])
                more = "" if format.stop_after_first else f" ({self._text(format.separator)} {tags})*"
                return f"({tags}{more})" if format.at_least_one else f"({tags}{more})?"

    def _triggered(self, format: TriggeredTags, depth: int) -> str:
        after_text: list[str] = []
        at_once: list[str] = []
        heads = {trigger: self._rule(f"TEXT {lark.literal(trigger)}", "[lazy]") for trigger in format.triggers}
        for tag in format.tags:
            trigger = next((trigger for trigger in format.triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError("invalid_grammar", f"the tag {tag.begin!r} begins with none of the triggers")
            rest = self._rule(self._listed(tag, tag.begin.removeprefix(trigger), depth))
            at_once.append(f"{lark.literal(trigger)} {rest}")
            after_text.append(f"{heads[trigger]} {rest}")
            if (token := self._token_at(tag.begin)) is not None:
                special = f"{lark.special_token(token[1])} {self._listed(tag, tag.begin[len(token[0]) :], depth)}"
                at_once.append(special)
                after_text.append(f"TEXT? {special}")
        first, later = lark.one_of(at_once), lark.one_of(after_text)
        if format.stop_after_first:
            return first if format.at_least_one else f"({later} | TEXT)"
        return f"({first if format.at_least_one else ''} {later}* TEXT?)"

    def _listed(self, tag: ListedTag, begin: str, depth: int) -> str:
        return f"({self._text(begin)} {self._closed(tag.content, tag.end, depth)})"

    def _closed(self, content: Format, end: str | Sequence[str], depth: int) -> str:
        """Return the expression of content up to its end, which free text does not contain."""
        ends = [end] if isinstance(end, str) else list(end)
        if not isinstance(content, AnyText):
            return f"{self.write(content, depth - 1)} {lark.one_of([self._text(text) for text in ends])}"
        text = self._any_text(content)
        ways = [self._rule(f"{text} {lark.literal(one)}", "[lazy]") if one else text for one in ends]
        tokens = [token for one in ends if (token := self._token_at(one)) is not None]
        ways += [f"{text}? {lark.special_token(token)}" for _, token in tokens]
        return lark.one_of(ways)

    def _any_text(self, format: AnyText) -> str:
        excluded = [*format.excludes, *format.excluded_str]
        if not excluded:
            return "TEXT"
        name = f"TEXT_{len(self.rules)}"
        texts = " | ".join(lark.literal(text) for text in excluded)
        self.rules.append(f"{name}: TEXT & ~(TEXT ({texts}) TEXT)")
        return name

    def _text(self, text: str) -> str:
        """Return the expression of a text, of which added tokens may be parts."""
        parts: list[str] = []
        plain = ""
        while text:
            token = self._token_at(text)
            if token is None:
                plain, text = plain + text[0], text[1:]
                continue
            if plain:
                parts.append(lark.literal(plain))
            name, token_id = token
            parts.append(lark.one_of([lark.special_token(token_id), lark.literal(name)]))
            plain, text = "", text[len(name) :]
        if plain or not parts:
            parts.append(lark.literal(plain))
        return " ".join(parts)

    def _token_at(self, text: str) -> tuple[str, int] | None:
        """Return the longest added token that the text begins with."""
        return next((token for token in self._tokens if text.startswith(token[0])), None)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name
