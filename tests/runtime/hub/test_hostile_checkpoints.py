"""Checkpoints made to break what reads them: each is an error with a code, in bounded time and memory."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from minisgl.cli.main import main
from minisgl.errors import ModelError, TokenizerError
from minisgl.hub.model_revision import model_revision
from minisgl.hub.neighbours import RECORD
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import MoeConfig
from minisgl.tokenizer.trial import try_files
from minisgl.toy.tiny import write_tiny_checkpoint

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("intact") / "model", "qwen3")


@pytest.fixture
def checkpoint(intact: Path, tmp_path: Path) -> Path:
    """Its files may be replaced."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in intact.iterdir():
        (copy / file.name).symlink_to(file)
    return copy


def replace(file: Path, content: bytes | str) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def change(file: Path, **values: Any) -> None:
    replace(file, json.dumps(json.loads(file.read_bytes()) | values))


def checked(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of `models check` for a checkpoint that cannot be served."""
    assert main(["models", "check", str(checkpoint)]) == 1
    output = capsys.readouterr().out
    assert "cannot be served" in output
    return output


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "malformed_json"),
        ("generation_config.json", "malformed_json"),
        ("tokenizer_config.json", "malformed_json"),
        ("special_tokens_map.json", "tokenizer_broken"),
        ("tokenizer.json", "tokenizer_broken"),
    ],
)
@pytest.mark.parametrize("content", [f'{{"a": {DEEP}}}', DEEP, '{"a": 1' + "0" * 5000 + "}", "{}" + " " * (17 << 20)])
def test_json_that_is_nested_or_large_is_refused(
    name: str, code: str, content: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(checkpoint / name, content)
    assert f"({code})" in checked(checkpoint, capsys)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "config_not_found"),
        ("model.safetensors", "no_weights"),
        ("tokenizer.json", "no_tokenizer"),
        ("generation_config.json", ""),
        ("model.safetensors.index.json", ""),
        ("chat_template.jinja", ""),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_nothing_is_read_that_may_have_no_end(
    kind: str, name: str, code: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkpoint / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    if code:
        assert f"({code})" in checked(checkpoint, capsys)
    else:
        assert main(["models", "check", str(checkpoint)]) == 0


def test_a_record_of_a_fetch_is_read_only_if_it_is_one(checkpoint: Path) -> None:
    expected = model_revision(checkpoint)
    record = checkpoint / RECORD
    os.mkfifo(record)
    assert model_revision(checkpoint) == expected
    for content in (DEEP, f'{{"a": {DEEP}}}', "[1]"):
        replace(record, content)
        assert model_revision(checkpoint) == expected
    record.unlink()
    record.symlink_to("/dev/zero")
    assert model_revision(checkpoint) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
        {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 1},
        {"max_position_embeddings": 2**31 - 1},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096}},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**6},
        {"hidden_size": [[[1]]] * 100_000},
    ],
    ids=min,
)
def test_numbers_that_no_model_has_are_refused(values: dict[str, Any], checkpoint: Path) -> None:
    change(checkpoint / "config.json", **values)
    with pytest.raises(ModelError) as refusal:
        ModelConfig.read(checkpoint)
    assert refusal.value.code == "invalid_config"
    assert len(refusal.value.message) < 400


def test_a_long_list_of_dense_layers_is_read_once(checkpoint: Path) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_hidden_layers": 1024}
    change(checkpoint / "config.json", **moe, mlp_only_layers=list(range(10**6, 2 * 10**6)))
    config = ModelConfig.read(checkpoint)
    assert all(isinstance(layer.feed_forward, MoeConfig) for layer in config.layers)


def header(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the weights in place."""
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    edit(entries)
    changed = json.dumps(entries).encode()
    replace(file, len(changed).to_bytes(8, "little") + changed + data[8 + length :])


def _overlap(entries: dict[str, Any]) -> None:
    one, other = [name for name in entries if name != "__metadata__"][:2]
    entries[one] = entries[other]


def _negative(entries: dict[str, Any]) -> None:
    name = next(name for name in entries if name != "__metadata__")
    first, last = entries[name]["data_offsets"]
    entries[name]["data_offsets"] = [first - 64, last - 64]


def _negative_shape(entries: dict[str, Any]) -> None:
    entry = next(entry for entry in entries.values() if len(entry.get("shape", ())) == 2)
    entry["shape"] = [-size for size in entry["shape"]]


def _fraction(entries: dict[str, Any]) -> None:
    entry = next(entry for entry in entries.values() if len(entry.get("shape", ())) == 1)
    entry["shape"] = [entry["shape"][0] + 0.5]


def _gap(entries: dict[str, Any]) -> None:
    del entries[next(name for name in entries if name != "__metadata__")]


@pytest.mark.parametrize("edit", [_overlap, _negative, _negative_shape, _fraction, _gap])
def test_tensors_outside_their_place_are_refused(
    edit: Callable[[dict[str, Any]], object], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header(checkpoint, edit)
    assert "(corrupt_checkpoint)" in checked(checkpoint, capsys)


@pytest.mark.parametrize("content", [DEEP, f'{{"a": {DEEP}}}', '{"__metadata__": ' + DEEP + "}", '{"a": 1}', "null"])
def test_a_header_that_is_no_list_of_tensors_is_refused(
    content: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(checkpoint / "model.safetensors", len(content).to_bytes(8, "little") + content.encode())
    assert "(corrupt_checkpoint)" in checked(checkpoint, capsys)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='a' * 64) %}{% for a in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for a in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{{ '%3000000000d' | format(messages | length) }}",
        "{{ messages[0].content | center(3000000000) }}",
        "{% if tools %}{{ 'a' * (tools | length) * 3000000000 }}{% endif %}Hello",
    ],
)
def test_a_chat_template_that_needs_gigabytes_or_minutes_is_refused(template: str, checkpoint: Path) -> None:
    replace(checkpoint / "chat_template.jinja", template)
    with pytest.raises(TokenizerError) as refusal:
        try_files(checkpoint, fork=True)
    assert refusal.value.code == "tokenizer_limits"


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{{ 1" + " + 1" * 50_000 + " }}",
        "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    ],
    ids=["parentheses", "sums", "blocks"],
)
def test_a_chat_template_that_is_nested_too_deeply_fails_chats_only(
    template: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(checkpoint / "chat_template.jinja", template)
    assert main(["models", "check", str(checkpoint)]) == 0
    assert "cannot be compiled" in capsys.readouterr().out


def test_a_chat_template_that_is_not_utf_8_is_refused(checkpoint: Path) -> None:
    replace(checkpoint / "chat_template.jinja", b"\xff\xfe")
    with pytest.raises(TokenizerError) as refusal:
        try_files(checkpoint)
    assert refusal.value.code == "tokenizer_broken"


def test_a_normalizer_that_lengthens_text_without_end_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    change(checkpoint / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [double] * 40})
    assert "(tokenizer_limits)" in checked(checkpoint, capsys)


def test_an_intact_checkpoint_passes_the_trial(intact: Path) -> None:
    assert try_files(intact) is None
    assert try_files(intact, fork=True) is None


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_copy_that_tries_files_keeps_no_descriptor_of_its_process(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_descriptors(_: object) -> NoReturn:
        raise TokenizerError("open", " ".join(name for name in os.listdir("/proc/self/fd") if is_open(int(name))))

    monkeypatch.setattr("minisgl.tokenizer.trial.load_model_files", open_descriptors)
    with (tmp_path / "file").open("w") as file:
        high = fcntl.fcntl(file, fcntl.F_DUPFD, 1_000)
        try:
            with pytest.raises(TokenizerError) as answer:
                try_files(intact, fork=True)
        finally:
            os.close(high)
    assert {*answer.value.message.split()} <= {"0", "1", "2"}
