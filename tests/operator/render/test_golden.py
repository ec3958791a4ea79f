"""What is applied for each example, to be read by people. After a change on purpose:
`UPDATE_GOLDENS=1 pytest tests/operator/render`, and review the difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from minisgl_operator.render import render
from support.example_models import EXAMPLES
from support.inference_models import ENVIRONMENT

GOLDENS = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_are_as_reviewed(name: str) -> None:
    rendered = yaml.safe_dump_all(render(EXAMPLES[name], ENVIRONMENT), sort_keys=False, width=120)
    golden = GOLDENS / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)
    assert golden.exists(), "no golden file: run with UPDATE_GOLDENS=1"
    assert rendered == golden.read_text()


def test_there_is_no_golden_file_without_an_example() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(EXAMPLES)
