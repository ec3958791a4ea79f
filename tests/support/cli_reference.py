"""Generate docs/cli.md, the table of docs/configuration.md and those of docs/migrating-from-vllm.md from the program:
`python -m support.cli_reference` writes them, a test compares them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from minisgl.cli.main import build_parser
from minisgl.flags.foreign import MODEL, SGLANG, VLLM, ForeignFlag
from minisgl.flags.settings import Setting

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
CONFIGURATION_PAGE = PAGE.with_name("configuration.md")
MIGRATION_PAGE = PAGE.with_name("migrating-from-vllm.md")

_INTRODUCTION = """# Command line

`minisgl COMMAND`, or `python -m minisgl COMMAND`. Flags cannot be abbreviated. The exit code is 0 on success, 1 on
an error (one line on stderr states what is wrong and what to do), 2 for a wrong command line.

Completion of commands and flags in the shell, until it ends, or always with the same line in the shell's start-up file:
`source <(minisgl completion bash)`, likewise for zsh, and `minisgl completion fish | source`.

This page is generated from the program by `python -m support.cli_reference`.

Contents: {contents}.
"""


def render() -> str:
    found = list(commands(build_parser()))
    contents = ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name, _ in found)
    return "\n".join([_INTRODUCTION.format(contents=contents), *(_section(*command) for command in found)])


def render_configuration() -> str:
    """Text of docs/configuration.md with a new table, which is the last part of the page."""
    [serve] = [parser for name, parser in commands(build_parser()) if name == "minisgl serve"]
    settings = serve.get_default("settings")
    rows = [f"| `{each.key}` | `{each.variable}` | {_flag(each)} |" for each in settings.all]
    table = "\n".join(["| key | variable | flag |", "|---|---|---|", *rows])
    before, heading, _ = CONFIGURATION_PAGE.read_text().partition("## All of them\n")
    return f"{before}{heading}\n{table}\n"


def render_migration() -> str:
    """Text of docs/migrating-from-vllm.md with new tables, which are the last part of the page."""
    before = MIGRATION_PAGE.read_text().partition("## Flags of vLLM\n")[0]
    tables = [_foreign(server, flags) for server, flags in (("vLLM", VLLM), ("SGLang", SGLANG))]
    return before + "\n".join(tables)


def _foreign(server: str, flags: Sequence[ForeignFlag]) -> str:
    lines = [f"## Flags of {server}", "", f"| {server} | minisgl | accepted | note |", "|---|---|---|---|"]
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in flag.names)
        needless = flag.words == () and flag.ours != MODEL
        words = " ".join(flag.words or (flag.ours,))
        ours = "not needed" if needless else f"`{words}`" if words else "none"
        accepted = "no" if flag.words is None else "yes"
        lines.append(f"| {names} | {ours} | {accepted} | {flag.note} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _flag(setting: Setting) -> str:
    return f"`{(setting.action.option_strings or [str(setting.action.metavar)])[0]}`"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands without subcommands, with their full names."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for child in group.choices.values():
            yield from commands(child)


def flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"## {name}", "", parser.description or "", ""]
    if flags(parser):
        lines += ["| argument | meaning | default and unit |", "|---|---|---|", *map(_row, flags(parser)), ""]
    return "\n".join(lines)


def _row(action: argparse.Action) -> str:
    parts = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", action.help or "", re.DOTALL)
    assert parts is not None
    meaning, default = parts.groups()
    name = f"`{' '.join([*action.option_strings[:1], *_value(action)])}`"
    return f"| {name} | {meaning} | {default or 'required'} |".replace("|`", "| `")


def _value(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.choices:
        return ["\\|".join(map(str, action.choices))]
    metavar = action.metavar if action.metavar is not None else action.dest.upper()
    return [metavar if isinstance(metavar, str) else " ".join(metavar)]


if __name__ == "__main__":
    PAGE.write_text(render())
    CONFIGURATION_PAGE.write_text(render_configuration())
    MIGRATION_PAGE.write_text(render_migration())
