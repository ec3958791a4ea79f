"""The operator imports the bodies and ports of /status; `tests/runtime/compat` has the bodies themselves."""

from __future__ import annotations

import subprocess
import sys


def test_the_operator_can_import_the_module_without_numpy() -> None:
    code = "import sys, minisgl.wire.status; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
