"""The kernels of a decode step against float64. Without a GPU they are interpreted; tests/gpu has the same on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from support.decode_kernels import CASES


@pytest.fixture(scope="module")
def faults() -> Any:
    command = [sys.executable, "-m", "support.decode_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_float64_does(faults: dict[str, str | None], name: str) -> None:
    assert faults[name] is None
