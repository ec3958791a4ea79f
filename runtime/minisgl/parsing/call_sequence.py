"""Several calls, one behind the other, in formats that mark only the first one."""

from __future__ import annotations

from collections.abc import Callable

from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan


def parse_calls(
    reader: Reader, output: Output, call: Callable[[], Scan[None]], follows: Callable[[], Scan[bool]]
) -> Scan[None]:
    """Parse a call and those behind it, while `follows` reads what separates them. Raises NotACall and Ended as `call`
    does for the first one, and for a later one that has begun."""
    yield from call()
    while True:
        reader.commit()
        calls = output.calls
        try:
            if not (yield from follows()):
                return
            yield from call()
        except (NotACall, Ended):
            if output.calls > calls:
                raise
            # Something else follows the calls, and begins behind the last one.
            reader.at = 0
            return


def parse_list(reader: Reader, output: Output, call: Callable[[], Scan[None]]) -> Scan[None]:
    """Parse calls that are separated by commas, and the bracket behind them, which a comma may precede. Raises as
    `parse_calls`."""

    def follows() -> Scan[bool]:
        if is_separated := (yield from reader.skip(SPACE)) == ",":
            reader.at += 1
            yield from reader.skip(SPACE)
        if (yield from reader.peek()) == "]":
            reader.at += 1
            return False
        if not is_separated:
            raise NotACall
        return True

    yield from parse_calls(reader, output, call, follows)
