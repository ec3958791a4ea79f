"""Results, logs and the changelog grow with every measurement and every change; these limits keep them readable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"
PERFORMANCE: Final = ROOT / "docs" / "performance.md"
LOG: Final = ROOT / "docs" / "performance-log.md"
CHANGELOG: Final = ROOT / "CHANGELOG.md"

RESULT_FILES: Final = 60
"""What the tables of today quote, not what was ever measured: older runs are in the history."""
RESULT_LINES: Final = 3_000
"""A figure and its command take some lines; logs of runs would soon be longer than the runtime."""
PERFORMANCE_LINES: Final = 260
"""One table a question. Add 20 for each further family of models or feature that has figures of its own."""
LOG_LINES: Final = 100
"""One line for each attempt that did not help."""
UNRELEASED_BYTES: Final = 15_000
"""What a reader of the last version looks through before an upgrade, not the diary of the version in work."""

_NAMED: Final = (re.compile(r"benchmarks/results/([\w.*-]+)"), re.compile(r"(20\d\d-\d\d-\d\d-h\d+[\w.-]*)"))
"""Files and directories by their path, and directories of one session of measurements, such as `DATE-h200-restart`."""


def _text_files() -> Iterator[Path]:
    """Documentation, code and scripts of the tree, found without git so that an export will do."""
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".") or path.name == ".ci"]
    for top in tops:
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in ("", ".md", ".py", ".sh", ".toml", ".yaml") and path.is_file():
                yield path


def _named_results(text: str) -> Iterator[str]:
    for pattern in _NAMED:
        for found in pattern.finditer(text):
            # Behind a commit and a colon it is a name in the history: `git show COMMIT:benchmarks/results/NAME`.
            if text[max(0, found.start() - 1) : found.start()] != ":":
                yield found[1].rstrip(".")


def _results() -> list[Path]:
    return [path for path in sorted(RESULTS.rglob("*")) if path.is_file()]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_results_are_few_and_short() -> None:
    lines = {str(path.relative_to(RESULTS)): _lines(path) for path in _results()}
    assert len(lines) <= RESULT_FILES
    assert sum(lines.values()) <= RESULT_LINES, lines


def test_benchmarks_have_no_patches() -> None:
    assert list((ROOT / "benchmarks").rglob("*.patch")) == []


@pytest.mark.parametrize(
    ("page", "limit"), [(PERFORMANCE, PERFORMANCE_LINES), (LOG, LOG_LINES)], ids=["performance", "log"]
)
def test_pages_of_measurements_keep_to_their_length(page: Path, limit: int) -> None:
    assert _lines(page) <= limit


def test_the_log_has_one_line_for_each_attempt() -> None:
    attempts = LOG.read_text().partition("\n## ")[2].splitlines()[1:]
    assert all(line.startswith(("- ", "## ")) or not line for line in attempts)


def test_unreleased_changes_are_a_summary() -> None:
    unreleased = re.search(r"^## \[Unreleased\].*?(?=^## \[\d)", CHANGELOG.read_text(), re.MULTILINE | re.DOTALL)
    assert unreleased
    assert len(unreleased[0].encode()) <= UNRELEASED_BYTES


def test_results_that_are_named_are_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in _text_files()
        for name in _named_results(path.read_text(errors="replace"))
        if not list(RESULTS.glob(name))
    }
    assert missing == set(), "name the figure itself, or the commit that has the file"


def test_the_page_of_results_names_every_file_and_no_other() -> None:
    page = RESULTS / "README.md"
    table = "\n".join(line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `"))
    named = {"README.md", "h200.json", "continuity.json", *re.findall(r"`([\w.*-]+)`", table)}
    assert {path for name in named for path in RESULTS.glob(name)} == set(_results())
    assert all(list(RESULTS.glob(name)) for name in named)
