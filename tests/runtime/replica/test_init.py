"""Process 1 of a container: it reaps orphans, forwards signals, and exits with the launcher's code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.frontend.served import RUNTIME, eventually

_PROGRAM = """
import ctypes, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
from minisgl.replica.init import run_as_init
run_as_init()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
# A shell that leaves its child behind; the child ends with the program's stdin.
subprocess.run(["/bin/sh", "-c", "exec 3<&0; (read line <&3) &"], check=True)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_orphans_are_reaped_and_signals_reach_the_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(RUNTIME)},
        text=True,
    ) as init:
        assert init.stdin is not None and init.stdout is not None
        launcher = init.stdout.readline().strip()
        assert launcher != str(init.pid)

        def children() -> list[str]:
            return Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()

        eventually(lambda: len(children()) == 2)
        init.stdin.close()
        eventually(lambda: children() == [launcher])
        init.send_signal(signal.SIGTERM)
        assert init.wait(60) == 7


def test_a_killed_launcher_gives_the_exit_code_of_a_shell() -> None:
    code = "import os, signal; from minisgl.replica.init import run_as_init; run_as_init(); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": str(RUNTIME)})
    assert done.returncode == 128 + 9
