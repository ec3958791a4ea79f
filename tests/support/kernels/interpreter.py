"""Kernels run by Triton's interpreter, which a process decides for when it imports Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def interpreted(module: str) -> Any:
    """Run `module` as a program of its own and return the JSON that it prints."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
