"""The operator's process: acquire the Lease, begin to work, watch, and give everything back at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket

from minisgl.logging import LogFormat, LogLevel, set_up
from minisgl_operator.shell.client import Client, NoConnection, connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.lease import Lease
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.watches import watch

_log = logging.getLogger(__name__)


def run_operator(config: Config, level: LogLevel, format: LogFormat) -> int:
    """0 after SIGTERM or SIGINT; 1 when the Lease was lost, a watch broke, or another namespace may be watched, which a
    restart cures."""
    set_up("operator", level, format)
    # One line for each watch event is more than anybody reads.
    logging.getLogger("kopf").setLevel("WARNING" if level == "info" else level.upper())
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    try:
        where = await connection(config.kubeconfig)
    except NoConnection as error:
        _log.error("%s", error)
        return 1
    counts = Metrics()
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        # kopf puts its own handlers in place once it runs.
        loop.add_signal_handler(number, this.cancel)
    async with Client(where, counts.requested) as client:
        lease = Lease(client, config.environment.operator_namespace, identity, config.lease_name)
        keeper: asyncio.Task[None] | None = None
        ends_early = False

        def end_early() -> None:
            nonlocal ends_early
            ends_early = True
            this.cancel()

        controller = Controller(client, config, identity, counts, lambda: lease.held, on_access=end_early)

        async def finish() -> None:
            await controller.stop()
            if keeper is not None:
                keeper.cancel()
            await lease.release()

        try:
            await controller.serve_health()
            await lease.acquire()
            keeper = asyncio.create_task(lease.keep(end_early), name="lease")
            await controller.start()
            _log.info("Watches %s", ", ".join(controller.namespaces) or "all namespaces")
            await watch(where, controller.namespaces, controller.saw, finish)
        except asyncio.CancelledError:
            # A signal, or an end that a restart cures.
            return 1 if ends_early else 0
        except Exception:
            _log.exception("Cannot go on; the operator ends to be started again")
            return 1
        finally:
            await finish()
        return 0
