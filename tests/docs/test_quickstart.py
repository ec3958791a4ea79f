"""docs/quickstart.py with the built wheel and what `minisgl[serve]` brings: from nothing to an answer, and to nothing
left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minisgl.toy.demo_answers import DEMO_ANSWERS
from support.demo_checkpoint import demo_checkpoint
from support.frontend.served import RUNTIME
from support.wheel import build_wheel, install

_QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.py"


def test_quickstart(tmp_path: Path) -> None:
    programs = install(build_wheel(tmp_path), tmp_path / "environment", extras=("serve",), beside=("openai",))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="quick-") as temporary:
        done = subprocess.run(
            [programs / "python", str(_QUICKSTART), "--once", "--checkpoint", str(demo_checkpoint())],
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"},
        )
        left = list(Path(temporary).iterdir())
    assert done.returncode == 0, done.stderr
    [answer] = re.findall(r"answer: (.*)", done.stdout)
    assert answer in [known.answer for known in DEMO_ANSWERS if "What does a scheduler do?" in known.questions]
    assert re.search(r"listens on http://127\.0\.0\.1:\d+/v1", done.stdout)
    assert left == []


def test_the_page_s_python_without_a_server_runs() -> None:
    page = _QUICKSTART.with_suffix(".md").read_text().partition("## Without a server")[2]
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # Tests share the machine: little of its memory is enough.
    code = code.replace('LLM(".cache/demo")', f"LLM({str(demo_checkpoint())!r}, num_pages=256)")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in [
        known.answer for known in DEMO_ANSWERS if "What is a page?" in known.questions
    ]
