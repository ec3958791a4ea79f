from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from minisgl.kernels.compile.flashinfer_setup import lean_package


def test_the_package_is_imported_on_first_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "heavy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .other import VALUE\nfrom . import other\n")
    (folder / "light.py").write_text("from . import helper\nNAME = helper.NAME\n")
    (folder / "helper.py").write_text("NAME = 'light'\n")
    (folder / "other.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = lean_package("heavy_package")
    try:
        assert importlib.import_module("heavy_package.light").NAME == "light"
        assert package.light.NAME == "light"
        assert "heavy_package.other" not in sys.modules
        assert lean_package("heavy_package") is package
        with pytest.raises(AttributeError):
            getattr(package, "missing")  # noqa: B009 - the type checker knows that it is missing
        assert package.VALUE == package.other.VALUE == 7
    finally:
        for name in [name for name in sys.modules if name.startswith("heavy_package")]:
            del sys.modules[name]


def test_a_missing_package_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="no package minisgl_nowhere"):
        lean_package("minisgl_nowhere")
