"""One configuration surface: every flag of a command can also be an environment variable or a key of a YAML file.

All three are read off the command's argparse actions, so none can lack what another has. A flag wins over the
environment, that over the file, and the file over the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import yaml

PREFIX: Final = "MINISGL_"
NOT_SETTINGS: Final = frozenset({"MINISGL_COMMIT", "MINISGL_KERNELS_DIR"})
"""Variables with our prefix that other parts of the program read."""
_SWITCH_TEXTS: Final = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False}
_SWITCH_TEXTS["off"] = False


class Setting(NamedTuple):
    """One thing that can be set."""

    action: argparse.Action
    default: Any

    @property
    def key(self) -> str:
        """Its name in the file: the flag without its dashes."""
        if not self.action.option_strings:
            return self.action.dest
        return self.action.option_strings[0].removeprefix("--")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper().replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return isinstance(self.action, argparse._StoreTrueAction)


class Settings:
    """Takes over `parser`, to which all arguments but these were added: their defaults wait until `resolve`, so that
    what the command line says can be told from what it does not say. Adds --config and --print-config."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self.all = [
            Setting(action, action.default)
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        for setting in self.all:
            setting.action.default = argparse.SUPPRESS
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
            help="print what is set, as such a file that says where each value comes from, and end (default: off)",
        )
        parser.set_defaults(settings=self)

    def resolve(self, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Fill into `args` what the command line left open; returns where each key's value is from. Ends the program
        as a wrong flag does when a value or a name is wrong."""
        variables = self._from_environment(environment)
        if args.config is None and environment.get(f"{PREFIX}CONFIG"):
            args.config = Path(environment[f"{PREFIX}CONFIG"])
        keys = {} if args.config is None else self._from_file(args.config)
        sources: dict[str, str] = {}
        for setting in self.all:
            dest = setting.action.dest
            if hasattr(args, dest):
                sources[setting.key] = "flag"
            elif setting.key in variables:
                setattr(args, dest, variables[setting.key])
                sources[setting.key] = f"environment {setting.variable}"
            elif setting.key in keys:
                setattr(args, dest, keys[setting.key])
                sources[setting.key] = f"file {args.config}"
            else:
                setattr(args, dest, setting.default)
                sources[setting.key] = "default"
        return sources

    def fill(
        self, args: argparse.Namespace, sources: dict[str, str], values: Mapping[str, tuple[Any, str]], path: Path
    ) -> None:
        """Set from the file at `path` what `resolve` left at its default: by key, the value and where it stands there.
        Ends the program as a wrong flag does."""
        for setting in self.all:
            if setting.key in values and sources[setting.key] == "default":
                value, where = values[setting.key]
                if not setting.is_switch:
                    value = self._convert(setting, str(value), f"{path}: {where}")
                setattr(args, setting.action.dest, value)
                sources[setting.key] = f"file {path}, {where}"

    def render(self, args: argparse.Namespace, sources: Mapping[str, str]) -> str:
        """A file that sets what is set, each line with its source."""
        lines = []
        for setting in self.all:
            value = getattr(args, setting.action.dest)
            plain = value if value is None or isinstance(value, bool | int | float | str | list) else str(value)
            line: str = yaml.safe_dump({setting.key: plain}, allow_unicode=True, width=10_000, default_flow_style=False)
            lines.append(f"{line.rstrip()}  # {sources[setting.key]}\n")
        return "".join(lines)

    def refuse(self, message: str) -> NoReturn:
        """End as the parser does for a wrong command line."""
        self._parser.error(message)

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        known = {setting.variable: setting for setting in self.all}
        other = {f"{PREFIX}CONFIG", *NOT_SETTINGS}
        found: dict[str, Any] = {}
        for name, text in environment.items():
            if not name.startswith(PREFIX) or name in other:
                continue
            if name not in known:
                self._refuse_unknown(f"environment variable {name}", name, [*known, *other])
            setting = known[name]
            if setting.is_switch:
                if text.lower() not in _SWITCH_TEXTS:
                    self._parser.error(f"environment variable {name}: {text!r} is neither true nor false")
                found[setting.key] = _SWITCH_TEXTS[text.lower()]
            else:
                found[setting.key] = self._convert(setting, text, f"environment variable {name}")
        return found

    def _from_file(self, path: Path) -> dict[str, Any]:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self._parser.error(f"--config: {path} cannot be read: {error}")
        except yaml.YAMLError as error:
            self._parser.error(f"--config: {path} is not YAML: {' '.join(str(error).split())}")
        if content is None:
            return {}
        if not isinstance(content, dict):
            self._parser.error(f"--config: {path} holds no keys with values, but a {type(content).__name__}")
        known = {setting.key: setting for setting in self.all}
        found: dict[str, Any] = {}
        for key, value in content.items():
            if key not in known:
                self._refuse_unknown(f"{path}: key {key!r}", str(key).replace("_", "-"), list(known))
            setting = known[key]
            if value is None:
                continue
            if setting.is_switch:
                if not isinstance(value, bool):
                    self._parser.error(f"{path}: {key}: {value!r} is neither true nor false")
                found[key] = value
            elif isinstance(value, bool | list | dict):
                self._parser.error(f"{path}: {key}: {value!r} is not a single value")
            else:
                found[key] = self._convert(setting, str(value), f"{path}: {key}")
        return found

    def _convert(self, setting: Setting, text: str, where: str) -> Any:
        action = setting.action
        try:
            value = action.type(text) if callable(action.type) else text
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            self._parser.error(f"{where}: {error}")
        if action.choices is not None and value not in action.choices:
            self._parser.error(f"{where}: {text!r} is not one of {', '.join(map(str, action.choices))}")
        return value

    def _refuse_unknown(self, what: str, name: str, known: list[str]) -> NoReturn:
        close = difflib.get_close_matches(name, known, 1, 0.0)
        self._parser.error(f"{what} is not known; the nearest one is {close[0]}")
