"""Types and groups of flags that several commands share. Every help text ends with default and unit."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, get_args

import msgspec

from minisgl.config import ATTENTION_BACKENDS, Config, DeviceChoice, EngineConfig
from minisgl.logging import LogFormat, LogLevel
from minisgl.options import Option, options_of
from minisgl.wire.status import HTTP_PORT

_MAX_PORT: Final = 65535
"""Of the OpenAI endpoint."""


class Parser(argparse.ArgumentParser):
    """Errors are one line and name the command whose help explains more; abbreviated flags are not guessed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A command's parser is asked here by the one above it, which would not know whose help explains the rest."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self.exit_on_error:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: a whole number in low..high."""
    span = f"{low} or more" if high is None else f"{low} to {high}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {span}")
        return int(text)

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """A type for argparse: a number above `low`, up to `high`."""
    span = f"above {low:g}" if high is None else f"above {low:g}, up to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not value > low or value == float("inf") or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return value

    return parse


def backend(text: str) -> str:
    """A type for argparse: `auto`, one attention backend, or `PREFILL,DECODE`."""
    parts = text.split(",")
    if text != "auto" and (len(parts) > 2 or not all(part in ATTENTION_BACKENDS for part in parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, one of {', '.join(ATTENTION_BACKENDS)}, or two of them as PREFILL,DECODE"
        )
    return text


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {"attention_backend": backend}
"""Options whose text has a format of its own."""

port = integer(0, _MAX_PORT)


def add_options(group: argparse._ActionsContainer, defaults: msgspec.Struct, only: Sequence[str] = ()) -> None:
    """Add a flag for each option of the struct `defaults`, whose values are the defaults; `only`: for these options."""
    for option in options_of(defaults):
        if only and option.name not in only:
            continue
        flag = f"--{_dest(option).replace('_', '-')}"
        if option.type is bool:
            negation = "do not " if option.default else ""
            group.add_argument(flag, action="store_true", help=f"{negation}{option.help}")
            continue
        parse, metavar = _value(option)
        group.add_argument(
            flag,
            dest=_dest(option),
            type=parse,
            choices=option.choices or None,
            default=option.default,
            metavar=option.metavar or metavar,
            help=option.help,
        )


def option_values(args: argparse.Namespace, defaults: msgspec.Struct) -> dict[str, Any]:
    """Values of the flags that `add_options` added, by the option's name."""
    return {option.name: _given(args, option) for option in options_of(defaults)}


def filled(args: argparse.Namespace, defaults: Config) -> Config:
    """The struct `defaults` with the values of the flags that `add_options` added."""
    values = {option.field: _given(args, option) for option in options_of(defaults)}
    return msgspec.structs.replace(defaults, **values)


def _dest(option: Option) -> str:
    """Name of the flag in the parsed arguments. The flag of an option that is on by default turns it off."""
    return f"no_{option.name}" if option.default is True else option.name


def _given(args: argparse.Namespace, option: Option) -> Any:
    value = getattr(args, _dest(option))
    return not value if option.default is True else value


def _value(option: Option) -> tuple[Callable[[str], Any], str | None]:
    """Parser of a flag's text, and the name of the value in the help."""
    if option.type is int:
        assert option.bounds.ge is not None
        return integer(int(option.bounds.ge), None if option.bounds.le is None else int(option.bounds.le)), "N"
    if option.type is float:
        assert option.bounds.gt is not None
        return number(option.bounds.gt, option.bounds.le), "X"
    return _PARSERS.get(option.name, str), None if option.choices else "NAME"


def add_device_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        choices=get_args(DeviceChoice),
        default="auto",
        help="device that runs the model (default: auto, CUDA if there is a device)",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_device_argument(group)
    add_options(group, EngineConfig(model=""))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM` from the flags that `add_engine_arguments` added."""
    return {"device": args.device, **option_values(args, EngineConfig(model=""))}


def add_port_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--port",
        type=port,
        default=HTTP_PORT,
        metavar="N",
        help=f"TCP port, 0 for a free one (default: {HTTP_PORT})",
    )


def add_tokenizers_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizers",
        type=integer(0, 64),
        default=1,
        metavar="N",
        help="tokenizer processes; 0: in the API process (default: 1 process)",
    )


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="least severe lines that are written to stderr (default: info)",
    )
    group.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="auto",
        help="text for people, json for machines: one object a line (default: auto, text on a terminal)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE as JSON (default: not written)")
