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
from contextlib import suppress
from typing import Any, BinaryIO, ClassVar, Final, Protocol, cast

import msgspec

from minisgl import logging as log
from minisgl.launcher import control
from minisgl.launcher.prctl import adopt_descendants

_LAST_WORDS: Final = 20
"""Lines of output that the message about an exit quotes: warnings and errors, not older than the seconds below, because
an older one would pass for the cause."""
_LAST_WORDS_SECONDS: Final = 10.0

_READ_BYTES: Final = 1 << 16

_IMPORT_NICENESS: Final = 10
"""Of a standby's imports beside processes that serve: where cores are short they get a tenth of the share of those."""


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
    """Modules whose import takes long: a standby imports them ahead, and forks the process. Empty: none does."""
    pid_residue: tuple[int, int] = (0, 1)
    """(r, n): the fork's process id is r modulo n, so that of n such processes in n containers, each with process ids
    of its own, no two have the same id."""


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
    The data of the selector's keys is the callback."""

    def __init__(
        self,
        spec: ProcessSpec,
        selector: selectors.BaseSelector,
        log_level: str,
        on_line: Callable[[log.Line], None],
        standby: Standby | None = None,
    ) -> None:
        """Start the process, as a fork of `standby` if there is one; then environment and descriptors are those of the
        standby."""
        self.spec = spec
        self.name = spec.name
        self.drains = spec.drains
        self.is_ready = False
        self.progress = "starting"
        self.start_error: control.StartError | None = None
        self.ready_message = control.Ready()
        self.terminated_by_us = False
        self.heartbeat: control.Heartbeat | None = None
        self.stall = ""
        self._on_line = on_line
        self._selector = selector
        self._last_words: deque[tuple[float, str]] = deque(maxlen=_LAST_WORDS)
        self._control_rest = b""
        self._output_rest = b""
        self._standby = standby
        self._running: subprocess.Popen[bytes] | _Fork
        self._control, peer = socket.socketpair()
        with peer:
            self._running, self._output = self._start(peer)
        self._begin(log_level)
        self._control.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        selector.register(self._control, selectors.EVENT_READ, self._read_control)
        selector.register(self._output, selectors.EVENT_READ, self._read_output)

    def _start(self, peer: socket.socket) -> tuple[subprocess.Popen[bytes] | _Fork, BinaryIO]:
        if self._standby is not None:
            return _Fork(self._standby), self._standby.fork(peer, self.spec.pid_residue)
        return _spawn(self.spec, peer.fileno(), ())

    def _begin(self, log_level: str) -> None:
        name, target = self.spec.name, self.spec.target
        config = msgspec.Raw(msgspec.json.encode(self.spec.config))
        self.send(control.Start(name=name, target=target, config=config, log_level=log_level, heartbeats=True))

    @property
    def label(self) -> str:
        return self.name if self._running.pid is None else f"{self.name} (pid {self._running.pid})"

    @property
    def pid(self) -> int:
        """Process id. A fork has one once it is ready, at the latest."""
        assert self._running.pid is not None
        return self._running.pid

    @property
    def came_from(self) -> Standby | None:
        """The standby that has forked it."""
        return self._standby

    @property
    def alive(self) -> bool:
        return self._running.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None while it runs."""
        return self._running.poll()

    def send(self, message: control.ToChild) -> None:
        try:
            self._control.sendall(control.encode(message))
        except OSError:
            # It is dead or does not listen: its exit code is the better explanation.
            return

    def signal(self, number: signal.Signals) -> None:
        self.terminated_by_us |= self.alive
        if self.alive and self._running.pid is None:
            # Then the standby cannot tell its id, and does not let it begin. It may have done so just before.
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._read_control()
        self._running.send_signal(number)

    def dump_stacks(self) -> None:
        """Have it write its stacks to its output. One that is stopped, or stuck in the kernel, does not."""
        self._running.send_signal(control.STACKS_SIGNAL)

    def kill_and_close(self) -> None:
        if self.alive:
            self.signal(signal.SIGKILL)
        self._running.wait()
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
        code = self._running.returncode
        assert code is not None
        if self.start_error is not None:
            return f"{self.name}: {self.start_error.message} ({self.start_error.code})"
        if self._running.pid is None and self._standby is not None and not self._standby.alive:
            return f"{self.name} was not started, because {self._standby.describe_exit()}"
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
            self._handle(control.from_child.decode(line))
        if isinstance(self._running, _Fork) and self._control not in self._selector.get_map():
            self._running.has_channel = False

    def _handle(self, message: control.FromChild) -> None:
        match message:
            case control.Ready():
                self.is_ready = True
                self.ready_message = message
            case control.Progress():
                self.progress = message.text
            case control.StartError():
                self.start_error = message
                if isinstance(self._running, _Fork):
                    self._running.refused()
            case control.Heartbeat():
                self.heartbeat = message
            case control.Forked() if isinstance(self._running, _Fork):
                self._running.begun(message.pid)

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


class Standby(Process):
    """A child that has imported modules and forks processes, which share the memory of the imports with it."""

    def __init__(
        self,
        name: str,
        spec: ProcessSpec,
        selector: selectors.BaseSelector,
        log_level: str,
        on_line: Callable[[log.Line], None],
        *,
        wait_for_cores: bool,
    ) -> None:
        """Start a standby for processes with the modules, environment and descriptors of `spec`. wait_for_cores:
        where cores are short, its imports leave them to processes that serve."""
        self.has_imported = False
        self._imports = str(_IMPORT_NICENESS if wait_for_cores else 0), *spec.preload
        work = msgspec.structs.replace(spec, name=f"standby-{name}", target="", config=None, drains=False)
        super().__init__(work, selector, log_level, on_line)

    def fork(self, peer: socket.socket, pid_residue: tuple[int, int]) -> BinaryIO:
        """Ask for a process with this end of a control channel; returns its output. It starts once the imports are
        done. If the standby exits, both streams end."""
        output, written = os.pipe()
        try:
            socket.send_fds(self._control, [control.encode(control.Fork(pid_residue))], [peer.fileno(), written])
        except OSError:
            # It has exited, or reads nothing and has too many requests already: then it is of no use either.
            self.signal(signal.SIGKILL)
        finally:
            os.close(written)
        return os.fdopen(output, "rb", buffering=0)

    def _start(self, peer: socket.socket) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        return _spawn(self.spec, peer.fileno(), self._imports)

    def _begin(self, log_level: str) -> None:
        """It has no work but to wait for requests."""

    def _handle(self, message: control.FromChild) -> None:
        self.has_imported |= isinstance(message, control.Imported)


class _Fork:
    """A process that a standby forks, as `subprocess.Popen` shows one. The kernel makes it a child of this process."""

    _pending: ClassVar[set[_Fork]] = set()

    def __init__(self, standby: Standby) -> None:
        self.pid: int | None = None
        """None: the standby still imports."""
        self.returncode: int | None = None
        self.has_channel = True
        """The other end of its control channel is open."""
        self._standby = standby
        # As long as one is on its way; other orphans are those of process 1, which reaps them.
        self._pending.add(self)
        adopt_descendants(True)

    def begun(self, pid: int) -> None:
        """The standby has forked it."""
        self.pid = pid
        self._settle()

    def refused(self) -> None:
        """It has reported a start error; without a process id, the standby has done so for it."""
        if self.pid is None:
            self._end(1)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is not None:
            return
        if self.pid is not None:
            os.kill(self.pid, number)
        elif number in (signal.SIGTERM, signal.SIGKILL):
            self._end(-number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is not None:
            return self.returncode
        if self.pid is not None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        elif not self.has_channel and (code := self._standby.exit_code) is not None:
            self._end(code or 1)
        return self.returncode

    def _end(self, code: int) -> None:
        self.returncode = code
        self._settle()

    def _settle(self) -> None:
        self._pending.discard(self)
        adopt_descendants(bool(self._pending))


def _spawn(spec: ProcessSpec, peer: int, imports: Sequence[str]) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Start the program of a child with its end of the control channel. imports: niceness and modules of a standby."""
    popen = subprocess.Popen(
        [*(sys.executable, "-P", "-m", "minisgl.launcher.child"), spec.name, str(peer), str(os.getpid()), *imports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **spec.environment},
        pass_fds=(peer, *spec.descriptors),
        process_group=0,
    )
    assert popen.stdout is not None
    return popen, cast(BinaryIO, popen.stdout)


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, "real-time")
