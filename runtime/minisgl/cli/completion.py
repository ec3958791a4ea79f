"""`minisgl completion SHELL`: a script that completes commands, flags and choices, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_SHELLS: Final = ("bash", "zsh", "fish")

# Also for zsh, in which `path` and `words` are variables of the shell.
_BASH: Final = """\
_minisgl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" at=minisgl each offered= prefix=
    # `--flag=value` is three words in bash and one in zsh.
    if [[ $word == = ]]; then word=
    elif [[ $previous == = ]]; then previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    elif [[ $word == --*=* ]]; then previous="${{word%%=*}}" prefix="${{word%%=*}}=" word="${{word#*=}}"
    fi
    for each in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$at $each" in
        {commands}) at="$at $each" ;;
        esac
    done
    case "$at $previous" in
{values}
    *)
        case "$at" in
{words}
        esac
        ;;
    esac
    COMPREPLY=($(compgen -P "$prefix" -W "$offered" -- "$word"))
}}
# default: anything else is the name of a file, such as a model's directory.
complete -o default -F _minisgl minisgl
"""

_ZSH: Final = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
"""Lets zsh run completions of bash."""

_FISH: Final = """\
function __minisgl_at
    set -l at minisgl
    for each in (commandline -opc)[2..-1]
        contains -- "$at $each" {commands}; and set at "$at $each"
    end
    test "$at" = "$argv"
end
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script. `args.all_commands` is the parser of the whole program."""
    commands = dict(_commands(args.all_commands))
    match args.shell:
        case "fish":
            script = _fish(commands)
        case "zsh":
            script = _ZSH + _bash(commands)
        case _:
            script = _bash(commands)
    print(script, end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The program, its groups and its commands, with their full names."""
    yield parser.prog, parser
    for child in _children(parser).values():
        yield from _commands(child)


def _children(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Commands of a group, by their last name."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return groups[0].choices if groups else {}


def _flags(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings)


def _choices(action: argparse.Action) -> Sequence[str]:
    return [str(choice) for choice in action.choices or ()]


def _offered(parser: argparse.ArgumentParser) -> list[str]:
    """Words that may follow a command: its commands, choices of its arguments, and flags."""
    arguments = [action for action in parser._actions if not action.option_strings]
    choices = [choice for action in arguments for choice in _choices(action)]
    return [*choices, *(name for action in _flags(parser) for name in action.option_strings)]


def _bash(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    values = [
        f"    {' | '.join(_quoted(f'{name} {flag}') for flag in action.option_strings)}) "
        f'offered="{" ".join(_choices(action))}" ;;'
        for name, parser in commands.items()
        for action in _flags(parser)
        if action.nargs != 0
    ]
    words = [f'        {_quoted(name)}) offered="{" ".join(_offered(parser))}" ;;' for name, parser in commands.items()]
    return _BASH.format(commands=" | ".join(map(_quoted, commands)), values="\n".join(values), words="\n".join(words))


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    lines = []
    for name, parser in commands.items():
        start = f"complete -c minisgl -n '__minisgl_at {name}'"
        lines += [f"{start} -f -a {child}" for child in _children(parser)]
        arguments = [action for action in parser._actions if not action.option_strings and not _children(parser)]
        lines += [f"{start} -f -a {_quoted(' '.join(_choices(each)))}" for each in arguments if each.choices]
        for action in _flags(parser):
            names = [f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in action.option_strings]
            value = (
                ""
                if action.nargs == 0
                else f" -x -a {_quoted(' '.join(_choices(action)))}"
                if action.choices
                else " -r"
            )
            lines.append(f"{start} {' '.join(names)}{value} -d {_quoted(action.help or '')}")
    return _FISH.format(commands=" ".join(map(_quoted, commands))) + "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text as one word of a shell."""
    return "'" + text.replace("\\", "").replace("'", "’").replace("\n", " ") + "'"
