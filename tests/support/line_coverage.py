"""Which lines of the packages with a limit are reached, without a tracer.

When a module of these packages is imported, each of its statements gets one before it that notes its line. A tracer
makes all Python code twice as slow, that of tests and libraries as well. What was noted is written as data of
coverage.py, which combines those of all processes, reports them and holds the limits.
"""

from __future__ import annotations

import ast
import atexit
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_SOURCES: Final = ("runtime", "operator")
_NOTED: Final = "__noted_lines__"
"""Global variable of a module: a list with True for each line that was reached."""
DATA: Final = "COVERAGE_NOTE_LINES"
"""Variable with which a process notes lines: the files that it writes begin with this path."""


class LineCoverage:
    """Finder of the modules whose lines are noted."""

    def __init__(self, data: str) -> None:
        """`data`: beginning of the path of the file to write."""
        self.data = data
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
        self._packages: list[str] = settings["tool"]["coverage"]["run"]["source"]
        self._noted: dict[str, list[bool]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.measures(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin, self._noted)
        return spec

    def write(self) -> None:
        """Write the file of this process, if it has imported anything of the packages."""
        from coverage import CoverageData

        if not self._noted:
            return
        data = CoverageData(basename=self.data, suffix=True)
        data.add_lines({path: [line for line, noted in enumerate(all) if noted] for path, all in self._noted.items()})
        # Those that nothing imports count too.
        data.touch_files([str(path) for path in self._files()])
        data.write()

    def measures(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def _files(self) -> list[Path]:
        folders = [ROOT / folder / package.replace(".", "/") for package in self._packages for folder in _SOURCES]
        return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def start_if_wanted() -> None:
    """Note lines of this process from now on if the environment says so. Called before anything of the packages is
    imported."""
    data = os.environ.get(DATA)
    if data is None:
        return
    finder = LineCoverage(data)
    early = [name for name in sys.modules if finder.measures(name)]
    assert not early, f"imported before their lines are noted: {early}"
    sys.meta_path.insert(0, finder)


def write() -> None:
    """Write what was noted, if anything was."""
    finder = _started()
    if finder is not None:
        finder.write()


def environment_of_child(data: str | None = None) -> dict[str, str]:
    """Environment in which a Python program notes its lines, but not those of programs that it starts. Without `data`
    as this process does; empty if it notes none."""
    finder = _started()
    if data is None and finder is not None:
        data = finder.data
    if data is None:
        return {}
    return {DATA: data, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "line_coverage_child"), *sys.path])}


def start_in_child() -> None:
    """Note lines until the process ends."""
    start_if_wanted()
    if os.environ.pop(DATA, None) is not None:
        atexit.register(write)


def _started() -> LineCoverage | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, LineCoverage)), None)


class _Loader(SourceFileLoader):
    """Loader of a module whose lines are noted."""

    def __init__(self, name: str, path: str, noted: dict[str, list[bool]]) -> None:
        super().__init__(name, path)
        self._all_noted = noted

    def get_code(self, fullname: str) -> CodeType:
        # Without the bytecode that is kept beside the source.
        return compile(noting(self.get_data(self.path)), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        lines = self.get_data(self.path).count(b"\n") + 2
        vars(module)[_NOTED] = self._all_noted.setdefault(self.path, [False] * lines)
        super().exec_module(module)


def noting(source: bytes | str) -> ast.Module:
    """Return a module whose statements note their lines."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for part in ("body", "orelse", "finalbody"):
            statements = getattr(node, part, None)
            # That of a lambda is an expression.
            if isinstance(statements, list) and statements:
                setattr(node, part, _with_notes(node, statements))
    return tree


def _with_notes(parent: ast.AST, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    noted: list[ast.stmt] = []
    early: list[int] = []
    if isinstance(parent, ast.ExceptHandler):
        early.append(parent.lineno)
    elif isinstance(parent, ast.match_case):
        early.append(parent.pattern.lineno)
    for place, statement in enumerate(statements):
        lines = [*(decorator.lineno for decorator in getattr(statement, "decorator_list", ())), statement.lineno]
        if _must_be_first(parent, place, statement):
            noted.append(statement)
            early += lines
            continue
        noted += [_note(line, statement) for line in (*early, *lines)]
        early = []
        noted.append(statement)
    return noted + [_note(line, statements[-1]) for line in early]


def _must_be_first(parent: ast.AST, place: int, statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return (
        place == 0
        and isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _note(line: int, beside: ast.stmt) -> ast.stmt:
    """`__noted_lines__[line] = True`"""
    target = ast.Subscript(ast.Name(_NOTED, ast.Load()), ast.Constant(line), ast.Store())
    note = ast.copy_location(ast.Assign([target], ast.Constant(True)), beside)
    # A statement of several lines ends where it begins: a traceback shows what failed, never a note.
    note.end_lineno, note.end_col_offset = note.lineno, note.col_offset
    ast.fix_missing_locations(note)
    return note
