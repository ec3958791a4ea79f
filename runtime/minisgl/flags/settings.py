"""One configuration surface: every flag of a command can also be an environment variable or a key of a YAML file.

All three are derived from the command's argparse actions. A flag wins over the environment, the environment over the
file, and the file over the default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import yaml

from minisgl.flags.arguments import json_object
from minisgl.flags.foreign import FOREIGN
from minisgl.options import closest

PREFIX: Final = "MINISGL_"
NOT_SETTINGS: Final = frozenset({"MINISGL_COMMIT", "MINISGL_KERNELS_DIR"})
"""Variables with the prefix that other parts of the program read."""
_SERVICE_VARIABLE: Final = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in pods beside a Service whose name begins with `minisgl`, and that are not settings.
"""
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
"""Value of one more, whose name may be that of a setting: MINISGL_PORT."""
_SWITCH_TEXTS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class Setting(NamedTuple):
    """One flag or positional argument that can be set in other ways."""

    action: argparse.Action
    default: Any

    @property
    def key(self) -> str:
        """Key in the file: the flag without its dashes."""
        if not self.action.option_strings:
            return self.action.dest
        return self.action.option_strings[0].removeprefix("--")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace("-", "_")


class Settings:
    """Takes over all arguments that were added to `parser` and adds --config and --print-config.

    The arguments lose their defaults until `resolve`, so that a flag that is given differs from one that is not.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        self.all = [Setting(action, action.default) for action in actions]
        self.warnings: list[str] = []
        """Found by `resolve`, for the user."""
        for action in actions:
            action.default = argparse.SUPPRESS
        group = parser.add_argument_group("configuration")
        group.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help=f"YAML file whose keys are these flags without their dashes (default: {PREFIX}CONFIG, or none)",
        )
        group.add_argument(
            "--print-config",
            action="store_true",
            help="print the effective configuration with the source of each value, then exit (default: off)",
        )
        parser.set_defaults(settings=self)

    def resolve(self, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Set in `args` what no flag has set; returns the source of each key's value. Exits with code 2, as for a wrong
        flag, when a value or a name is wrong."""
        variables = self._from_environment(environment)
        if args.config is None and environment.get(f"{PREFIX}CONFIG"):
            args.config = Path(environment[f"{PREFIX}CONFIG"])
        given = ({} if args.config is None else self._from_file(args.config)) | variables
        sources: dict[str, str] = {}
        for setting in self.all:
            value, source = given.get(setting.key, (setting.default, "default"))
            if hasattr(args, setting.action.dest):
                source = "flag"
            else:
                setattr(args, setting.action.dest, value)
            sources[setting.key] = source
        return sources

    def fill(
        self, args: argparse.Namespace, sources: dict[str, str], values: Mapping[str, tuple[Any, str]], path: Path
    ) -> None:
        """Set from the file at `path` what `resolve` left at its default. `values`: by key, the value and its place in
        the file. Exits with code 2 when a value is wrong."""
        for setting in self.all:
            if setting.key in values and sources[setting.key] == "default":
                value, where = values[setting.key]
                setattr(args, setting.action.dest, self._parsed(setting, value, f"{path}: {where}"))
                sources[setting.key] = f"file {path}, {where}"

    def render(self, args: argparse.Namespace, sources: Mapping[str, str]) -> str:
        """Return the text of a file with all effective values, each line with its source."""
        lines = []
        for setting in self.all:
            value = getattr(args, setting.action.dest)
            if isinstance(value, dict):
                value = msgspec.json.encode(value).decode()
            plain = value if value is None or isinstance(value, bool | int | float | str | list) else str(value)
            line: str = yaml.safe_dump({setting.key: plain}, allow_unicode=True, width=10_000, default_flow_style=False)
            lines.append(f"{line.rstrip()}  # {sources[setting.key]}\n")
        return "".join(lines)

    def usage_error(self, message: str) -> NoReturn:
        """Exit as the parser does for a wrong command line, with code 2."""
        self._parser.error(message)

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
        """Values of MINISGL_* variables with their sources, by key."""
        known = {setting.variable: setting for setting in self.all}
        other = {f"{PREFIX}CONFIG", *NOT_SETTINGS}
        found: dict[str, tuple[Any, str]] = {}
        of_services: list[str] = []
        for name, text in environment.items():
            if not name.startswith(PREFIX) or name in other:
                continue
            if _SERVICE_VARIABLE.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text)):
                of_services.append(name)
                continue
            if name not in known:
                self._unknown(f"environment variable {name}", name, [*known, *other])
            value = self._parsed(known[name], text, f"environment variable {name}")
            found[known[name].key] = value, f"environment {name}"
        if of_services:
            self.warnings.append(
                f"ignoring {', '.join(sorted(of_services))}, which Kubernetes sets for a Service in this namespace; "
                "set enableServiceLinks: false in the pod's spec"
            )
        return found

    def _from_file(self, path: Path) -> dict[str, tuple[Any, str]]:
        """Values of a YAML file with their sources, by key."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self.usage_error(f"--config: {path} cannot be read: {error}")
        except yaml.YAMLError as error:
            self.usage_error(f"--config: {path} is not YAML: {' '.join(str(error).split())}")
        if content is None:
            return {}
        if not isinstance(content, dict):
            self.usage_error(f"--config: {path} must contain keys with values, not a {type(content).__name__}")
        known = {setting.key: setting for setting in self.all}
        for key in content:
            if key not in known:
                self._unknown(f"{path}: key {key!r}", str(key).replace("_", "-"), known)
        return {
            key: (self._parsed(known[key], value, f"{path}: {key}"), f"file {path}")
            for key, value in content.items()
            if value is not None
        }

    def _parsed(self, setting: Setting, value: Any, where: str) -> Any:
        """Value of a setting from text or a YAML scalar; `where` names its place in errors."""
        action = setting.action
        if isinstance(action, argparse._StoreTrueAction):
            value = _SWITCH_TEXTS.get(value.lower(), value) if isinstance(value, str) else value
            if not isinstance(value, bool):
                self.usage_error(f"{where}: {value!r} is neither true nor false")
            return value
        if value is False and action.choices is not None and "off" in action.choices:
            value = "off"  # as YAML reads it without quotes
        if isinstance(value, dict) and action.type is json_object:
            value = msgspec.json.encode(value).decode()
        if isinstance(value, bool | list | dict):
            self.usage_error(f"{where}: {value!r} is not a single value")
        text = str(value)
        try:
            value = action.type(text) if callable(action.type) else text
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            self.usage_error(f"{where}: {error}")
        if action.choices is not None and value not in action.choices:
            self.usage_error(f"{where}: {text!r} is not one of {', '.join(map(str, action.choices))}")
        return value

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> NoReturn:
        foreign = FOREIGN.get("--" + name.removeprefix(PREFIX).lower().replace("_", "-"))
        ours = "" if foreign is None else foreign.ours.removeprefix("--").lower()
        meant = [each for each in known if ours and each in (ours, PREFIX + ours.upper().replace("-", "_"))]
        self.usage_error(f"{what} is unknown; did you mean {meant[0] if meant else closest(name, known)}?")
