"""The end of the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import uvloop

from minisgl_operator.shell.run import report_loop_error

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


def test_a_watch_that_cannot_be_closed_is_no_fault_of_a_clean_stop(caplog: pytest.LogCaptureFixture) -> None:
    @contextlib.asynccontextmanager
    async def block() -> AsyncIterator[None]:
        try:
            yield
        except GeneratorExit:
            # As kopf's, which waits for a task while it is left.
            yield

    async def watch() -> AsyncIterator[int]:
        async with block():
            yield 1

    watches = watch()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(report_loop_error)
        await anext(watches)

    with caplog.at_level(logging.INFO):
        uvloop.run(run())
    assert not caplog.records


def test_other_errors_of_the_loop_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_loop_error)
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    uvloop.run(run())
    assert "ZeroDivisionError" in caplog.text
