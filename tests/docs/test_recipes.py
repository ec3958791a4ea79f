"""docs/extend.md against the tree: its paths exist, and the files of the product that name an example are listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "extend.md"
PRODUCT: Final = ("runtime/minisgl", "operator/minisgl_operator")


class Recipe(NamedTuple):
    title: str
    examples: list[str]
    """Names in the code that show where an addition of this kind leaves traces."""
    paths: list[str]
    """Files and folders of the recipe, relative to the root."""

    def lists(self, file: str) -> bool:
        return any(file == path or (path.endswith("/") and file.startswith(path)) for path in self.paths)

    def names_an_example(self, text: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(example)}(?!\w)", text) for example in self.examples)


def _recipes() -> list[Recipe]:
    recipes = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        [examples] = re.findall(r"^Example: (.*)$", body, re.MULTILINE)
        table = "\n".join(line for line in body.splitlines() if line.startswith("| "))
        paths = re.findall(r"`([\w-]+/[\w./-]+)`", table)
        recipes.append(Recipe(title, re.findall(r"`([^`]+)`", examples), paths))
    return recipes


RECIPES: Final = _recipes()
each_recipe: Final = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)


def test_there_is_a_recipe_for_each_kind_of_addition() -> None:
    words = ("model", "format", "kernel", "condition", "field", "API")
    assert all(word in recipe.title for word, recipe in zip(words, RECIPES, strict=True))


@each_recipe
def test_every_path_of_a_recipe_is_in_the_tree(recipe: Recipe) -> None:
    missing = [
        path for path in recipe.paths if not (ROOT / path).exists() or path.endswith("/") != (ROOT / path).is_dir()
    ]
    assert missing == []
    assert len(set(recipe.paths)) == len(recipe.paths), "a file has one row"


@each_recipe
def test_every_file_of_the_product_that_names_the_example_is_in_the_recipe(recipe: Recipe) -> None:
    files = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if recipe.names_an_example(path.read_text())]
    assert found, f"nothing names {recipe.examples}: choose another example"
    assert [file for file in found if not recipe.lists(file)] == []


@each_recipe
def test_a_recipe_names_its_documentation_and_tests_that_have_the_example(recipe: Recipe) -> None:
    assert any(path.startswith("docs/") for path in recipe.paths)
    tests = [ROOT / path for path in recipe.paths if path.startswith("tests/")]
    sources = [file for path in tests for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert any(recipe.names_an_example(file.read_text()) for file in sources)
