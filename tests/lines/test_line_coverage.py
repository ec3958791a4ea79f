"""The lines that count as reached are those that a tracer sees."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from coverage import CoverageData

from support.line_coverage import ROOT, environment_of_child, noting

SOURCE = '''\
"""Docstring."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator


def plain(function):
    """Docstring."""
    return function


@plain
@plain
def decorated(number: int) -> str:
    total = 0
    for turn in range(number):
        if turn == 1:
            continue
        elif turn == 2:
            total += 1
        else:
            total += 2
    else:
        total += 1
    while total > 100:
        total = 0
    return (
        "many"
        if total > 3
        else "few"
    )


@plain
class Shape(enum.Enum):
    """Docstring."""

    ROUND = 1
    """Of a member."""
    FLAT = 2

    @property
    def name_of_it(self) -> str:
        return self.name


def caught(divisor: int) -> int:
    result = 0
    try:
        result = 1 // divisor
    except ZeroDivisionError:
        result = -1
    else:
        result += 1
    finally:
        result += 10
    return result


def matched(value: object) -> int:
    match value:
        case 1:
            return 1
        case [first, *_]:
            return 2
        case _:
            return 3


def numbers() -> Iterator[int]:
    with contextlib.suppress(KeyError):
        yield 1
        raise KeyError
        yield 2


async def awaited() -> int:
    double = lambda number: 2 * number
    return sum(double(number) for number in range(3))


def never() -> None:
    global unset
    unset = 1


decorated(4)
Shape.ROUND.name_of_it
caught(1)
caught(0)
matched(1)
list(numbers())
try:
    awaited().send(None)
except StopIteration:
    pass
if never is None:
    never()
'''


def _traced() -> set[int]:
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != "sample.py":
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    code = compile(SOURCE, "sample.py", "exec", dont_inherit=True)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(code, {"__name__": "sample"})
    finally:
        sys.settrace(before)
    return lines


def test_lines_are_those_that_a_tracer_sees() -> None:
    noted = [False] * (SOURCE.count("\n") + 2)
    code = compile(noting(SOURCE), "sample.py", "exec", dont_inherit=True)
    exec(code, {"__name__": "sample", "__noted_lines__": noted})
    text = SOURCE.splitlines()
    # A tracer also sees the further lines of a statement; coverage.py counts only the first.
    further = {
        line for line, words in enumerate(text, 1) if words.strip().startswith(('"many"', "if total > 3", "else "))
    }
    docstrings = {line for line, words in enumerate(text, 1) if words.strip().startswith('"""')}
    assert {line for line, is_noted in enumerate(noted) if is_noted} - docstrings == _traced() - further - docstrings


@pytest.mark.parametrize("failing", ["1 / 0", "(\n    1\n    / 0\n)"])
def test_a_failure_is_shown_at_its_own_line(failing: str) -> None:
    code = compile(noting(f"first = 1\n{failing}\n"), "sample.py", "exec")
    with pytest.raises(ZeroDivisionError) as error:
        exec(code, {"__noted_lines__": [False] * 9})
    assert error.value.__traceback__ is not None and error.value.__traceback__.tb_next is not None
    assert error.value.__traceback__.tb_next.tb_lineno == (2 if "\n" not in failing else 3)


def test_a_child_writes_its_lines_and_all_files_but_no_program_that_it_starts(tmp_path: Path) -> None:
    program = """
        import subprocess, sys
        import minisgl.wire.status
        subprocess.run([sys.executable, "-c", "import minisgl.wire.text"], check=True)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | environment_of_child(str(tmp_path / "lines")),
        check=True,
    )
    [written] = tmp_path.iterdir()
    data = CoverageData(str(written))
    data.read()
    wire = ROOT / "runtime" / "minisgl" / "wire"
    assert data.lines(str(wire / "status.py"))
    assert data.lines(str(wire / "text.py")) == []
    assert {str(path) for path in wire.rglob("*.py")} <= data.measured_files()
