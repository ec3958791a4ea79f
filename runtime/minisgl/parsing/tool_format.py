"""The interface between the scanner and the formats of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from minisgl.parsing.output import Output, call_id
from minisgl.parsing.reader import Reader, Scan

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by name of the tool."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    starts: tuple[str, ...]
    """Markers that begin a call wherever they are in the text."""
    parse: Callable[[Reader, Output, Tools], Scan[None]]
    """Parses the calls at the position, which is that of a start, and leaves the position behind them. If a call is
    broken behind its name, the rest remains text. Raises NotACall or Ended while no call has begun; Ended later too."""
    inner: tuple[str, ...] = ()
    """Further markers, between the parts of calls."""
    bare: str = ""
    """Character that begins a call where nothing but spaces is before it in its line; empty: none does."""
    is_inline: bool = False
    """Calls follow a text in its line; otherwise they begin lines of their own."""
    new_id: Callable[[], str] = call_id
    in_channels: bool = False
    """Calls are messages in a channel of the answer; see `minisgl.parsing.harmony`."""
