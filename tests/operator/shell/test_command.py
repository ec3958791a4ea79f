"""The `minisgl-operator` command: flags, variables, and errors at the start."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from minisgl_operator.__main__ import main
from minisgl_operator.shell import config

ROOT = Path(__file__).parents[3]
FLAGS = ["--namespace=ns", "--engine-image=e:1", "--frontend-image=f:1"]


def parse(flags: list[str], variables: dict[str, str] | None = None) -> config.Config:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, variables or {})
    return config.parse(parser.parse_args(flags), variables or {})


def test_defaults() -> None:
    found = parse(FLAGS)
    assert found.defaults.operator_namespace == "ns"
    assert (found.defaults.engine_image, found.defaults.frontend_image) == ("e:1", "f:1")
    assert (found.defaults.engine_architecture, found.defaults.frontend_architecture) == (None, None)
    assert found.defaults.image_pull_policy is None
    assert found.defaults.image_pull_secrets == ()
    assert found.defaults.gateway is None
    assert found.lease_name == "minisgl-operator"
    assert found.watch_namespaces == ()
    assert (found.resync_seconds, found.probe_seconds, found.metrics_port) == (600, 3, 8080)


def test_a_flag_wins_over_its_variable() -> None:
    variables = {
        "MINISGL_OPERATOR_NAMESPACE": "other",
        "MINISGL_OPERATOR_ENGINE_IMAGE": "e:2",
        "MINISGL_OPERATOR_FRONTEND_IMAGE": "f:2",
        "MINISGL_OPERATOR_ENGINE_ARCHITECTURE": "arm64",
        "MINISGL_OPERATOR_RESYNC_SECONDS": "30",
        "MINISGL_OPERATOR_WATCH_NAMESPACE": "a,b,",
        "MINISGL_OPERATOR_IMAGE_PULL_POLICY": "Never",
        "MINISGL_OPERATOR_IMAGE_PULL_SECRET": "one,two",
        "MINISGL_OPERATOR_LEASE_NAME": "mine",
        "MINISGL_OPERATOR_GATEWAY": "release",
    }
    found = parse(["--namespace=ns"], variables)
    assert found.defaults.operator_namespace == "ns"
    assert (found.defaults.engine_image, found.defaults.engine_architecture) == ("e:2", "arm64")
    assert found.defaults.image_pull_policy == "Never"
    assert found.defaults.image_pull_secrets == ("one", "two")
    assert found.lease_name == "mine"
    assert found.defaults.gateway == "release"
    assert found.resync_seconds == 30
    assert found.watch_namespaces == ("a", "b")
    assert parse([*FLAGS, "--watch-namespace=x", "--watch-namespace=x"], variables).watch_namespaces == ("x",)


def test_missing_required_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--namespace=ns"])
    assert "--engine-image" in capsys.readouterr().err


def test_defaults_of_models_are_one_document() -> None:
    text = "{podIdentity: Namespace, engine: {tolerations: [{key: gpu, operator: Exists}], labels: {team: a}}}"
    models = parse([*FLAGS, f"--defaults={text}"]).defaults.models
    assert models.pod_identity == "Namespace"
    assert models.engine.tolerations[0].key == "gpu"
    assert models.engine.labels == {"team": "a"}
    assert parse(FLAGS).defaults.models.manifest() == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the defaults are not YAML"),
        ("[]", "valid dictionary"),
        ("{engin: {}}", "engin: unknown field"),
        ("{engine: {labels: {app.kubernetes.io/name: a}}}", "engine.labels: the operator or Kubernetes sets"),
        ("{frontend: {runtimeClassName: a}}", "frontend.runtimeClassName: unknown field"),
        ("{podIdentity: Random}", "podIdentity: Input should be"),
        ("{traces: {endpoint: 'http://collector:65536'}}", "traces.endpoint: Value error, Port out of range"),
        ("{traces: {endpoint: 'http://[::1'}}", "traces.endpoint: Value error, Invalid IPv6 URL"),
    ],
)
def test_wrong_defaults_are_named(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", *FLAGS, f"--defaults={text}"])
    error = capsys.readouterr().err
    assert "argument --defaults: " in error and words in error


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    environment |= {"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'operator'}", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "minisgl_operator", *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=180, check=False)


def test_without_an_api_server_the_error_names_the_remedy() -> None:
    done = _run("run", *FLAGS, "--metrics-port=0", "--log-format=text")
    assert done.returncode == 1
    assert "--kubeconfig" in done.stderr and "Traceback" not in done.stderr


def test_it_prints_the_crd() -> None:
    done = _run("crd")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["metadata"]["name"] == "inferencemodels.serving.minisgl.io"


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    """A folder `operator` with an __init__.py on the path breaks the interpreter."""
    assert not (ROOT / "operator" / "__init__.py").exists()
