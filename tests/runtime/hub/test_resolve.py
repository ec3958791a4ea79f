from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from minisgl.errors import HubError
from minisgl.hub.resolve import resolve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the Hub's client, after an entry whose `outcome` each call raises or returns."""
    calls: list[dict[str, Any]] = [{"outcome": ""}]

    def snapshot_download(model: str, **options: Any) -> str:
        calls.append({"model": model, **options})
        outcome = calls[0]["outcome"]
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_directory_is_used_without_a_call_of_the_hub(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert len(hub) == 1


def test_a_directory_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"no config\.json") as rejected:
        resolve(str(tmp_path))
    assert rejected.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model/x", "~/no-such-model", "model", "a/b/c"])
def test_names_that_are_not_hub_ids_are_not_sent_to_the_hub(path: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(HubError, match="neither a directory nor a Hugging Face Hub id") as rejected:
        resolve(path)
    assert rejected.value.code == "model_not_found"
    assert len(hub) == 1


def _repository(monkeypatch: pytest.MonkeyPatch, directory: Path, names: list[str]) -> None:
    """Let the Hub's client store the requested files of a repository with these files."""

    def snapshot_download(model: str, *, allow_patterns: Any, ignore_patterns: Any, **options: Any) -> str:
        for name in huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).touch()
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.parametrize(
    ("weights", "stored"),
    [
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["model.safetensors", "consolidated.00.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
    ],
)
def test_weights_in_a_second_format_are_not_downloaded(
    weights: list[str], stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["model.safetensors.index.json", "pytorch_model.bin", "original/params.json", "onnx/model.safetensors"]
    _repository(monkeypatch, tmp_path, ["config.json", *weights, *others])
    resolve("mistralai/Mistral-7B-Instruct-v0.3")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert found == sorted(["config.json", "model.safetensors.index.json", *stored])


def test_no_weights_are_downloaded_for_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    _repository(monkeypatch, tmp_path, ["config.json", *templates, "model.safetensors", "x.safetensors"])
    resolve("Qwen/Qwen3-0.6B", with_weights=False)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert found == [*templates, "config.json"]


def test_what_pools_the_texts_is_downloaded_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pooling = ["1_Pooling/config.json", "2_Dense/config.json"]
    weights = ["2_Dense/model.safetensors", "model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "onnx/config.json", "4bit/model.safetensors", "0_x/y.bin", "a_b/c.json"]
    _repository(monkeypatch, tmp_path, ["config.json", "modules.json", *pooling, *weights, *others])
    resolve("google/embeddinggemma-300m", with_weights=False)
    configs = ["config.json", "modules.json", *pooling]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {*configs}
    resolve("google/embeddinggemma-300m")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {*configs, *weights}


def test_a_hub_id_is_downloaded(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    hub[0]["outcome"] = tmp_path
    (tmp_path / "model.safetensors").touch()
    assert resolve("Qwen/Qwen3-0.6B", "main") == tmp_path
    assert hub[1]["model"] == "Qwen/Qwen3-0.6B"
    assert hub[1]["revision"] == "main"
    assert len(hub) == 2


def _http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind("refused", response=httpx2.Response(404, request=httpx2.Request("GET", "http://hub.invalid")))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (_http_error(errors.GatedRepoError), "model_access_denied", "HF_TOKEN"),
        (_http_error(errors.RepositoryNotFoundError), "model_not_found", "neither a local directory nor"),
        (_http_error(errors.RevisionNotFoundError), "model_not_found", "no revision 'v9'"),
        (_http_error(errors.HfHubHTTPError), "hub_unreachable", "refused"),
        (errors.LocalEntryNotFoundError("offline"), "hub_unreachable", "cannot be reached"),
        (ConnectionError("no route"), "hub_unreachable", "cannot be reached"),
        (OSError(errno.EROFS, "Read-only file system", "/cache/x"), "cache_not_writable", "at /cache/x .*set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "cache_not_writable", "Permission denied"),
    ],
)
def test_errors_of_the_hub_contain_the_next_step(
    error: Exception, code: str, words: str, hub: list[dict[str, Any]]
) -> None:
    hub[0]["outcome"] = error
    with pytest.raises(HubError, match=words) as rejected:
        resolve("owner/name", "v9")
    assert rejected.value.code == code


def test_offline_a_model_that_is_not_cached_is_an_error_about_that(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub[0]["outcome"] = errors.LocalEntryNotFoundError("offline")
    with pytest.raises(HubError, match="not in the Hub's cache at HF_HOME, and HF_HUB_OFFLINE is set") as rejected:
        resolve("owner/name")
    assert rejected.value.code == "hub_offline"
