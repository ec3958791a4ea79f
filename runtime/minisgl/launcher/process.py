"""One child of the launcher, seen from the launcher."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from minisgl import logging as log
from minisgl.errors import LauncherError
from minisgl.launcher import control

_LAST_WORDS: Final = 20
"""Lines of output that the message about an exit quotes: warnings and errors, not older than the seconds below, because
an older one would pass for the cause."""
_LAST_WORDS_SECONDS: Final = 10.0

_READ_BYTES: Final = 1 << 16

_PID_ATTEMPTS: Final = 16

STANDBY: Final = "standby-"
"""Prefix of a standby's name; the rest is the name of the process that it can replace."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start."""

    name: str
    """Short name, unique in its group: `rank0`, `tokenizer1`, `frontend`."""
    target: str
    """`module:function`, called in the child with (config as JSON, Control)."""
    config: Any
    """Configuration that msgspec can encode as JSON."""
    environment: dict[str, str] = {}
    """Variables in addition to the launcher's."""
    descriptors: tuple[int, ...] = ()
    """Open descriptors of the launcher that the child gets under the same numbers."""
    drains: bool = False
    """After SIGTERM it finishes its clients' requests and exits by itself; other processes may be killed."""
    preload: tuple[str, ...] = ()
    """Modules whose import takes long: a standby imports them ahead. Empty: no standby is kept."""
    pid_residue: tuple[int, int] | None = None
    """(r, n): its process id is r modulo n, so that of n such processes in n containers, each with process ids of its
    own, no two have the same id."""


class Child(Protocol):
    """A process that a supervisor watches, on this machine or on another one."""

    name: str
    drains: bool
    is_ready: bool
    progress: str
    start_error: control.StartError | None
    terminated_by_us: bool
    """A signal was sent to it while it was alive: its exit is no failure of its own."""
    heartbeat: control.Heartbeat | None
    """The last one; None: it sends none to this launcher."""
    stall: str
    """Why it hangs; empty: it does not."""

    @property
    def label(self) -> str:
        """Name and process id, or name and pod, for messages."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None: it runs, or the code is unknown."""
        ...

    def send(self, message: control.ToChild) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...

    def close(self) -> None: ...

    def describe_exit(self) -> str:
        """Describe the exit of a dead process: name, cause and last words."""
        ...


class Process:
    """A child on this machine, watched by a selector until `close`. `on_line` gets each line of its stdout and stderr.

    A standby is a child that has imported the modules of `spec.preload` and waits for `begin`.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        selector: selectors.BaseSelector,
        log_level: str,
        on_line: Callable[[log.Line], None],
        *,
        standby: bool = False,
    ) -> None:
        """Start the process, or a standby for it. The data of the selector's keys is the callback."""
        self.spec = spec
        self.name = spec.name
        self.drains = spec.drains
        self.is_ready = False
        self.progress = "starting"
        self.start_error: control.StartError | None = None
        self.ready_message = control.Ready()
        self.has_imported = False
        """A standby's imports are done."""
        self.terminated_by_us = False
        self.heartbeat: control.Heartbeat | None = None
        self.stall = ""
        self._log_level = log_level
        self._on_line = on_line
        self._selector = selector
        self._last_words: deque[tuple[float, str]] = deque(maxlen=_LAST_WORDS)
        self._control, peer = socket.socketpair()
        self._control_rest = b""
        self._output_rest = b""
        name = f"{STANDBY}{spec.name}" if standby else spec.name
        imports = spec.preload if standby else ()
        command = (
            *(sys.executable, "-P", "-m", "minisgl.launcher.child"),
            *(name, str(peer.fileno()), str(os.getpid()), *imports),
        )
        with peer:
            self._popen = _spawn(command, spec, peer.fileno())
        assert self._popen.stdout is not None
        self._output = self._popen.stdout
        if not standby:
            self.begin(spec)
        self._control.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        selector.register(self._control, selectors.EVENT_READ, self._read_control)
        selector.register(self._output, selectors.EVENT_READ, self._read_output)

    def begin(self, spec: ProcessSpec) -> None:
        """Send the process its work. Name, environment and descriptors stay those that it was started with."""
        self.spec = spec
        self.drains = spec.drains
        self.progress = "starting"
        config = msgspec.Raw(msgspec.json.encode(spec.config))
        self.send(
            control.Start(name=spec.name, target=spec.target, config=config, log_level=self._log_level, heartbeats=True)
        )

    @property
    def label(self) -> str:
        return f"{self.name} (pid {self._popen.pid})"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None while it runs."""
        return self._popen.poll()

    def send(self, message: control.ToChild) -> None:
        try:
            self._control.sendall(control.encode(message))
        except OSError:
            # It is dead or does not listen: its exit code is the better explanation.
            return

    def signal(self, number: signal.Signals) -> None:
        self.terminated_by_us |= self.alive
        self._popen.send_signal(number)

    def dump_stacks(self) -> None:
        """Have it write its stacks to its output. One that is stopped, or stuck in the kernel, does not."""
        self._popen.send_signal(control.STACKS_SIGNAL)

    def kill_and_close(self) -> None:
        if self.alive:
            self.signal(signal.SIGKILL)
        self._popen.wait()
        self.close()

    def close(self) -> None:
        """Read the last output of a dead child, then release its descriptors."""
        for source, read in ((self._control, self._read_control), (self._output, self._read_output)):
            read()
            self._unregister(source)
            source.close()

    def describe_exit(self) -> str:
        """Describe the exit of a dead child: name, cause and last words."""
        if not self._output.closed:
            self._read_output()
            self._read_control()
        code = self._popen.returncode
        if self.start_error is not None:
            return f"{self.name}: {self.start_error.message} ({self.start_error.code})"
        if code < 0:
            cause = f"was killed by signal {-code} ({_signal_name(-code)})"
            if code == -signal.SIGKILL:
                cause += "; if no user or program sent it, the machine ran out of memory"
        else:
            cause = f"exited with code {code}"
        oldest = time.monotonic() - _LAST_WORDS_SECONDS
        words = "".join(f"\n  | {line}" for at, line in self._last_words if at >= oldest)
        return f"{self.label} {cause}" + (f". Its last words:{words}" if words else "")

    def _read_control(self) -> None:
        lines, self._control_rest = self._read_lines(self._control, self._control_rest)
        for line in lines:
            message = control.from_child.decode(line)
            match message:
                case control.Ready():
                    self.is_ready = True
                    self.ready_message = message
                case control.Progress(text=control.IMPORTED):
                    # It may already have its work: then this is no step of its start.
                    self.has_imported = True
                case control.Progress():
                    self.progress = message.text
                case control.StartError():
                    self.start_error = message
                case control.Heartbeat():
                    self.heartbeat = message

    def _read_output(self) -> None:
        lines, self._output_rest = self._read_lines(self._output, self._output_rest)
        for raw in lines:
            line = log.parse(raw.decode(errors="replace").rstrip(), self.name)
            if line.level not in ("debug", "info"):
                now = time.monotonic()
                self._last_words.extend((now, text) for text in (line.message, *line.traceback.splitlines()))
            self._on_line(line)

    def _read_lines(self, source: Any, rest: bytes) -> tuple[list[bytes], bytes]:
        """Return the complete lines that have arrived, and the beginning of the next one. At the end of the stream the
        source is unregistered."""
        while True:
            try:
                data = os.read(source.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._unregister(source)
                rest = rest + b"\n" if rest else rest
                break
            # Progress bars draw over their line; here each drawing is a line.
            rest += data.replace(b"\r", b"\n")
        *lines, rest = rest.split(b"\n")
        return [line for line in lines if line], rest

    def _unregister(self, source: Any) -> None:
        if source in self._selector.get_map():
            self._selector.unregister(source)


def _spawn(command: Sequence[str], spec: ProcessSpec, control_descriptor: int) -> subprocess.Popen[bytes]:
    residue, modulus = spec.pid_residue or (0, 1)
    # Process ids are assigned in order: n attempts suffice unless other processes start at the same time.
    for _ in range(_PID_ATTEMPTS * modulus):
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment},
            pass_fds=(control_descriptor, *spec.descriptors),
            process_group=0,
        )
        if popen.pid % modulus == residue:
            return popen
        popen.kill()
        popen.communicate()
    raise LauncherError(
        "no_process_id",
        f"{spec.name} got no process id that is {residue} modulo {modulus}: other processes start in this container "
        "all the time; remove them",
    )


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, "real-time")
