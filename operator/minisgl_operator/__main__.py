"""The `minisgl-operator` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minisgl.extras import MissingExtra, require
from minisgl_operator.shell import config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minisgl-operator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the operator")
    config.add_arguments(run)
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    run.add_argument("--log-format", choices=("auto", "text", "json"), default="auto")
    commands.add_parser("crd", help="print the CustomResourceDefinition")
    options = parser.parse_args(arguments)
    try:
        require("operator")
    except MissingExtra as error:
        print(f"minisgl-operator: error: {error}", file=sys.stderr)
        return error.exit_code
    if options.command == "crd":
        from minisgl_operator.api.crd import manifest

        sys.stdout.write(manifest())
        return 0
    from minisgl_operator.api.defaults import InvalidDefaults
    from minisgl_operator.shell.run import run_operator

    try:
        parsed = config.parse(options)
    except InvalidDefaults as error:
        parser.error(f"argument --defaults: {error}")
    return run_operator(parsed, options.log_level, options.log_format)


if __name__ == "__main__":
    sys.exit(main())
