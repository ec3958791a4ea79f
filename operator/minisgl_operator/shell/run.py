"""The operator's process: acquire the Lease, start the controller, watch, and release the Lease at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from typing import Any, Final

import uvloop

from minisgl.logging import LogFormat, LogLevel, set_up
from minisgl_operator.shell.client import Client, NoConnection, connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.lease import Lease
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.watches import watch

_log = logging.getLogger(__name__)

_FINISH_SECONDS: Final = 20.0
_EXIT_SECONDS: Final = 5.0
"""Time that remaining tasks have to end after the Lease was released."""


def run_operator(config: Config, level: LogLevel, format: LogFormat) -> int:
    """Return 0 after SIGTERM or SIGINT; 1 when the Lease was lost, watches stayed broken, another namespace may be
    watched, or the API server's database was restored, all of which call for a restart."""
    set_up("operator", level, format)
    # kopf logs one line for each watch event.
    logging.getLogger("kopf").setLevel("WARNING" if level == "info" else level.upper())
    collect_old_objects_on_request()
    exit_anyway: list[threading.Timer] = []

    async def run() -> int:
        code = await _run(config)
        # The event loop waits without limit for tasks that ignore their cancellation, as those of broken watches may.
        exit_anyway.append(threading.Timer(_EXIT_SECONDS, os._exit, (code,)))
        exit_anyway[0].daemon = True
        exit_anyway[0].start()
        return code

    try:
        return uvloop.run(run())
    finally:
        for timer in exit_anyway:
            timer.cancel()


def report_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task received, as the loop does by default, but not one of a generator that is closed when
    the loop ends: kopf's watches yield within a context manager that cannot be left so, and nothing is lost."""
    if "asyncgen" in context:
        _log.debug("%s: %s", context.get("message"), context.get("exception"))
    else:
        loop.default_exception_handler(context)


async def _run(config: Config) -> int:
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    try:
        where = await connection(config.kubeconfig)
    except NoConnection as error:
        _log.error("%s", error)
        return 1
    counts = Metrics()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(report_loop_error)
    this = asyncio.current_task()
    assert this is not None
    ends = False

    def end() -> None:
        """Cancel this task, but not what it does at its end."""
        nonlocal ends
        if not ends:
            ends = True
            this.cancel()

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)

    take_signals()
    async with Client(where, counts.requested) as client:
        lease = Lease(client, config.defaults.operator_namespace, identity, config.lease_name)
        keeper: asyncio.Task[None] | None = None
        restarts = False

        def exit_for_restart() -> None:
            nonlocal restarts
            restarts = True
            end()

        controller = Controller(client, config, identity, counts, lambda: lease.held, on_restart=exit_for_restart)

        async def finish() -> None:
            nonlocal ends
            ends = True
            if keeper is not None:
                keeper.cancel()
            # The kubelet waits half a minute for all of the end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FINISH_SECONDS):
                    await controller.stop()
                    await lease.release()

        try:
            await controller.serve_health()
            await lease.acquire()
            keeper = asyncio.create_task(lease.keep(exit_for_restart), name="lease")
            await controller.start()
            _log.info("Watching %s", ", ".join(controller.namespaces) or "all namespaces")
            await watch(where, controller.namespaces, controller.on_watch_event, take_signals)
        except asyncio.CancelledError:
            # A signal, or a restart.
            return 1 if restarts else 0
        except Exception:
            _log.exception("Fatal error; exiting for restart")
            return 1
        finally:
            await finish()
        return 0


_NEVER: Final = 2**30


def collect_old_objects_on_request() -> None:
    """Limit Python's own collections to new objects; the controller collects all after each full list.

    With a thousand models a collection of all objects takes half a second in which nothing else runs, and while they
    change there would be one every few seconds.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
