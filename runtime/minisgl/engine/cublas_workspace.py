"""Memory that cuBLAS may use beside the operands of a product: none."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

_NO_WORKSPACE: Final = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def multiply_without_workspace(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let cuBLAS and cuBLASLt of this process choose only kernels that need no workspace, unless the user has set its
    size. Both read the variables before their first product.

    With a workspace, persistent kernels count their tiles in it. Each waits for a memset, during which the device idles
    for 5 µs, and small prompts of large models are split over their inputs, which takes longer there.
    """
    for name, value in _NO_WORKSPACE.items():
        environment.setdefault(name, value)
