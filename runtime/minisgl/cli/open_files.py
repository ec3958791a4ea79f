"""Limit of open files, of which each connection is one."""

from __future__ import annotations

import resource


def raise_limit() -> None:
    """Raise the soft limit of this process, and of the processes that it starts, to the hard limit. Shells and service
    managers set a low one, mostly 1,024, only for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # A hard limit that is above the kernel's own. The server warns when the one that remains is nearly used up.
        return
