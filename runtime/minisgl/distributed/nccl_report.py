"""Transport that NCCL uses between the ranks, from its own log."""

from __future__ import annotations

import os
import re
import tempfile
from types import TracebackType


class NcclReport:
    """Redirects NCCL's start-up log to a file while it is open; `transport()` then summarizes it.

    NCCL reads its settings once per process, at the first communicator: a later group of the same process reports
    an unknown transport. A debug level set by the user is kept.
    """

    def __init__(self) -> None:
        self._text = ""
        self._file: str | None = None

    def __enter__(self) -> NcclReport:
        # NVLink multicast (NVLS) needs fabric rights that containers often lack, and then hangs instead of failing.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if "NCCL_DEBUG" not in os.environ:
            descriptor, self._file = tempfile.mkstemp(prefix="minisgl-nccl-", suffix=".log")
            os.close(descriptor)
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH", NCCL_DEBUG_FILE=self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
            os.environ.pop(name, None)
        with open(self._file, encoding="utf-8", errors="replace") as file:
            self._text = file.read()
        # NCCL keeps its descriptor; the name is no longer needed.
        os.unlink(self._file)

    def transport(self) -> str:
        return describe(self._text)


def describe(log: str) -> str:
    """One line from NCCL's INIT and GRAPH log, such as `NCCL, P2P/CUMEM over NVLink` or `NCCL, NET/Socket`."""
    kinds = sorted(set(re.findall(r" via ((?:P2P|SHM|NET|COLLNET|NVLS)[A-Za-z0-9/]*)", log)))
    if not kinds:
        return "NCCL, transport unknown"
    nvlink = any(kind.startswith("P2P") for kind in kinds) and re.search(r"\bNVL\[", log) is not None
    return "NCCL, " + " and ".join(kinds) + (" over NVLink" if nvlink else "")
