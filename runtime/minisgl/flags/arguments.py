"""Flags of commands, derived from the options of structs. Every help text ends with default and unit."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from minisgl import logging as log
from minisgl.config import ATTENTION_BACKENDS, Config, DeviceChoice, EngineConfig
from minisgl.flags.foreign import ForeignFlagError, hints, translate
from minisgl.logging import LogOptions
from minisgl.options import Option, close, options_of


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that names the command to ask for help, and what is like an unknown name. Flags
    cannot be abbreviated. `accepts_foreign`: flags of other servers with the meaning of one of this parser are
    accepted."""

    def __init__(self, *, accepts_foreign: bool = False, **options: Any) -> None:
        self._accepts_foreign = accepts_foreign
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: the parent parser, which calls this, would name the wrong command's help."""
        if self._accepts_foreign:
            try:
                args, taken = translate(args, self._option_string_actions, self._takes_model)
            except ForeignFlagError as error:
                self.error(str(error))
            if taken:
                named = ", ".join(f"{name} ({meaning})" for name, meaning in taken)
                log.write_stderr(f"{self.prog}: flags of other servers are taken as ours: {named}")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self.exit_on_error:
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *self.hints(unknown)]))
        return known, unknown

    def hints(self, unknown: Sequence[str]) -> list[str]:
        """What to use instead of unknown arguments."""
        own = [
            name for name, action in self._option_string_actions.items() if not isinstance(action, argparse._HelpAction)
        ]
        return list(hints(unknown, own, self._takes_model, accepts_foreign=self._accepts_foreign))

    @property
    def _takes_model(self) -> bool:
        return any(not action.option_strings and action.dest == "model" for action in self._actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        similar = None if action.choices is None or value in action.choices else close(str(value), action.choices)
        if similar is not None:
            choices = ", ".join(map(str, action.choices or ()))
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; did you mean {similar}? (choose from {choices})"
            )
        super()._check_value(action, value)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


class _Range(argparse.Action):
    """Flag with a minimum and a maximum, or one value for both."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if len(values) > len(self.metavar or ()):
            raise argparse.ArgumentError(self, f"expected {' '.join(self.metavar or ())}, or one value for both")
        setattr(namespace, self.dest, values * 2 if len(values) == 1 else values)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Type for argparse: a whole number in low..high."""
    span = f"{low} or more" if high is None else f"{low} to {high}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {span}")
        return int(text)

    return parse


def number(low: float, high: float | None = None, *, with_low: bool = False) -> Callable[[str], float]:
    """Type for argparse: a number above `low`, or also `low` itself, up to `high`."""
    span = f"{low:g} or more" if with_low else f"above {low:g}"
    if high is not None:
        span += f", up to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        enough = value >= low if with_low else value > low
        if not enough or value == float("inf") or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return value

    return parse


def backend(text: str) -> str:
    """Type for argparse: `auto`, one attention backend, or `PREFILL,DECODE`."""
    parts = text.split(",")
    if text != "auto" and (len(parts) > 2 or not all(part in ATTENTION_BACKENDS for part in parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, one of {', '.join(ATTENTION_BACKENDS)}, or two of them as PREFILL,DECODE"
        )
    return text


def json_object(text: str) -> dict[str, Any]:
    """Type for argparse: a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a JSON object: {error}") from None


def collector_url(text: str) -> str:
    """Type for argparse: an http or https URL."""
    try:
        has_port = urlsplit(text).port != 0
    except ValueError:
        has_port = False
    if not has_port or not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an http or https URL; traces are sent by OTLP over HTTP, as to port 4318 of a collector"
        )
    return text


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "attention_backend": backend,
    "hf_overrides": json_object,
    "otlp_traces_endpoint": collector_url,
}
"""Parsers of options whose text has a format of its own."""

port = integer(0, 65535)


def add_options(container: argparse._ActionsContainer, defaults: msgspec.Struct, only: Sequence[str] = ()) -> None:
    """Add a flag for each option of the struct `defaults`, whose values are the defaults; `only`: for these options.

    The options of a struct in a field get a group with the name of the field.
    """
    if isinstance(defaults, EngineConfig) and not only:
        _add_device(container)
    for option in options_of(defaults):
        if only and option.name not in only:
            continue
        flag = f"--{_dest(option).replace('_', '-')}"
        if option.type is bool:
            negation = "do not " if option.default else ""
            container.add_argument(flag, action="store_true", help=f"{negation}{option.help}")
            continue
        container.add_argument(
            flag,
            dest=_dest(option),
            type=_parser_of(option),
            choices=option.choices or None,
            default=option.default or None if _is_list(option) else option.default,
            nargs=None if option.length is None else "+",
            action="store" if option.length is None else _Range,
            metavar=_metavar(option),
            help=option.help,
        )
    for name, inner in _nested(defaults).items():
        add_options(container.add_argument_group(name), inner)


def option_values(args: argparse.Namespace, defaults: msgspec.Struct) -> dict[str, Any]:
    """Values of the flags that `add_options` added, by the option's name."""
    return {option.name: _given(args, option) for option in options_of(defaults)}


def filled(args: argparse.Namespace, defaults: Config) -> Config:
    """The struct `defaults`, and the structs in its fields, with the values of the flags that `add_options` added."""
    values = {option.field: _given(args, option) for option in options_of(defaults)}
    nested = {name: filled(args, inner) for name, inner in _nested(defaults).items()}
    return msgspec.structs.replace(defaults, **values, **nested)


def _nested(defaults: msgspec.Struct) -> dict[str, msgspec.Struct]:
    """Structs in fields of `defaults`, by field."""
    values = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
    return {name: value for name, value in values.items() if isinstance(value, msgspec.Struct)}


def _dest(option: Option) -> str:
    """Name of the flag in the parsed arguments. The flag of an option that is on by default turns it off."""
    return f"no_{option.name}" if option.default is True else option.name


def _metavar(option: Option) -> str | tuple[str, ...] | None:
    if option.choices:
        return None
    return option.metavar if option.length is None else tuple(option.metavar.split())


def _is_list(option: Option) -> bool:
    return get_origin(option.type) is tuple


def _given(args: argparse.Namespace, option: Option) -> Any:
    value = getattr(args, _dest(option))
    if _is_list(option):
        # Text until here, so that --print-config shows what was given.
        return tuple(filter(None, (value or "").replace(" ", "").split(",")))
    if option.length is not None:
        return tuple(value)
    return not value if option.default is True else value


def _parser_of(option: Option) -> Callable[[str], Any]:
    """Function that turns a flag's text into a value of the option's type and range."""
    bounds = option.bounds
    if option.type is int:
        assert bounds.ge is not None
        return integer(int(bounds.ge), None if bounds.le is None else int(bounds.le))
    if option.type is float:
        if bounds.gt is None:
            assert bounds.ge is not None
            return number(bounds.ge, bounds.le, with_low=True)
        return number(bounds.gt, bounds.le)
    return _PARSERS.get(option.name, Path if option.type is Path else str)


def _add_device(container: argparse._ActionsContainer) -> None:
    container.add_argument(
        "--device",
        choices=get_args(DeviceChoice),
        default="auto",
        help="device that runs the model (default: auto, CUDA if there is a device)",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("engine"), EngineConfig(model=""))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM` from the flags that `add_engine_arguments` added."""
    return {"device": args.device, **option_values(args, EngineConfig(model=""))}


def given_flags(args: argparse.Namespace, actions: Sequence[argparse.Action]) -> list[str]:
    """Words of a command line with the flags `actions` as far as they were given; they must have no defaults."""
    words = []
    for action in actions:
        if hasattr(args, action.dest):
            value = getattr(args, action.dest)
            values = value if isinstance(value, list) else [] if action.nargs == 0 else [value]
            words.append(action.option_strings[0])
            words += [msgspec.json.encode(each).decode() if isinstance(each, dict) else str(each) for each in values]
    return words


def set_up_log(args: argparse.Namespace, options: LogOptions, process: str = "launcher") -> None:
    """Write log lines from now on, also for the error that ends the command."""
    log.set_up(process, options.level, options.format)
    args.logs_errors = True


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE as JSON (default: not written)")
