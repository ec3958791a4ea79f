"""One child of the launcher, seen from the launcher."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from minisgl import logging as log
from minisgl.launcher import control

_LAST_WORDS: Final = 20
"""Lines of output kept for the message about a death."""

_READ_BYTES: Final = 1 << 16


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


class Process:
    """A started child. `on_line` gets each line of its stdout and stderr."""

    def __init__(self, spec: ProcessSpec, log_level: str, on_line: Callable[[log.Line], None]) -> None:
        self.spec = spec
        self.is_ready = False
        self.progress = "starting"
        self.refusal: control.Refused | None = None
        self._on_line = on_line
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._control, theirs = socket.socketpair()
        self._control_rest = b""
        self._output_rest = b""
        with theirs:
            self._popen = subprocess.Popen(
                (
                    *(sys.executable, "-P", "-m", "minisgl.launcher.child"),
                    *(spec.name, str(theirs.fileno()), str(os.getpid())),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.environment},
                pass_fds=(theirs.fileno(), *spec.descriptors),
                process_group=0,
            )
        assert self._popen.stdout is not None
        self._output = self._popen.stdout
        config = msgspec.Raw(msgspec.json.encode(spec.config))
        self.send(control.Start(target=spec.target, config=config, log_level=log_level))
        self._control.setblocking(False)
        os.set_blocking(self._output.fileno(), False)

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
        """Have `selector` wake up for this child; the key's data is what to call then."""
        selector.register(self._control, selectors.EVENT_READ, lambda: self._read_control(selector))
        selector.register(self._output, selectors.EVENT_READ, lambda: self._read_output(selector))

    def send(self, message: control.ToChild) -> None:
        try:
            self._control.sendall(control.encode(message))
        except OSError:
            # It is gone or does not listen: its exit code says more.
            return

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> None:
        self._popen.wait()

    def close(self) -> None:
        """Give back the descriptors of a child that has ended."""
        self._control.close()
        self._output.close()

    def death(self) -> str:
        """Name, way and last words of a child that has ended."""
        self._read_output(None)
        self._read_control(None)
        code = self._popen.returncode
        if self.refusal is not None:
            return f"{self.spec.name}: {self.refusal.message} ({self.refusal.code})"
        if code < 0:
            how = f"was killed by signal {-code} ({_signal_name(-code)})"
            if code == -signal.SIGKILL:
                how += "; when nobody sent it, the machine ran out of memory"
        else:
            how = f"ended with exit code {code}"
        words = "".join(f"\n  | {line}" for line in self._last_words)
        return f"{self.spec.name} (pid {self.pid}) {how}" + (f". Its last words:{words}" if words else "")

    def _read_control(self, selector: selectors.BaseSelector | None) -> None:
        lines, self._control_rest = self._read_lines(self._control, self._control_rest, selector)
        for line in lines:
            message = control.from_child.decode(line)
            match message:
                case control.Ready():
                    self.is_ready = True
                case control.Progress():
                    self.progress = message.text
                case control.Refused():
                    self.refusal = message

    def _read_output(self, selector: selectors.BaseSelector | None) -> None:
        lines, self._output_rest = self._read_lines(self._output, self._output_rest, selector)
        for raw in lines:
            line = log.parse(raw.decode(errors="replace").rstrip(), self.spec.name)
            self._last_words.append(line.message)
            self._last_words.extend(line.traceback.splitlines())
            self._on_line(line)

    @staticmethod
    def _read_lines(source: Any, rest: bytes, selector: selectors.BaseSelector | None) -> tuple[list[bytes], bytes]:
        """Whole lines that are there, and the beginning of the next; at the end `selector` forgets the source."""
        while True:
            try:
                data = os.read(source.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                if selector is not None:
                    selector.unregister(source)
                rest = rest + b"\n" if rest else rest
                break
            # Progress bars draw over their line; here each drawing is a line.
            rest += data.replace(b"\r", b"\n")
        *lines, rest = rest.split(b"\n")
        return [line for line in lines if line], rest


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, "real-time")
