"""Process targets for tests of the launcher. Each reports by files in a directory that the test watches."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import msgspec

from minisgl.errors import CodedError
from minisgl.launcher.child import Control


class StubConfig(msgspec.Struct, kw_only=True):
    notes: str
    """Directory of these files."""
    words: str = ""
    exit_code: int = 0
    drain_until: str = ""
    """The drain ends when this file exists; empty: immediately."""


class StubError(CodedError):
    def __init__(self, message: str) -> None:
        super().__init__("stub_refused", message)


def serve(raw: msgspec.Raw, control: Control) -> None:
    """Become ready, then run until killed."""
    _config(raw)
    control.ready()
    signal.pause()


def never_ready(raw: msgspec.Raw, control: Control) -> None:
    control.progress("weights 40 %")
    note(_config(raw), "progressed")
    signal.pause()


def fail_to_start(raw: msgspec.Raw, control: Control) -> None:
    config = _config(raw)
    print(config.words, file=sys.stderr)
    sys.exit(config.exit_code)


def refuse_to_start(raw: msgspec.Raw, control: Control) -> None:
    raise StubError(_config(raw).words)


def raise_after_ready(raw: msgspec.Raw, control: Control) -> None:
    control.ready()
    raise RuntimeError(_config(raw).words)


def front(raw: msgspec.Raw, control: Control) -> None:
    """Act as a frontend: drain after SIGTERM; write the reason and exit when the launcher gives up."""
    config = _config(raw)
    end = threading.Event()

    def failed(message: str) -> None:
        note(config, "failed", message)
        end.set()

    def drain(*_: object) -> None:
        note(config, "draining")
        if not config.drain_until:
            end.set()

    control.on_gave_up(failed)
    signal.signal(signal.SIGTERM, drain)
    control.ready()
    while not end.wait(0.02):
        if config.drain_until and Path(config.drain_until).exists():
            break
    note(config, "ended")


def note(config: StubConfig, name: str, text: str = "") -> None:
    path = Path(config.notes) / name
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def _config(raw: msgspec.Raw) -> StubConfig:
    return msgspec.json.decode(raw, type=StubConfig)
