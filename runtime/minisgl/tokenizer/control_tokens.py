"""Keeps user text from being parsed as control tokens (prompt injection).

A template puts control tokens (`<|im_end|>`) around contents, and the tokenizer then finds them by their text. A
content that contains one could end its turn and begin another in any role. Contents are therefore escaped before they
are rendered: a mark, a character that the request does not contain, is inserted behind the first character of
everything in a content that is a control token or could become one together with its neighbours. After rendering, the
marks are removed and their positions kept. A control token that spans a mark comes, at least in part, from a content:
the text is cut there and the parts are encoded one by one, which gives ordinary tokens for the same characters. Where
nothing is injected, which is nearly always, the tokens are exactly those of the rendered text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from tokenizers import Encoding, Tokenizer

from minisgl.wire.text import ChatMessage, ToolOptions

_MARKS: Final = range(0xE000, 0xF900)
"""Private use characters: no template treats them as space, and they have no upper or lower case."""

_FIELDS: Final = ("name", "content", "reasoning", "tool_call_id", "tool_calls")
"""Fields of a message that contain text of the client."""


class EscapedChat(msgspec.Struct, frozen=True):
    messages: Sequence[ChatMessage]
    tools: ToolOptions | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    mark: str
    """Character that is inserted as a mark; empty when no content needs one."""


class RenderedChat(msgspec.Struct, frozen=True):
    text: str
    marks: Sequence[int] = ()
    """Ascending positions in `text`. A control token that begins before one and ends behind it is injected."""


class ControlTokens:
    """Control tokens of a checkpoint: the special ones, and others that the chat template contains, because some
    checkpoints do not flag the tokens around turns as special."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        control = {
            token_id: token
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            # A token of one character has no position to cut at; no checkpoint has such a control token.
            if len(token.content.strip()) > 1 and (token.special or token.content in template)
        }
        self._ids = frozenset(control)
        # Splits a text like any control token, without stripping spaces around it.
        self._separator = next((token.content for token in control.values() if not (token.lstrip or token.rstrip)), "")
        self._all = _ControlTokenFinder(token.content for token in control.values())
        # Earlier answers of the model may contain markers that the template looks for, such as `</think>` to drop old
        # reasoning. Only markers that are not special, and only in the assistant's turns.
        self._assistant = _ControlTokenFinder(
            token.content for token in control.values() if token.special or not _looks_for(template, token.content)
        )

    def escape(
        self,
        messages: Sequence[ChatMessage],
        tools: ToolOptions | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> EscapedChat:
        """Return the chat with a mark wherever a control token could be injected. `variables`: those of the request,
        which a template may insert like contents."""
        definitions = () if tools is None else tools.definitions
        texts = {text for part in (definitions, documents, [*variables.values()]) for text in _texts(part)}
        texts |= {text for message in messages for text in _texts(_fields(message))}
        if not any(self._all.positions(text) for text in texts):
            return EscapedChat(messages, tools, documents, dict(variables), "")
        mark = _unused_character(texts)

        def escaped(value: Any, finder: _ControlTokenFinder) -> Any:
            return _mapped(value, lambda text: _insert(text, finder.positions(text), mark))

        return EscapedChat(
            [self._escaped(message, escaped) for message in messages],
            None if tools is None else replace(tools, definitions=tuple(escaped(list(definitions), self._all))),
            escaped(documents, self._all),
            {name: escaped(value, self._all) for name, value in variables.items()},
            mark,
        )

    def _escaped(self, message: ChatMessage, escaped: Callable[[Any, _ControlTokenFinder], Any]) -> ChatMessage:
        finder = self._assistant if message.role == "assistant" else self._all
        return replace(
            message,
            content=escaped(message.content, finder),
            **{name: escaped(getattr(message, name), self._all) for name in _FIELDS if name != "content"},
        )

    def unescape(self, rendered: str, mark: str) -> RenderedChat:
        """Remove the marks from a rendered text and keep their positions."""
        if not mark or mark not in rendered:
            return RenderedChat(rendered)
        pieces = rendered.split(mark)
        return RenderedChat("".join(pieces), [*accumulate(map(len, pieces[:-1]))])

    def encode(self, chat: RenderedChat) -> list[int]:
        """Return the token ids of the text; only the template's own control tokens become ones."""
        return self._encode_pieces([_Piece(chat.text, chat.marks, "")])

    def _encode_pieces(self, pieces: Sequence[_Piece]) -> list[int]:
        """Return the token ids of all pieces. A piece with injected control tokens is cut and its parts are encoded in
        turn; each has fewer marks, so this ends."""
        encodings = self._tokenizer.encode_batch(
            [piece.separator + piece.text for piece in pieces], add_special_tokens=False
        )
        ids: list[int] = []
        for piece, encoding in zip(pieces, encodings, strict=True):
            if cuts := self._injected(encoding, piece):
                ids += self._encode_pieces(piece.cut(cuts, self._separator))
            else:
                ids += encoding.ids[1:] if piece.separator else encoding.ids
        return ids

    def _injected(self, encoding: Encoding, piece: _Piece) -> list[int]:
        """Return the positions in the piece's text at which injected control tokens must be cut."""
        if not piece.marks:
            return []
        shift = len(piece.separator)
        first = 1 if shift else 0
        cuts = []
        for token_id, (start, end) in zip(encoding.ids[first:], encoding.offsets[first:], strict=True):
            if token_id in self._ids:
                at = bisect_right(piece.marks, start - shift)
                if at < len(piece.marks) and piece.marks[at] < end - shift:
                    cuts.append(piece.marks[at])
        return cuts


class _Piece(msgspec.Struct, frozen=True):
    text: str
    marks: Sequence[int]
    separator: str
    """Control token that is encoded before the text, because some tokenizers add a space at the beginning of a text."""

    def cut(self, cuts: Sequence[int], separator: str) -> list[_Piece]:
        pieces = []
        for start, end in zip((0, *cuts), (*cuts, len(self.text)), strict=True):
            inside = self.marks[bisect_right(self.marks, start) : bisect_left(self.marks, end)]
            marks = [mark - start for mark in inside]
            pieces.append(_Piece(self.text[start:end], marks, separator if start else self.separator))
        return pieces


class _ControlTokenFinder:
    """Finds where control tokens begin in a text, or could begin with other text before or behind it."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted(set(tokens))
        rests: dict[str, list[str]] = {}
        for token in known:
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
        # Only one character is consumed and the rest is a lookahead, so that overlapping matches are found too; each
        # branch begins with a literal, which keeps the scan of a long text fast.
        branches = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._pattern = re.compile("|".join(branches)) if branches else None
        borders = {character for token in known for character in (token[0], token[-1])}
        # Every match, and everything that could become one, contains the first or last character of a token.
        self._border = re.compile(f"[{re.escape(''.join(sorted(borders)))}]") if borders else None
        self._prefixes = {token[:n] for token in known for n in range(1, len(token))}
        self._suffixes = {token[n:] for token in known for n in range(1, len(token))}
        self._longest = max(map(len, known), default=1)

    def positions(self, text: str) -> list[int]:
        """Return the ascending positions at which marks are needed."""
        if self._pattern is None or self._border is None or self._border.search(text) is None:
            return []
        found = {match.end() for match in self._pattern.finditer(text)}
        # A template may insert the text unchanged, or without its outer spaces.
        for stripped in {text, text.rstrip()}:
            for n in range(1, min(self._longest, len(stripped) + 1)):
                if stripped[-n:] in self._prefixes:
                    found.add(len(stripped) - n + 1)
        for begin in {0, len(text) - len(text.lstrip())}:
            if any(text[begin : begin + n] in self._suffixes for n in range(1, min(self._longest, len(text) + 1))):
                found.add(begin)
        return sorted(found)


def _looks_for(template: str, token: str) -> bool:
    """Return whether the template tests contents for the token or splits them at it."""
    quoted = rf"(?:'{re.escape(token)}'|\"{re.escape(token)}\")"
    return re.search(rf"{quoted}\s+(?:not\s+)?in\b|split\(\s*{quoted}", template) is not None


def _unused_character(texts: Collection[str]) -> str:
    candidates = map(chr, _MARKS)
    # A text that contains all 6,400 of them means nothing: it may lose one of its characters.
    return next((mark for mark in candidates if not any(mark in text for text in texts)), chr(_MARKS.stop - 1))


def _fields(message: ChatMessage) -> list[Any]:
    return [getattr(message, name) for name in _FIELDS]


def _texts(value: Any) -> Iterator[str]:
    """Iterate over all texts within a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _texts(one)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with every text in it changed, keys included: no key that templates use looks like a
    control token."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if isinstance(value, dict):
        return {change(key): _mapped(one, change) for key, one in value.items()}
    return value


def _insert(text: str, positions: Sequence[int], mark: str) -> str:
    bounds = zip((0, *positions), (*positions, len(text)), strict=True)
    return mark.join(text[start:end] for start, end in bounds)
