"""docs/conditions.md explains every condition and every reason, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl_operator.api.conditions import ConditionType, Reason

PAGE = Path(__file__).parents[3] / "docs" / "conditions.md"


def test_every_condition_has_a_section_and_every_reason_a_row() -> None:
    text = PAGE.read_text()
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert set(sections) == {type.value for type in ConditionType} | {"Health", "Phases", "Events"}
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) ?\|$", text, re.MULTILINE)
    assert {reason for reason, _, _ in rows} == {reason.value for reason in Reason}
    assert all(meaning.strip() for _, meaning, _ in rows)


def test_every_reason_is_used() -> None:
    package = Path(__file__).parents[3] / "operator" / "minisgl_operator"
    pages = [path for path in package.rglob("*.py") if path.name not in ("conditions.py", "transitions.py")]
    code = "\n".join(path.read_text() for path in pages)
    unused = [reason.name for reason in Reason if f"Reason.{reason.name}" not in code]
    assert not unused
