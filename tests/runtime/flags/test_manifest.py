"""`minisgl serve -f FILE`: an InferenceModel on one machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from minisgl.cli.main import main
from minisgl.flags import manifest
from minisgl.launcher.serve import ServeOptions
from minisgl_operator.api import types
from minisgl_operator.api.schema import Schema, structural
from support.cluster.chart import SAMPLES
from support.cluster.validation_cases import CASES, Case, hub, smallest
from support.tiny_checkpoint import tiny_checkpoint


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Undo the variables of files, which are set for child processes: other tests start some, too."""
    with mock.patch.dict(os.environ):
        yield


def _file(folder: Path, model: Any) -> Path:
    path = folder / "model.yaml"
    path.write_text(model if isinstance(model, str) else yaml.safe_dump(model))
    return path


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """Configuration that --print-config prints, and the output on stderr."""
    assert main(["serve", *arguments, "--print-config"]) == 0
    out, err = capsys.readouterr()
    return yaml.safe_load(out), err


def _fields(schema: Schema, path: str = "") -> set[str]:
    """Fields without subfields; a field that the tables name as a whole counts without its subfields."""
    found = set()
    for name, field in schema["properties"].items():
        inner, where = field.get("items", field), f"{path}.{name}".removeprefix(".")
        known = where in manifest.CLUSTER_ONLY or where in manifest.SPECIAL_FIELDS
        found |= _fields(inner, where) if "properties" in inner and not known else {where}
    return found


def test_the_tables_name_every_field_of_the_custom_resource() -> None:
    known = {*manifest.SETTINGS, *manifest.SPECIAL_FIELDS, *manifest.CLUSTER_ONLY}
    assert known == _fields(structural(types.InferenceModelSpec))
    assert (manifest.API_VERSION, manifest.KIND) == (types.API_VERSION, types.KIND)


def test_fields_with_a_flag_of_the_same_meaning_set_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEN", "mine")
    for name in ("HF_ENDPOINT", "GIVEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    model = smallest(
        model={
            "source": {"huggingFace": {"repo": "owner/name", "revision": "v1", "endpoint": "http://mirror"}},
            "servedNames": ["first"],
            "dtype": "float32",
            "maxModelLen": 512,
        },
        task="embed",
        parallelism={"tensor": 2},
        engine={
            "device": "cpu",
            "quantization": "fp8",
            "kvCacheDtype": "fp8",
            "speculative": "auto",
            "args": [
                *("--page-size=32", "--audit", "--log-format", "json", "--hf-overrides", '{"rope_theta": 5}'),
                "--stall-timeout=9.5",
            ],
            "env": [{"name": "GIVEN", "value": "1"}, {"name": "TAKEN", "value": "theirs"}],
            "startupTimeoutSeconds": 60,
        },
        drainSeconds=7,
        recovery={"maxRestarts": 0, "windowSeconds": 9},
    )
    printed, err = _printed(capsys, "-f", str(_file(tmp_path, model)))
    expected = {
        "model": "owner/name",
        "revision": "v1",
        "served-model-name": "first",
        "task": "embed",
        "dtype": "float32",
        "max-model-len": 512,
        "tp": 2,
        "device": "cpu",
        "quantization": "fp8",
        "kv-cache-dtype": "fp8",
        "speculative": "auto",
        "page-size": 32,
        "hf-overrides": '{"rope_theta":5}',
        "audit": True,
        "log-format": "json",
        "startup-timeout": 60.0,
        "stall-timeout": 9.5,
        "drain-timeout": 7.0,
        "max-restarts": 0,
        "restart-window": 9.0,
    }
    assert {key: printed[key] for key in expected} == expected
    assert err == ""
    assert (os.environ["HF_ENDPOINT"], os.environ["GIVEN"], os.environ["TAKEN"]) == ("http://mirror", "1", "mine")


def test_all_served_names_are_served_unless_a_flag_gives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []

    def serve(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("minisgl.cli.serve.serve", serve)
    file = str(_file(tmp_path, smallest(model={**hub(), "servedNames": ["first", "second", "third"]})))
    checkpoint = str(tiny_checkpoint())
    assert main(["serve", checkpoint, "-f", file]) == 0
    assert main(["serve", checkpoint, "-f", file, "--served-model-name", "mine"]) == 0
    assert [(options.model_name, options.other_names) for options in seen] == [
        ("first", ("second", "third")),
        ("mine", ()),
    ]


def test_flags_and_variables_have_priority_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_DRAIN_TIMEOUT", "3")
    model = smallest(model=hub(), parallelism={"tensor": 2}, drainSeconds=7)
    printed, _ = _printed(capsys, "here", "-f", str(_file(tmp_path, model)), "--tp", "1")
    assert (printed["model"], printed["tp"], printed["drain-timeout"]) == ("here", 1, 3.0)
    assert printed["served-model-name"] == "demo"


def test_fields_without_effect_cause_a_warning_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [everything] = [case.model for case in CASES if case.name == "everything"]
    _, err = _printed(capsys, "-f", str(_file(tmp_path, everything)))
    lines = err.splitlines()
    assert all(
        line.startswith(f"minisgl: warning: {tmp_path / 'model.yaml'}: no effect on one machine: ") for line in lines
    )
    for field, why in {
        "spec.model.source.huggingFace.tokenSecretRef": "set HF_TOKEN",
        "spec.model.cache": "HF_HOME",
        "spec.parallelism.gpusPerPod": "one machine has no pods",
        "spec.replicas": "one replica is served",
        "spec.suspend": "the model is served now",
        "spec.engine.affinity": "one machine has no pods",
        "spec.engine.env[2].valueFrom of FROM_SECRET": "set the variable in the environment",
        "spec.frontend.auth": "--api-keys",
        "spec.networkPolicy": "--host",
    }.items():
        assert any(field in line and why in line for line in lines), field


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_can_be_served(sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = _printed(capsys, "-f", str(sample), str(tmp_path))
    assert printed["model"] == str(tmp_path)


def test_objects_beside_the_model_have_no_effect(tmp_path: Path) -> None:
    path = _file(tmp_path, f"{json.dumps(smallest())}\n---\nkind: Ingress\n---\nkind: Service\n")
    [warning] = [text for text in manifest.read(path).warnings if "Ingress" in text]
    assert warning == "no effect on one machine: Ingress, Service: only the InferenceModel is served"


@pytest.mark.parametrize("case", [case for case in CASES if not case.field], ids=lambda case: case.name)
def test_a_manifest_that_a_cluster_accepts_is_accepted(case: Case, tmp_path: Path) -> None:
    manifest.read(_file(tmp_path, case.model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "expected one InferenceModel, found 0 in 0 objects"),
        ("a: 1\n---\nb: 2\n", "expected one InferenceModel, found 0 in 2 objects"),
        (2 * f"{json.dumps(smallest())}\n---\n", "expected one InferenceModel, found 2 in 2 objects"),
        ("[1, 2]", "expected serving.minisgl.io/v1alpha1 InferenceModel, found list"),
        ("{", "is not YAML"),
        ("a" * (1 << 20) + "b", "is larger than 1048576 bytes"),
        ({"apiVersion": "v1", "kind": "Pod"}, "expected serving.minisgl.io/v1alpha1 InferenceModel, found v1 Pod"),
        (smallest() | {"data": {}}, "data: unknown field"),
        ({**smallest(), "metadata": {}}, "metadata.name: None is not text"),
        (smallest(replica=1), "spec.replica: unknown field; did you mean spec.replicas?"),
        (
            smallest(engine={"arg": []}),
            "spec.engine.arg: unknown field; did you mean spec.engine.args?",
        ),
        (smallest(engine={"env": [{"name": "A", "vale": "1"}]}), "spec.engine.env.vale: unknown field"),
        (smallest(engine={"env": [{"value": "1"}]}), "spec.engine.env[0].name: None is not text"),
        (smallest(engine={"args": ["--no-such"]}), "spec.engine.args: the engine has no argument --no-such"),
        (smallest(engine={"args": ["--page-size=x"]}), "spec.engine.args: argument --page-size: 'x' is not"),
        (smallest(engine={"args": ["--tp=2"]}), "spec.engine.args: --tp is set by another field"),
        (smallest(engine={"args": ["--quantization=fp8"]}), "spec.engine.args: --quantization is set by another field"),
        (smallest(engine={"kvCacheDtype": True}), "spec.engine.kvCacheDtype: True is not text"),
        (smallest(engine={"speculative": False}), "spec.engine.speculative: False is not text; put it in quotes"),
        (smallest(engine={"args": "--audit"}), "spec.engine.args: '--audit' is not a list"),
        (smallest(parallelism={"tensor": "2"}), "spec.parallelism.tensor: '2' is not a whole number"),
        (smallest(parallelism={"tensor": True}), "spec.parallelism.tensor: True is not a whole number"),
        (smallest(parallelism=2), "spec.parallelism: 2 is not an object"),
    ],
)
def test_an_error_names_the_file_and_the_field(
    model: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, model)
    assert main(["serve", "-f", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"minisgl: error: {path}")
    assert message in err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (smallest(parallelism={"tensor": 0}), "spec.parallelism.tensor: '0' is not a whole number"),
        (
            smallest(engine={"quantization": "awq"}),
            "spec.engine.quantization: 'awq' is not one of fp8, fp8-block, int4",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_like_a_wrong_flag(
    model: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, model)
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "-f", str(path)])
    assert f"{path}: {message}" in capsys.readouterr().err


def test_a_model_that_is_not_on_the_hub_requires_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "-f", str(_file(tmp_path, smallest()))])
    assert "give its directory: minisgl serve DIR -f FILE" in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-f", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml cannot be read" in capsys.readouterr().err
