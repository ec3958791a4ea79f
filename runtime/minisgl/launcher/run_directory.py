"""The run directory: a private directory with the sockets of one launcher.

It must not outlive the launcher, even one that is killed with SIGKILL. Three processes remove it: the launcher at a
normal exit; a shell that waits until the launcher's end of a pipe closes; and, where both were killed, the next
launcher, which removes directories whose lock is free. A lock, unlike a process id, is never mistaken for that of
another process or another container.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "minisgl-"
_LOCK: Final = "lock"

LONGEST_SOCKET_NAME: Final = 24
_LONGEST_SOCKET_PATH: Final = 107
"""sun_path in unix(7), without the closing NUL."""


@contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create a directory below `parent` (None: the system's temporary directory), only for this user; it is removed at
    the end."""
    parent = parent or _short_parent()
    remove_stale(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _lock_new(path)
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", 'cat >/dev/null; rm -rf -- "$1"', "minisgl-janitor", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        process_group=0,
    )
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        janitor.communicate()
        os.close(lock)


def remove_stale(parent: Path) -> list[Path]:
    """Remove the run directories of this user below `parent` that no live launcher has locked; returns them."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed


def _lock_new(path: Path) -> int:
    """Lock the file before it gets its name: `remove_stale` never sees it free."""
    unnamed = path / f".{_LOCK}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(path / _LOCK)
    return lock


def _short_parent() -> Path:
    """The temporary directory, or /tmp where its path is too long for a socket below it."""
    parent = Path(tempfile.gettempdir())
    longest = len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678/") + LONGEST_SOCKET_NAME
    return parent if longest <= _LONGEST_SOCKET_PATH else Path("/tmp")
