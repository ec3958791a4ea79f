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
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from minisgl.errors import LauncherError
from minisgl.launcher import control
from minisgl.launcher.prctl import set_title

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

    # What is imported stays; looking for garbage meanwhile takes a sixth of the time.
    gc.disable()
    with ThreadPoolExecutor(1, "imports") as pool:
        pool.submit(run).result()
    gc.enable()


def fork_on_request(requests: socket.socket) -> socket.socket | None:
    """Fork a process for each request. Returns in each of them, with the end of its control channel; and None in the
    standby when the launcher has exited.

    A request comes with two descriptors: that end, and where the process writes its output.
    """
    # Forks would write what is left of the imports' output a second time.
    sys.stdout.flush()
    sys.stderr.flush()
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
            if _fork_for_launcher(channel, *request.pid_residue):
                requests.close()
                os.dup2(output, 1)
                os.dup2(output, 2)
                return socket.socket(fileno=os.dup(channel))
        except LauncherError as error:
            _send(channel, control.StartError(error.code, str(error)))
        finally:
            os.close(channel)
            os.close(output)


def _fork_for_launcher(channel: int, residue: int, modulus: int) -> bool:
    """Fork a process that is a child of the launcher, which adopts it because its parent exits at once. True: this is
    the new process, and the launcher knows its id. Raises LauncherError."""
    try:
        released, release = os.pipe()
        pids, told = os.pipe()
        parent = os.fork()
    except OSError as error:
        raise _error(error.errno or _OTHER_IDS, residue, modulus) from error
    if parent:
        os.close(released)
        os.close(told)
        _, status = os.waitpid(parent, 0)
        with os.fdopen(pids) as stream:
            pid = stream.read()
        code = os.waitstatus_to_exitcode(status)
        # Else nobody would wait for it: the launcher has given it up meanwhile.
        if not code and _send(channel, control.Forked(int(pid))):
            os.write(release, b"1")
        os.close(release)
        if code:
            raise _error(code, residue, modulus)
        return False
    os.close(release)
    os.close(pids)
    try:
        child = _fork_with_residue(residue, modulus)
    except OSError as error:
        os._exit(error.errno or _OTHER_IDS)
    if child is not None:
        os.write(told, str(child).encode())
        os._exit(0 if child else _OTHER_IDS)
    os.close(told)
    set_title("minisgl-forked")
    # As the launcher starts others.
    os.setpgid(0, 0)
    if not os.read(released, 1):
        os._exit(1)
    os.close(released)
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


def _send(channel: int, message: control.FromChild) -> bool:
    """Whether the launcher still reads this channel."""
    try:
        os.write(channel, control.encode(message))
    except OSError:
        return False
    return True


def _error(code: int, residue: int, modulus: int) -> LauncherError:
    """`code`: exit code of the process between."""
    if code < 0:
        return LauncherError("cannot_fork", f"the process that was to start it was killed by signal {-code}")
    if code != _OTHER_IDS:
        return LauncherError("cannot_fork", f"no process can be started: {os.strerror(code)}")
    return LauncherError(
        "no_process_id",
        f"no process id that is {residue} modulo {modulus} came: other processes start in this container all the "
        "time; remove them",
    )
