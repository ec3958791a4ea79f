"""The end of the operator's process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio
import sys
from minisgl_operator.shell import run

async def never_ends():
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def stopped(config):
    task = asyncio.create_task(never_ends())
    await asyncio.sleep(0)
    return 3

run._run = stopped
run._EXIT_SECONDS = 0.1
sys.exit(run.run_operator(None, "info", "text"))
"""


def test_tasks_that_ignore_their_cancellation_do_not_keep_the_process() -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT], timeout=60, check=False)
    assert finished.returncode == 3
