"""`args` in the spec and the command lines of engine and frontend: options of the operator cannot be set a second
time."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.cli.main import build_parser
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.types import RESERVED_ARGUMENTS, RESERVED_FRONTEND_ARGUMENTS, FrontendSpec, InferenceModel
from minisgl_operator.render import render
from support.cli_reference import commands, flags
from support.cluster.validation_cases import smallest

DEFAULTS = Defaults(operator_namespace="minisgl-system", engine_image="engine", frontend_image="frontend")


def test_every_option_about_the_pod_and_its_life_is_reserved() -> None:
    [parser] = [parser for name, parser in commands(build_parser()) if name == "minisgl engine"]
    # args is for options of the engine and its log, and for the limit of a step; the spec has its own fields for eight.
    groups = {group.title: group._group_actions for group in parser._action_groups}
    for_args = groups["engine"] + groups["log"]
    about_the_pod = {a.option_strings[0] for a in flags(parser) if a.option_strings and a not in for_args}
    about_the_pod.remove("--stall-timeout")
    of_the_spec = {"--device", "--dtype", "--kv-cache-dtype", "--max-model-len", "--quantization", "--speculative"}
    of_the_spec |= {"--task", "--tp"}
    assert about_the_pod | of_the_spec == set(RESERVED_ARGUMENTS)
    assert set(RESERVED_ARGUMENTS) <= {flag for action in flags(parser) for flag in action.option_strings}


def test_every_option_that_the_operator_sets_for_a_frontend_is_reserved() -> None:
    [parser] = [parser for name, parser in commands(build_parser()) if name == "minisgl frontend"]
    model = smallest(frontend={"auth": {"apiKeysSecretRef": {"name": "keys"}}, "leaveSeconds": 1})
    rendered = render(InferenceModel.parse(model), DEFAULTS)
    [arguments] = [
        manifest["spec"]["template"]["spec"]["containers"][0]["args"]
        for manifest in rendered
        if manifest["kind"] == "Deployment"
    ]
    assert {argument for argument in arguments if argument.startswith("--")} <= set(RESERVED_FRONTEND_ARGUMENTS)
    assert set(RESERVED_FRONTEND_ARGUMENTS) <= {flag for action in flags(parser) for flag in action.option_strings}
    # The operator leaves the flag out where the default applies.
    assert parser.get_default("leave_timeout") == FrontendSpec().leave_seconds


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"drainSeconds": 1, "recovery": {"maxRestarts": 0, "windowSeconds": 1}},
        {"parallelism": {"tensor": 64, "gpusPerPod": 8}, "engine": {"args": ["--page-size=32", "--audit"]}},
        {"engine": {"device": "cpu", "startupTimeoutSeconds": 10, "args": ["--stall-timeout=9.5"]}},
        {"model": {"source": {"pvc": {"claimName": "c", "path": "a/b"}}, "maxModelLen": 2, "servedNames": ["a", "b"]}},
        {"model": {"source": {"huggingFace": {"repo": "a/b"}}, "dtype": "float16"}},
        {"engine": {"quantization": "fp8", "kvCacheDtype": "fp8"}},
        {"engine": {"speculative": "off"}},
        {"task": "rerank"},
        {"engine": {"quantization": "int4", "kvCacheDtype": "auto", "args": ["--dummy-weights"]}},
        {"frontend": {"auth": {"apiKeysSecretRef": {"name": "keys"}}, "leaveSeconds": 3600}},
        {"frontend": {"args": ["--max-waiting", "64", "--tool-call-parser=none"], "leaveSeconds": 1}},
    ],
)
def test_the_arguments_of_every_container_are_valid(spec: dict[str, Any]) -> None:
    """Also at the bounds of every number that becomes an argument."""
    model = InferenceModel.parse(smallest(**spec))
    seen = set()
    for manifest in render(model, DEFAULTS):
        template = manifest.get("spec", {}).get("template")
        if template is not None:
            for container in template["spec"]["containers"]:
                build_parser().parse_args(container["args"])
                seen.add(container["name"])
    assert seen >= {"engine", "frontend"}
