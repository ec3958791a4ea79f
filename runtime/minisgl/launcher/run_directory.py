"""The private directory that holds the sockets of one running group.

It must not outlive its group, even when the launcher is killed with SIGKILL. Three parties see to that: the launcher
at a normal exit; a shell that waits for the launcher's end of a pipe to close; and, where both were killed at once, the
next launcher, which removes directories whose lock is free. A lock, unlike a process id, cannot be taken for that of
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
    """A new directory below `parent` (the system's temporary directory), only for this user, gone at the end."""
    parent = parent or _short_parent()
    sweep(parent)
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


def sweep(parent: Path) -> list[Path]:
    """Remove the directories of this user below `parent` that no live launcher holds; returns them."""
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
    """Take the lock before it gets its name: a sweep never sees it free."""
    unnamed = path / f".{_LOCK}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(path / _LOCK)
    return lock


def _short_parent() -> Path:
    """The temporary directory, unless its name leaves no room for a socket's path."""
    parent = Path(tempfile.gettempdir())
    longest = len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678/") + LONGEST_SOCKET_NAME
    return parent if longest <= _LONGEST_SOCKET_PATH else Path("/tmp")
