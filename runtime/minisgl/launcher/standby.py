"""A process that has done the imports of others, and forks them when the launcher asks for it.

A fork shares the memory of what was imported, and runs its own code within milliseconds. Nothing here may start a
thread or touch a device: neither outlives a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from minisgl.errors import LauncherError
from minisgl.launcher import control

_REQUEST_BYTES: Final = 1 << 12
_PID_ATTEMPTS: Final = 16

_OTHER_IDS: Final = 255
"""Exit code for the lack of a process id; smaller ones are numbers of errors of the kernel."""


def import_nicely(niceness: int, modules: Sequence[str]) -> None:
    """Import modules while other processes serve, which need the cores more.

    A thread does it, because Linux counts niceness by thread, and without privileges none can lower its own again: the
    forks must have the usual one. It has ended when this returns."""

    def run() -> None:
        os.nice(niceness)
        for module in modules:
            importlib.import_module(module)

    with ThreadPoolExecutor(1, "imports") as pool:
        pool.submit(run).result()


def fork_on_request(requests: socket.socket) -> socket.socket | None:
    """Fork a process for each request. Returns in each of them, with the end of its control channel; and None in the
    standby when the launcher has exited.

    A request comes with two descriptors: that end, and where the process writes its output.
    """
    # The garbage collector writes to the objects that it looks at, and what is written is not shared any more.
    gc.collect()
    gc.freeze()
    requests.sendall(control.encode(control.Imported()))
    while True:
        line, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 2)
        if not line:
            return None
        request = control.to_standby.decode(line)
        channel, output = descriptors
        try:
            if _fork_for_launcher(*request.pid_residue):
                requests.close()
                os.dup2(output, 1)
                os.dup2(output, 2)
                return socket.socket(fileno=os.dup(channel))
        except LauncherError as error:
            # The launcher may have given this process up.
            with suppress(OSError):
                os.write(channel, control.encode(control.StartError(error.code, str(error))))
        finally:
            os.close(channel)
            os.close(output)


def _fork_for_launcher(residue: int, modulus: int) -> bool:
    """Fork a process that is a child of the launcher, which adopts it because its parent exits at once. True: this is
    the new process, and it has been adopted. Raises LauncherError."""
    released, release = os.pipe()
    parent = os.fork()
    if parent:
        os.close(released)
        _, status = os.waitpid(parent, 0)
        os.close(release)
        if code := os.waitstatus_to_exitcode(status):
            raise _error(code, residue, modulus)
        return False
    os.close(release)
    try:
        child = _fork_with_residue(residue, modulus)
    except OSError as error:
        os._exit(error.errno or _OTHER_IDS)
    if child is not None:
        os._exit(0 if child else _OTHER_IDS)
    os.read(released, 1)
    os.close(released)
    # As the launcher starts others: what it leaves behind is found by its group.
    os.setpgid(0, 0)
    return True


def _fork_with_residue(residue: int, modulus: int) -> int | None:
    """Return the new process's id, 0 if none had the residue; None in the new process."""
    # Process ids are assigned in order: n attempts suffice unless other processes start at the same time.
    for _ in range(_PID_ATTEMPTS * modulus):
        child = os.fork()
        if not child:
            return None
        if child % modulus == residue:
            return child
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return 0


def _error(code: int, residue: int, modulus: int) -> LauncherError:
    if code != _OTHER_IDS:
        return LauncherError("cannot_fork", f"no process can be started: {os.strerror(code)}")
    return LauncherError(
        "no_process_id",
        f"no process id that is {residue} modulo {modulus} came: other processes start in this container all the "
        "time; remove them",
    )
