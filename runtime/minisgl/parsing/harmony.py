"""Harmony, the format of gpt-oss: an answer is messages, each with a header that names its channel and recipient.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The channel `analysis` is reasoning, a message to a tool is a call, anything else is text. The recipient may also stand
before the channel, as chat templates write it. Nothing of an answer is lost: what is no header is part of the message
that it interrupts, or text between messages, and the header of a message to somebody unknown stays with its content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.incremental import IncrementalScanner
from minisgl.parsing.json_text import SPACE, Repair
from minisgl.parsing.output import Call, Output, call_id
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan
from minisgl.parsing.reasoning import ReasoningFormat, ReasoningState
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
RETURN: Final = "<|return|>"
CALL: Final = "<|call|>"
ROLE: Final = "assistant"
NAMESPACE: Final = "functions."
"""Before the names of tools."""

_OPENING: Final = (START, CHANNEL)
"""Markers that begin a header; the role before the channel may be in the prompt, or missing."""
_CLOSING: Final = (END, RETURN, CALL)
_BOUNDS: Final = (*_OPENING, *_CLOSING)
_MARKERS: Final = (*_BOUNDS, CONSTRAIN, MESSAGE)

_MAX_HEADER: Final = 256
"""Characters of a header: a tool's name has up to 64."""
_HEADER: Final = re.compile(
    rf"(?P<role>{ROLE} )?(?:to=(?P<before>\S+) )?"
    rf"(?:{re.escape(CHANNEL)} (?P<channel>analysis|commentary|final) (?:to=(?P<behind>\S+) )?)?"
    rf"(?P<type>(?:{re.escape(CONSTRAIN)} )?(?!{re.escape(CHANNEL)} |{re.escape(CONSTRAIN)} )\S+ )?"
)
"""Words and markers of a header, with a space behind each."""
_ENDS: Final = ("", f"{ROLE} ", "final ", "json ")
"""What makes a header whole that breaks off behind a word or a marker."""
_WORDS: Final = (ROLE, "to=x", "analysis", "commentary", "final")
_BETWEEN_TEXTS: Final = "\n\n"


class Header(NamedTuple):
    channel: str
    """Empty: none."""
    recipient: str
    """Empty: the user."""

    def tool(self, known: Collection[str]) -> str | None:
        """Return the name of the tool that the message calls. Some answers leave out the namespace of known ones."""
        name = self.recipient.removeprefix(NAMESPACE)
        return name if name and (name != self.recipient or name in known) else None


def read_header(reader: Reader) -> Scan[Header]:
    """Skip the header at the position, with the marker behind it. Raises NotACall if there is none, and Ended."""
    begin = reader.at
    has_start = False
    items: list[str] = []
    while True:
        found = reader.next_marker(_MARKERS, reader.at)
        end = reader.certain_end(_MARKERS, reader.at) if found is None else found[0]
        text = reader.text[reader.at : end]
        words = text.split()
        if end - begin > _MAX_HEADER or any(marker in text for marker in _MARKERS):
            raise NotACall
        if found is None:
            is_open = bool(text) and not text[-1].isspace()
            if not _may_continue([*items, *words], has_start, is_open):
                raise NotACall
            if reader.ended:
                raise Ended
            yield
            continue
        items += words
        reader.at = end + len(found[1])
        if found[1] == MESSAGE:
            header = _header(items, has_start)
            if header is None:
                raise NotACall
            return header
        if found[1] == START and end == begin:
            has_start = True
        elif found[1] in (CHANNEL, CONSTRAIN):
            items.append(found[1])
        else:
            raise NotACall


def _header(items: list[str], has_start: bool, end: str = "") -> Header | None:
    """Return the header of these words and markers with `end` behind them; None if they are none."""
    found = _HEADER.fullmatch("".join(f"{item} " for item in items) + end)
    if found is None or (has_start and not found["role"]) or (found["before"] and found["behind"]):
        return None
    if found["type"] and not (found["channel"] or found["before"]):
        return None
    return Header(found["channel"] or "", found["before"] or found["behind"] or "")


def _may_continue(items: list[str], has_start: bool, is_open: bool) -> bool:
    """Return whether these may begin a header. `is_open`: more of the last word may follow."""
    choices = [items]
    if is_open:
        *first, word = items
        longer = [one for one in _WORDS if one.startswith(word)]
        choices += [[*first, one] for one in (*longer, f"{word}x")]
    return any(_header(one, has_start, end) is not None for one in choices for end in _ENDS)


def _parse_call(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    header = yield from read_header(reader)
    if (name := header.tool(tools)) is None:
        raise NotACall
    call = Call(output)
    call.begin(name)
    reader.commit()
    repair = Repair()
    while True:
        found = reader.next_marker(_BOUNDS, 0)
        end = reader.certain_end(_BOUNDS, 0) if found is None else found[0]
        call.arguments(repair.push(reader.take(len(reader.text[:end].rstrip(SPACE)))))
        if found is not None or reader.ended:
            call.arguments(repair.finish())
            if found is None and reader.is_cut:
                raise Ended
            call.end()
            yield from reader.skip_to(_BOUNDS, SPACE)
            return
        yield


HARMONY_CALLS: Final = ToolFormat("harmony", _OPENING, _parse_call, (*_CLOSING, CONSTRAIN, MESSAGE), in_channels=True)
HARMONY_REASONING: Final = ReasoningFormat(
    "harmony", f"{CHANNEL}analysis{MESSAGE}", END, inner=_MARKERS, in_channels=True
)


def prompt_state(
    prompt: Sequence[int], answers: AnswerFormat, text_of: Callable[[Sequence[int]], str]
) -> ReasoningState:
    """Return where a prompt ends: before a header, within reasoning, or within another message. Messages of users
    cannot be mistaken for markers that are tokens."""
    if answers.markers[MESSAGE].token is None or answers.markers[CHANNEL].token is None:
        text = text_of(prompt)
        last = max(_MARKERS, key=text.rfind)
        channel = text[: text.rfind(MESSAGE)].rpartition(CHANNEL)[2]
    else:
        positions = [at for at, token in enumerate(prompt) if token in answers.by_token]
        names = [answers.by_token[prompt[at]].text for at in positions[-2:]]
        last = names[-1] if names else START
        channel = text_of(prompt[positions[-2] + 1 : positions[-1]]) if names[:1] == [CHANNEL] else ""
    if last != MESSAGE:
        return ReasoningState.BEFORE
    return ReasoningState.WITHIN if channel.split()[:1] == ["analysis"] else ReasoningState.BEHIND


def end_tokens(answers: AnswerFormat) -> tuple[int, ...]:
    """Return the tokens that end an answer in channels. Behind a call, its result must follow."""
    tokens = (answers.markers[text].token for text in (RETURN, CALL))
    return tuple(token for token in tokens if token is not None)


class _Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    NONE = auto()
    """Between messages."""


class HarmonyScanner(IncrementalScanner):
    """Scanner of an answer in channels. Texts of several messages are paragraphs, and so is their reasoning."""

    def __init__(
        self,
        format: AnswerFormat,
        state: ReasoningState,
        tools: Tools | None = None,
        *,
        separate_reasoning: bool = True,
    ) -> None:
        """`state`: where the prompt ends; `BEHIND` is within the text. `tools`: those that may be called; None: calls
        are ordinary text. Without `separate_reasoning`, everything but calls is text as it is, headers too."""
        super().__init__(format, call_id)
        self._tools = tools
        self._separate = separate_reasoning
        self._kind = _Kind.NONE
        self._written: set[_Kind] = set()
        self._begins_message = False
        self._begin(self._answer(state))

    def _answer(self, state: ReasoningState) -> Scan[None]:
        if state is ReasoningState.BEFORE:
            yield from self._header()
        else:
            self._enter(_Kind.REASONING if state is ReasoningState.WITHIN else _Kind.TEXT)
        while (yield from self._content()):
            yield from self._header()

    def _enter(self, kind: _Kind) -> None:
        self._kind = kind
        self._begins_message = True
        self.in_reasoning = kind is _Kind.REASONING and self._separate
        self.in_text = kind is _Kind.TEXT
        self.has_reasoning |= self.in_reasoning

    def _header(self) -> Scan[None]:
        """Read the header at the position, with the call whose it is. What is no header is part of the message that it
        would end."""
        reader = self._reader
        reader.commit()
        if self._tools is not None:
            before = self._output.calls
            try:
                yield from _parse_call(reader, self._output, self._tools)
            except (NotACall, Ended):
                if self._output.calls > before:
                    self._enter(_Kind.NONE)
                    return
                reader.at = 0
            else:
                reader.commit()
                self._enter(_Kind.NONE)
                return
        try:
            header = yield from read_header(reader)
        except (NotACall, Ended):
            reader.at = 0
            self._emit(next((len(mark) for mark in _OPENING if reader.next_marker((mark,), 0) == (0, mark)), 0))
            return
        self._enter(_Kind.REASONING if header.channel == "analysis" else _Kind.TEXT)
        if header.recipient or not self._separate:
            end, reader.at = reader.at, 0
            self._emit(end)
        else:
            reader.commit()

    def _content(self) -> Scan[bool]:
        """Pass on what precedes the next header; False: there is none."""
        reader = self._reader
        while True:
            found = reader.next_marker(_BOUNDS, 0)
            self._emit(reader.certain_end(_BOUNDS, 0) if found is None else found[0])
            if found is None:
                if reader.ended:
                    self._emit(len(reader.text))
                    return False
                yield
            elif found[1] in _OPENING:
                return True
            elif self._separate:
                reader.at = len(found[1])
                reader.commit()
                self._enter(_Kind.NONE)
            else:
                self._emit(len(found[1]))

    def _emit(self, end: int) -> None:
        """Pass on the text up to this position as what the message is."""
        text = self._reader.take(end)
        if not self._separate:
            self._output.text(text)
            return
        if self._kind is _Kind.NONE:
            text = text.lstrip(SPACE)
            if text:
                self._enter(_Kind.TEXT)
        if not text:
            return
        if self._begins_message and self._kind in self._written:
            text = _BETWEEN_TEXTS + text
        self._begins_message = False
        self._written.add(self._kind)
        if self._kind is _Kind.REASONING:
            self._output.reasoning(text)
        else:
            self._output.text(text)
