"""Every page is found from the README, and a long page from its own beginning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
INDEX: Final = ROOT / "docs" / "README.md"
PAGES: Final = sorted(path for path in (ROOT / "docs").rglob("*.md") if path != INDEX)
GENERATED: Final = {"cli.md", "inference-model.md"}

LONG: Final = 300
"""Lines from which on a page begins with its contents."""
LONGEST: Final = 400
"""Lines of a page that is written by hand: more than that are two pages."""


def _links(page: Path) -> list[Path]:
    """Files of this project that the page links to, once for each link."""
    found = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return [(page.parent / target).resolve() for target in found]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_readme_leads_to_the_index_and_the_index_to_each_page_once() -> None:
    assert INDEX in _links(ROOT / "README.md")
    linked = [path for path in _links(INDEX) if path.suffix == ".md" and path.is_relative_to(INDEX.parent)]
    assert sorted(linked) == PAGES


def test_the_index_has_a_part_for_each_reader_and_a_line_for_each_page() -> None:
    text = INDEX.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Use it", "Operate it", "Extend it"]
    assert len(re.findall(r"^\| \[[\w/-]+\.md\]\([^)]+\) \| \w.* \|$", text, re.MULTILINE)) == len(PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_a_page_is_not_too_long(page: Path) -> None:
    assert page.read_text().count("\n") <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_long_page_begins_with_its_contents(page: Path) -> None:
    text = page.read_text()
    if text.count("\n") > LONG:
        beginning, *_ = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert {_anchor(heading) for heading in headings} <= set(re.findall(r"\]\(#([^)]+)\)", beginning))


@pytest.mark.parametrize("page", [INDEX, *PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_within_a_page_lead_to_its_headings(page: Path) -> None:
    text = page.read_text()
    anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
