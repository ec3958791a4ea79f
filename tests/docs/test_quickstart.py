"""`make run` without its installation: docs/quickstart.py from nothing to an answer, and to nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from support.served import RUNTIME

_QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.py"


def test_quickstart(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="quick-") as temporary:
        done = subprocess.run(
            [sys.executable, str(_QUICKSTART), "--once", "--checkpoint", str(tmp_path / "model")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(RUNTIME), "TMPDIR": temporary, "OMP_NUM_THREADS": "1"},
        )
        left = list(Path(temporary).iterdir())
    assert done.returncode == 0, done.stderr
    assert re.search(r"answer: .*\S", done.stdout)
    assert re.search(r"listens on http://127\.0\.0\.1:\d+/v1", done.stdout)
    assert left == []
