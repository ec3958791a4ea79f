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
from minisgl.launcher import control
from minisgl.launcher.errors import LauncherError

_LAST_WORDS: Final = 20
"""Lines of output kept for the message about a death: no mere information, and nothing older than this many seconds,
for it would pass for the cause."""
_LAST_WORDS_SECONDS: Final = 10.0

_READ_BYTES: Final = 1 << 16

_PID_ATTEMPTS: Final = 16

STANDBY: Final = "standby-"
"""Before the name of a process that waits to become it."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start."""

    name: str
    """Short and unique in its group: `rank0`, `tokenizer1`, `frontend`."""
    target: str
    """`module:function`, called in the child with (config as JSON, Control)."""
    config: Any
    """What msgspec can encode as JSON."""
    environment: dict[str, str] = {}
    """On top of the launcher's."""
    descriptors: tuple[int, ...] = ()
    """Open descriptors of the launcher that the child has under the same numbers."""
    drains: bool = False
    """SIGTERM asks it to finish its clients' requests, then to exit by itself; the others may be killed."""
    preload: tuple[str, ...] = ()
    """Modules whose import takes long: a standby does that ahead. Empty: no standby is kept."""
    pid_residue: tuple[int, int] | None = None
    """(r, n): its process id leaves the rest r when divided by n, so that of n such processes in n containers, each of
    which numbers its processes by itself, no two have the same."""


class Child(Protocol):
    """What the supervisor must know of a process, wherever it runs."""

    spec: ProcessSpec
    is_ready: bool
    progress: str
    refusal: control.Refused | None

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None while it runs, and when nobody knows."""
        ...

    def begin(self, spec: ProcessSpec) -> None:
        """Tell a standby what to do."""
        ...

    def watch(self, selector: selectors.BaseSelector) -> None: ...

    def send(self, message: control.ToChild) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...

    def close(self) -> None: ...

    def death(self) -> str:
        """Name, way and last words of one that has ended."""
        ...


class Process:
    """A started child. `on_line` gets each line of its stdout and stderr.

    A standby is a child that has imported the modules of `spec.preload` and waits until `begin` tells it what to do.
    """

    def __init__(
        self, spec: ProcessSpec, log_level: str, on_line: Callable[[log.Line], None], *, standby: bool = False
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self.progress = "starting"
        self.refusal: control.Refused | None = None
        self.ready_message = control.Ready()
        self.told_to_end = False
        """Its end is no failure of its own: it was alive when a signal was sent to it."""
        self._log_level = log_level
        self._on_line = on_line
        self._selector: selectors.BaseSelector | None = None
        self._last_words: deque[tuple[float, str]] = deque(maxlen=_LAST_WORDS)
        self._control, theirs = socket.socketpair()
        self._control_rest = b""
        self._output_rest = b""
        name, modules = (f"{STANDBY}{spec.name}", spec.preload) if standby else (spec.name, ())
        command = (
            *(sys.executable, "-P", "-m", "minisgl.launcher.child"),
            *(name, str(theirs.fileno()), str(os.getpid()), *modules),
        )
        with theirs:
            self._popen = _spawn(command, spec, theirs.fileno())
        assert self._popen.stdout is not None
        self._output = self._popen.stdout
        if not standby:
            self.begin(spec)
        self._control.setblocking(False)
        os.set_blocking(self._output.fileno(), False)

    def begin(self, spec: ProcessSpec) -> None:
        """Tell it what to do; name, environment and descriptors are those that it was started with."""
        self.spec = spec
        self.progress = "starting"
        config = msgspec.Raw(msgspec.json.encode(spec.config))
        self.send(control.Start(name=spec.name, target=spec.target, config=config, log_level=self._log_level))

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

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake up for this child until `close`; the key's data is what to call then."""
        self._selector = selector
        selector.register(self._control, selectors.EVENT_READ, self._read_control)
        selector.register(self._output, selectors.EVENT_READ, self._read_output)

    def send(self, message: control.ToChild) -> None:
        try:
            self._control.sendall(control.encode(message))
        except OSError:
            # It is gone or does not listen: its exit code says more.
            return

    def signal(self, number: signal.Signals) -> None:
        self.told_to_end |= self.alive
        self._popen.send_signal(number)

    def wait(self) -> None:
        self._popen.wait()

    def close(self) -> None:
        """Give back the descriptors of a child that has ended, after its last output."""
        for source, read in ((self._control, self._read_control), (self._output, self._read_output)):
            read()
            self._forget(source)
            source.close()

    def death(self) -> str:
        """Name, way and last words of a child that has ended."""
        if not self._output.closed:
            self._read_output()
            self._read_control()
        code = self._popen.returncode
        if self.refusal is not None:
            return f"{self.spec.name}: {self.refusal.message} ({self.refusal.code})"
        if code < 0:
            how = f"was killed by signal {-code} ({_signal_name(-code)})"
            if code == -signal.SIGKILL:
                how += "; when nobody sent it, the machine ran out of memory"
        else:
            how = f"ended with exit code {code}"
        oldest = time.monotonic() - _LAST_WORDS_SECONDS
        words = "".join(f"\n  | {line}" for at, line in self._last_words if at >= oldest)
        return f"{self.spec.name} (pid {self.pid}) {how}" + (f". Its last words:{words}" if words else "")

    def _read_control(self) -> None:
        lines, self._control_rest = self._read_lines(self._control, self._control_rest)
        for line in lines:
            message = control.from_child.decode(line)
            match message:
                case control.Ready():
                    self.is_ready = True
                    self.ready_message = message
                case control.Progress():
                    self.progress = message.text
                case control.Refused():
                    self.refusal = message

    def _read_output(self) -> None:
        lines, self._output_rest = self._read_lines(self._output, self._output_rest)
        for raw in lines:
            line = log.parse(raw.decode(errors="replace").rstrip(), self.spec.name)
            if line.level not in ("debug", "info"):
                now = time.monotonic()
                self._last_words.extend((now, text) for text in (line.message, *line.traceback.splitlines()))
            self._on_line(line)

    def _read_lines(self, source: Any, rest: bytes) -> tuple[list[bytes], bytes]:
        """Whole lines that are there, and the beginning of the next; at the end the selector forgets the source."""
        while True:
            try:
                data = os.read(source.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._forget(source)
                rest = rest + b"\n" if rest else rest
                break
            # Progress bars draw over their line; here each drawing is a line.
            rest += data.replace(b"\r", b"\n")
        *lines, rest = rest.split(b"\n")
        return [line for line in lines if line], rest

    def _forget(self, source: Any) -> None:
        if self._selector is not None and source in self._selector.get_map():
            self._selector.unregister(source)


def _spawn(command: Sequence[str], spec: ProcessSpec, control_descriptor: int) -> subprocess.Popen[bytes]:
    rest, classes = spec.pid_residue or (0, 1)
    # Process ids are given out in order: n attempts suffice unless others start processes at the same time.
    for _ in range(_PID_ATTEMPTS * classes):
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment},
            pass_fds=(control_descriptor, *spec.descriptors),
            process_group=0,
        )
        if popen.pid % classes == rest:
            return popen
        popen.kill()
        popen.communicate()
    raise LauncherError(
        "no_process_id",
        f"{spec.name} got no process id that leaves {rest} when divided by {classes}: other processes of this "
        "container start all the time; remove them",
    )


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, "real-time")
