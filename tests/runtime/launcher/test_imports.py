"""Packages that start fast do not import slow modules, checked by sys.modules in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.frontend.served import RUNTIME

_FAST = {
    "minisgl": ("torch", "transformers", "numpy"),
    "minisgl.config": ("torch", "transformers", "numpy"),
    "minisgl.logging": ("torch", "transformers", "numpy"),
    "minisgl.wire.messages": ("torch", "transformers"),
    "minisgl.wire.sockets": ("torch", "transformers"),
    "minisgl.scheduler.process": ("torch", "transformers"),
    "minisgl.router.worker": ("torch", "transformers", "fastapi"),
    "minisgl.frontend.process": ("torch", "transformers"),
    "minisgl.launcher.child": ("torch", "transformers", "fastapi", "numpy"),
    "minisgl.launcher.serve": ("torch", "transformers", "fastapi"),
    "minisgl.replica.engine_pod": ("torch", "transformers", "fastapi", "uvicorn", "jinja2"),
    "minisgl.cli.main": ("torch", "transformers", "fastapi"),
    "minisgl.hub.check": ("torch", "transformers", "fastapi", "huggingface_hub"),
    "minisgl.hub.fetch": ("torch", "transformers", "fastapi", "huggingface_hub"),
    "minisgl.hub.resolve": ("torch", "transformers", "fastapi", "huggingface_hub", "boto3", "botocore"),
    "minisgl.offline": ("torch", "transformers", "fastapi"),
}


@pytest.mark.parametrize("module", _FAST)
def test_import_does_not_load_slow_modules(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {_FAST[module]!r} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout.split(), done.stderr) == ([], "")
