"""Run pytest many times in children of one process, which imports the libraries once.

As a program it reads a JSON list of pytest's arguments from each line of stdin, and writes the exit code and the output
of each run as one line of JSON. It imports nothing of ours, so each run sees the code as it is then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_BROKEN: Final = 3
"""Exit code of a run that pytest itself did not end; 1 would say that tests failed."""
_OPTIONS: Final = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


class Run(NamedTuple):
    code: int
    """Exit code of pytest."""
    output: str


class ForkedPytest:
    """pytest in a copy of the tree."""

    def __init__(self, folder: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV"))}
        # A file that is changed within a second keeps the time and often the size by which bytecode is found.
        environment |= {"PYTHONPATH": f"{folder}/runtime:{folder}/tests", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, named: Sequence[str]) -> Run:
        """Run these tests."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([*_OPTIONS, *named]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of all runs ended with {self._process.wait()}"
        return Run(*json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _run_in_child(arguments: list[str]) -> Run:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = _BROKEN
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                import pytest

                code = int(pytest.main(arguments))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # The parent's buffers and exit handlers are not the child's to run.
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Run(os.waitstatus_to_exitcode(status), output.read().decode(errors="replace"))


def main() -> None:
    # The directory of this file would hide modules of other names.
    sys.path.pop(0)
    for name in ("hypothesis", "msgspec", "numpy", "pytest", "tokenizers", "torch", "zmq"):
        __import__(name)
    for line in sys.stdin:
        print(json.dumps(_run_in_child(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
