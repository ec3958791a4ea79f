"""Golden manifests: everything the operator applies for each example, for people to review.

A test compares the files; `PYTHONPATH=operator:tests .venv/bin/python -m support.cluster.golden_manifests` writes them.
The smallest example is kept whole. Every other example is a diff against it, object by object: `===` heads an object of
both, followed by its hunks; `---` one that only the smallest example has; `+++` one that only this one has, in full.
`@@` gives the path of the hunk's first line. All objects are listed in the order in which they are rendered, and a path
occurs once in an object, so the diff and the smallest example determine the rendered text.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import yaml

from support.cluster.example_models import EXAMPLES, children_of

FOLDER = Path(__file__).parents[2] / "operator" / "render" / "golden"
BASE_EXAMPLE = "smallest"
BASE_FILE = FOLDER / f"{BASE_EXAMPLE}.yaml"
_NO_LIMIT = 2**31 - 1
COMMAND = "PYTHONPATH=operator:tests .venv/bin/python -m support.cluster.golden_manifests"


def path_of(example: str) -> Path:
    return BASE_FILE if example == BASE_EXAMPLE else FOLDER / f"{example}.diff"


def golden(example: str, base: str) -> str:
    """Text of an example's file, where `base` is the whole text of the smallest example."""
    rendered = rendered_text(example)
    if example == BASE_EXAMPLE:
        return rendered
    name, base_name = EXAMPLES[example].name, EXAMPLES[BASE_EXAMPLE].name
    lines = [f"Differences from {BASE_FILE.name}"]
    if name != base_name:
        assert base_name not in rendered, "two names would read as one"
        rendered = rendered.replace(name, base_name)
        lines.append(f"{base_name} stands for {name}")
    return "\n".join([*lines, *_differences(_objects(base), _objects(rendered)), ""])


def rendered_text(example: str) -> str:
    """YAML in the order of rendering, with one line for each scalar and without aliases."""
    return yaml.dump_all(children_of(example), Dumper=_Dumper, sort_keys=False, width=_NO_LIMIT)


class _Dumper(yaml.CSafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


@cache
def _objects(text: str) -> dict[str, str]:
    """Text of each object by `kind/name`."""
    objects: dict[str, str] = {}
    for document in text.split("---\n"):
        body = yaml.load(document, yaml.CSafeLoader)
        ref = f"{body['kind']}/{body['metadata']['name']}"
        assert ref not in objects, f"{ref} is rendered twice"
        objects[ref] = document
    return objects


def _differences(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    old_refs, new_refs = list(old), list(new)
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old_refs, new_refs, autojunk=False).get_opcodes():
        if tag == "equal":
            for ref in old_refs[i1:i2]:
                yield f"=== {ref}"
                yield from _hunks(old[ref], new[ref])
            continue
        yield from (f"--- {ref}" for ref in old_refs[i1:i2])
        for ref in new_refs[j1:j2]:
            yield f"+++ {ref}"
            yield from (f"+{line}" for line in new[ref].splitlines())


def _hunks(old: str, new: str) -> Iterator[str]:
    """Hunks of a unified diff with one line of context."""
    old_lines, new_lines, paths = old.splitlines(), new.splitlines(), _paths(old)
    for hunk in SequenceMatcher(None, old_lines, new_lines, autojunk=False).get_grouped_opcodes(1):
        yield f"@@ {paths[hunk[0][1]]} @@"
        for tag, i1, i2, j1, j2 in hunk:
            if tag == "equal":
                yield from (f" {line}" for line in old_lines[i1:i2])
            else:
                yield from (f"-{line}" for line in old_lines[i1:i2])
                yield from (f"+{line}" for line in new_lines[j1:j2])


@cache
def _paths(text: str) -> list[str]:
    """Path of the field on each line, such as `spec.template.spec.containers[0].args[3]`."""
    paths: dict[int, str] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}".lstrip(".")
                paths[key.start_mark.line] = below
                visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                paths[item.start_mark.line] = f"{path}[{index}]"
                visit(item, f"{path}[{index}]")

    visit(yaml.compose(text, yaml.CSafeLoader), "")
    assert len(set(paths.values())) == len(text.splitlines()), "a scalar takes several lines"
    return [paths[line] for line in range(len(paths))]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.iterdir():
        stale.unlink()
    for each in EXAMPLES:
        path_of(each).write_text(golden(each, rendered_text(BASE_EXAMPLE)))
