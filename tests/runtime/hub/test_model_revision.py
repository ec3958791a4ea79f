"""Model revisions: equal for copies of a checkpoint, different for other weights, whatever differs in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from minisgl.hub.model_revision import model_revision
from minisgl.hub.neighbours import FetchRecord, write_record
from minisgl.models.checkpoint import stored_tensors
from minisgl.toy.tiny import write_dummy_checkpoint, write_tiny_checkpoint

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights in two files."""
    return write_tiny_checkpoint(tmp_path / "model", "llama")


def copied(checkpoint: Path, name: str = "copy") -> Path:
    """A copy with other times and other files on the disk."""
    copy = shutil.copytree(checkpoint, checkpoint.parent / name, copy_function=shutil.copyfile)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    return copy


def change_weight(checkpoint: Path, name: str) -> None:
    """Change one bit in the middle of a tensor."""
    file, _, _, (first, end), _ = stored_tensors(checkpoint)[name]
    content = bytearray(file.read_bytes())
    content[(first + end) // 2] ^= 1
    file.write_bytes(content)


def write_safetensors(directory: Path, files: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write a checkpoint of these tensors, of dtype U8, by file and name."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    for file, tensors in files.items():
        header, data = {}, b""
        for name, content in tensors.items():
            offsets = [len(data), len(data) + len(content)]
            header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}
            data += content
        encoded = json.dumps(header).encode()
        (directory / file).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return directory


def test_a_copy_has_the_same_revision(checkpoint: Path) -> None:
    assert model_revision(copied(checkpoint)) == model_revision(checkpoint) != ""


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_one_changed_weight_is_another_revision(checkpoint: Path, name: str) -> None:
    before = model_revision(checkpoint)
    change_weight(checkpoint, name)
    assert model_revision(checkpoint) != before


def test_weights_of_another_seed_and_another_configuration_are_other_revisions(
    checkpoint: Path, tmp_path: Path
) -> None:
    found = {model_revision(checkpoint), model_revision(write_tiny_checkpoint(tmp_path / "seed", "llama", seed=1))}
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(config.replace('"rope_theta": 500000.0', '"rope_theta": 400000.0'))
    assert (checkpoint / "config.json").read_text() != config
    found.add(model_revision(checkpoint))
    assert len(found) == 3


def test_each_layer_of_a_model_with_many_experts_is_sampled(tmp_path: Path) -> None:
    layers = range(20)
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in layers for expert in range(100)]
    before = model_revision(write_safetensors(tmp_path / "before", {"model.safetensors": dict.fromkeys(names, b"0")}))
    for layer in layers:
        changed = {name: b"1" if name.startswith(f"model.layers.{layer}.") else b"0" for name in names}
        directory = write_safetensors(tmp_path / str(layer), {"model.safetensors": changed})
        assert model_revision(directory) != before


def test_the_commit_of_a_fetched_checkpoint_is_a_part_of_its_revision(checkpoint: Path, tmp_path: Path) -> None:
    digest = model_revision(checkpoint)
    copy = copied(checkpoint)
    for commit, folder in ((COMMIT, checkpoint), (OTHER_COMMIT, copy)):
        write_record(folder, FetchRecord(repository="org/m", revision="main", commit=commit))
        assert model_revision(folder) == f"{commit}-{digest}"
    change_weight(copy, "lm_head.weight")
    assert model_revision(copy).startswith(OTHER_COMMIT)
    assert model_revision(copy) != f"{OTHER_COMMIT}-{digest}", "the files of a fetched directory were replaced"


def test_a_snapshot_in_the_cache_of_the_hubs_client_has_its_commit(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--m" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert model_revision(snapshot) == f"{COMMIT}-{model_revision(checkpoint)}"


def test_dummy_weights_have_the_revision_of_their_configuration(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    dummy = write_dummy_checkpoint(tmp_path / "dummy", config)
    other = write_dummy_checkpoint(tmp_path / "other", config | {"num_hidden_layers": 1})
    revisions = [model_revision(folder, dummy_weights=True) for folder in (dummy, other)]
    assert revisions[0] == model_revision(copied(dummy), dummy_weights=True)
    assert len({*revisions, model_revision(checkpoint)}) == 3


def _remove_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()


def _remove_weights(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()


def _cut_off(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)


def _write_impossible_offsets(checkpoint: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1e300,0]}}'
    for file in checkpoint.glob("*.safetensors"):
        file.write_bytes(len(header).to_bytes(8, "little") + header)


def _replace_by_a_directory(checkpoint: Path) -> None:
    _remove_config(checkpoint)
    (checkpoint / "config.json").mkdir()


@pytest.mark.parametrize(
    "damage", [_remove_config, _remove_weights, _cut_off, _write_impossible_offsets, _replace_by_a_directory]
)
def test_the_revision_of_a_damaged_checkpoint_is_unknown(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint)
    assert model_revision(checkpoint) == ""


def test_every_version_finds_the_same_revision(tmp_path: Path) -> None:
    """Another one here ends the answers that run while engines are upgraded from the version before."""
    long = bytes(range(251)) * 40
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": bytes([layer]) * 9 for layer in range(200)} | {"long": long}
    one = write_safetensors(tmp_path / "one", {"model.safetensors": tensors})
    several = {"model-2.safetensors": dict(list(tensors.items())[:99])}
    several |= {"model-1.safetensors": dict(list(tensors.items())[99:])}
    assert model_revision(one) == model_revision(write_safetensors(tmp_path / "several", several)) == "86d667048eec874c"
