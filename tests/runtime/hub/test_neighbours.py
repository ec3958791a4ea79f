"""Fetches beside other checkpoints: identical files are linked, and unused checkpoints are removed for space."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_hub import FakeHub, Repository
from minisgl.cli.main import main
from minisgl.hub import fetch as model_fetch
from minisgl.hub import neighbours as model_neighbours
from minisgl.hub.fetch import fetch
from minisgl.hub.fetch_error import FetchError
from minisgl.hub.neighbours import FetchRecord, Neighbours, make_room, read_record, reclaimable_bytes, try_lock
from minisgl.hub.repository import Source
from minisgl.wire.status import FetchStatus

OLD, NEW = "org/old", "org/new"
FILE_BYTES = 1 << 20
KEPT, CHANGED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_checkpoint(directory: Path, **seeds: int) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    for name, seed in ((KEPT, 1), (CHANGED, seeds.get("changed", 2))):
        (directory / name).write_bytes(random.Random(seed).randbytes(FILE_BYTES))
    return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Two revisions of a model, which differ in one of two large files."""
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(model_fetch, "_FIRST_WAIT_SECONDS", 0.01)
    source = tmp_path / "source"
    source.mkdir()
    repositories = {
        OLD: Repository(make_checkpoint(source / "old")),
        NEW: Repository(make_checkpoint(source / "new", changed=3)),
    }
    fake = FakeHub(repositories)
    with fake.serve("127.0.0.1", "127.0.0.2") as url:
        fake.url = url  # type: ignore[attr-defined]
        yield fake


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume"


class Disk:
    """A volume of `size` bytes: free space follows from the files on it."""

    def __init__(self, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 100 * FILE_BYTES
        self._volume = volume
        for module in (model_fetch, model_neighbours):
            fake = types.SimpleNamespace(disk_usage=self.usage, rmtree=shutil.rmtree)
            monkeypatch.setattr(module, "shutil", fake)

    def usage(self, _: Path) -> types.SimpleNamespace:
        inodes = {path.stat().st_ino: path.stat().st_blocks * 512 for path in self._volume.rglob("*") if path.is_file()}
        return types.SimpleNamespace(free=self.size - sum(inodes.values()))


@pytest.fixture
def disk(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(volume, monkeypatch)


def run(hub: FakeHub, repository: str, directory: Path, **neighbours: Any) -> list[FetchStatus]:
    published: list[FetchStatus] = []
    endpoint: str = hub.url  # type: ignore[attr-defined]
    source = Source(repository=repository, revision="main", endpoint=endpoint)
    settings = Neighbours(**{"owner": "qwen", "share_files": True, **neighbours})
    published.append(fetch(source, directory, published.append, settings))
    return published


def assert_content(hub: FakeHub, repository: str, directory: Path) -> None:
    for name in (KEPT, CHANGED, "config.json"):
        assert (directory / name).read_bytes() == hub.repositories[repository].file(name).read_bytes()
    assert not list(directory.glob("*.part"))


def same_file(*paths: Path) -> bool:
    return len({path.stat().st_ino for path in paths}) == 1


def names(volume: Path) -> set[str]:
    return {path.name for path in volume.iterdir() if path.is_dir()}


def test_a_checkpoint_that_another_model_fetches_at_the_same_time_has_no_owner(
    hub: FakeHub, volume: Path, tmp_path: Path
) -> None:
    """Otherwise that model could remove it, while this one uses it."""
    run(hub, OLD, tmp_path / "other", owner="other")

    def publish(status: FetchStatus) -> None:
        if status.phase == "Downloading" and not (volume / "old").exists():
            # The other model is faster.
            shutil.copytree(tmp_path / "other", volume / "old")

    endpoint: str = hub.url  # type: ignore[attr-defined]
    source = Source(repository=OLD, revision="main", endpoint=endpoint)
    assert fetch(source, volume / "old", publish, Neighbours(owner="qwen")).phase == "Done"
    record = read_record(volume / "old")
    assert record is not None and record.owner == ""


def test_a_symbolic_link_is_never_linked(hub: FakeHub, volume: Path, tmp_path: Path) -> None:
    """As in a copy of the Hub's cache, whose blobs a user may remove."""
    run(hub, OLD, volume / "old")
    blob = tmp_path / "blob"
    (volume / "old" / KEPT).rename(blob)
    (volume / "old" / KEPT).symlink_to(blob)
    run(hub, NEW, volume / "new")
    assert not (volume / "new" / KEPT).is_symlink()
    blob.unlink()
    assert_content(hub, NEW, volume / "new")


def test_files_of_an_earlier_revision_are_linked_and_not_downloaded(hub: FakeHub, volume: Path) -> None:
    run(hub, OLD, volume / "old")
    published = run(hub, NEW, volume / "new")
    assert hub.downloads(NEW) == 1
    assert same_file(volume / "old" / KEPT, volume / "new" / KEPT)
    assert not same_file(volume / "old" / CHANGED, volume / "new" / CHANGED)
    # A user may edit a configuration file in place.
    assert not same_file(volume / "old" / "config.json", volume / "new" / "config.json")
    assert_content(hub, NEW, volume / "new")
    assert (published[-1].phase, published[-1].percent) == ("Done", 100)


def test_files_are_shared_only_on_request(hub: FakeHub, volume: Path) -> None:
    run(hub, OLD, volume / "old")
    run(hub, NEW, volume / "new", share_files=False)
    assert hub.downloads(NEW) == 2
    assert not same_file(volume / "old" / KEPT, volume / "new" / KEPT)


def test_files_without_a_recorded_digest_are_hashed_before_they_are_linked(hub: FakeHub, volume: Path) -> None:
    """Partial downloads have no record."""
    run(hub, OLD, volume / "old")
    record = json.loads((volume / "old" / "minisgl-fetch.json").read_text())
    for field in ("files", "owner"):
        del record[field]
    (volume / "old" / "minisgl-fetch.json").write_text(json.dumps(record))
    run(hub, NEW, volume / "new")
    assert hub.downloads(NEW) == 1
    assert same_file(volume / "old" / KEPT, volume / "new" / KEPT)
    assert_content(hub, NEW, volume / "new")


def test_a_shorter_file_than_the_recorded_one_is_not_linked(hub: FakeHub, volume: Path) -> None:
    run(hub, OLD, volume / "old")
    (volume / "old" / KEPT).write_bytes(b"cut off")
    run(hub, NEW, volume / "new")
    assert hub.downloads(NEW) == 2
    assert_content(hub, NEW, volume / "new")


def test_a_file_system_without_links_is_used_with_copies(
    hub: FakeHub, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    run(hub, OLD, volume / "old")
    monkeypatch.setattr("os.link", refuse)
    run(hub, NEW, volume / "new")
    assert_content(hub, NEW, volume / "new")


def test_files_that_cannot_be_read_or_lie_outside_are_downloaded(
    hub: FakeHub, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, whom permissions do not stop."""

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path == volume / "copied" / KEPT:
            raise PermissionError("Permission denied")
        return opened(path, *args, **options)

    shutil.copytree(hub.repositories[OLD].directory, volume / "copied")
    outside = volume.parent / "outside"
    shutil.copy(hub.repositories[OLD].file(KEPT), outside)
    run(hub, OLD, volume / "old", share_files=False)
    record = json.loads((volume / "old" / "minisgl-fetch.json").read_text())
    record["files"] = {"../../outside": record["files"][KEPT], KEPT: "0", CHANGED: "0"}
    (volume / "old" / "minisgl-fetch.json").write_text(json.dumps(record))
    opened = Path.open
    monkeypatch.setattr(Path, "open", refuse)
    run(hub, NEW, volume / "new")
    assert hub.downloads(NEW) == 2
    assert_content(hub, NEW, volume / "new")


def test_files_of_an_interrupted_download_of_another_commit_are_linked(hub: FakeHub, volume: Path) -> None:
    partial = volume / "new.partial-0123456789ab"
    partial.mkdir()
    shutil.copy(hub.repositories[OLD].file(KEPT), partial / KEPT)
    (volume / "new.partial-").mkdir()
    run(hub, NEW, volume / "new")
    assert hub.downloads(NEW) == 1
    assert not partial.exists()
    assert_content(hub, NEW, volume / "new")


def test_what_does_not_fit_is_reported_before_the_download(hub: FakeHub, volume: Path, disk: Disk) -> None:
    disk.size = FILE_BYTES
    published: list[FetchStatus] = []
    source = Source(repository=NEW, revision="main", endpoint=hub.url)  # type: ignore[attr-defined]
    with pytest.raises(FetchError) as failed:
        fetch(source, volume / "new", published.append)
    assert failed.value.code == "NoSpace"
    assert not hub.downloads(NEW)
    assert published[-1].needed_bytes > 2 * FILE_BYTES
    assert published[-1].free_bytes == FILE_BYTES


def test_an_unused_checkpoint_is_removed_when_room_is_needed(hub: FakeHub, volume: Path, disk: Disk) -> None:
    run(hub, OLD, volume / "old", share_files=False)
    disk.size = 3 * FILE_BYTES
    run(hub, NEW, volume / "new", share_files=False, prune="unused", keep=("new",))
    assert names(volume) == {"new"}
    assert_content(hub, NEW, volume / "new")


def test_nothing_is_removed_while_there_is_room(hub: FakeHub, volume: Path, disk: Disk) -> None:
    run(hub, OLD, volume / "old")
    run(hub, NEW, volume / "new", prune="unused")
    assert names(volume) == {"old", "new"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prune": "partial"},
        {"prune": "unused", "keep": ("old",)},
        {"prune": "unused", "owner": "other"},
        {"prune": "unused", "owner": ""},
    ],
    ids=str,
)
def test_a_checkpoint_that_may_be_in_use_is_never_removed(
    hub: FakeHub, volume: Path, disk: Disk, settings: dict[str, Any]
) -> None:
    run(hub, OLD, volume / "old")
    disk.size = 3 * FILE_BYTES
    with pytest.raises(FetchError, match="make the volume larger"):
        run(hub, NEW, volume / "new", share_files=False, **settings)
    assert_content(hub, OLD, volume / "old")


def test_a_checkpoint_that_another_model_uses_too_is_never_removed(hub: FakeHub, volume: Path, disk: Disk) -> None:
    run(hub, OLD, volume / "old")
    assert run(hub, OLD, volume / "old", owner="other")[-1].commit == hub.repositories[OLD].commit
    disk.size = 3 * FILE_BYTES
    with pytest.raises(FetchError):
        run(hub, NEW, volume / "new", share_files=False, prune="unused")
    assert_content(hub, OLD, volume / "old")


def test_directories_that_no_fetch_made_are_never_removed(hub: FakeHub, volume: Path, disk: Disk) -> None:
    shutil.copytree(hub.repositories[OLD].directory, volume / "copied")
    disk.size = 3 * FILE_BYTES
    with pytest.raises(FetchError):
        run(hub, NEW, volume / "new", share_files=False, prune="unused")
    assert names(volume) >= {"copied"}


def test_a_checkpoint_that_is_being_fetched_is_not_removed(hub: FakeHub, volume: Path, disk: Disk) -> None:
    run(hub, OLD, volume / "old")
    disk.size = 3 * FILE_BYTES
    with try_lock(volume / "old") as locked, pytest.raises(FetchError):
        assert locked
        run(hub, NEW, volume / "new", share_files=False, prune="unused")
    assert_content(hub, OLD, volume / "old")


def test_nothing_is_removed_if_that_would_not_make_enough_room(hub: FakeHub, volume: Path, disk: Disk) -> None:
    """The files of the unused checkpoint are also those of one in use: its removal frees nothing."""
    run(hub, OLD, volume / "old")
    run(hub, OLD, volume / "linked")
    assert same_file(volume / "old" / KEPT, volume / "linked" / KEPT)
    disk.size = 3 * FILE_BYTES
    with pytest.raises(FetchError):
        run(hub, NEW, volume / "new", share_files=False, prune="unused", keep=("linked",))
    assert names(volume) >= {"old", "linked"}


def test_partial_downloads_of_other_checkpoints_are_removed_for_room(hub: FakeHub, volume: Path, disk: Disk) -> None:
    partial, cut_off = volume / "old.partial-0123456789ab", volume / ".older.removed"
    for directory in (partial, cut_off):
        directory.mkdir()
        shutil.copy(hub.repositories[OLD].file(CHANGED), directory / CHANGED)
    disk.size = 3 * FILE_BYTES
    run(hub, NEW, volume / "new", prune="partial")
    assert names(volume) == {"new"}


@given(
    checkpoints=st.lists(
        st.tuples(st.sampled_from(["qwen", "other", ""]), st.booleans(), st.integers(0, 8), st.booleans()), max_size=6
    ),
    free=st.integers(0, 40),
    needed=st.integers(1, 60),
)
def test_only_unused_checkpoints_are_removed_and_only_for_enough_room(
    checkpoints: list[tuple[str, bool, int, bool]], free: int, needed: int
) -> None:
    """Sizes are in blocks of 4 KiB. Each checkpoint has an owner, may be kept, and may share a file with the first."""
    block = 4096
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        volume = Path(folder)
        target = volume / "new.partial-0123456789ab"
        target.mkdir()
        disk = Disk(volume, patch)
        for number, (owner, _, size, shared) in enumerate(checkpoints):
            made = volume / f"old{number}"
            made.mkdir()
            (made / "own").write_bytes(bytes(size * block))
            if shared and number:
                os.link(volume / "old0" / "own", made / "shared")
            record = FetchRecord(repository="org/old", revision="main", commit="0", owner=owner)
            (made / "minisgl-fetch.json").write_bytes(msgspec.json.encode(record))
        disk.size += free * block - disk.usage(volume).free
        keep = tuple(f"old{number}" for number, (_, kept, *_) in enumerate(checkpoints) if kept)
        settings = Neighbours(owner="qwen", prune="unused", keep=keep)
        make_room(needed * block, target, settings)
        removed = {f"old{number}" for number in range(len(checkpoints))} - names(volume)
        obsolete = {f"old{number}" for number, (owner, kept, *_) in enumerate(checkpoints) if owner == "qwen"} - {*keep}
        assert removed <= obsolete
        enough = disk.usage(volume).free >= needed * block
        assert enough or not removed
        assert enough or reclaimable_bytes([volume / name for name in sorted(obsolete)]) + free * block < needed * block


def test_an_open_file_of_a_removed_checkpoint_stays_readable(hub: FakeHub, volume: Path, disk: Disk) -> None:
    run(hub, OLD, volume / "old")
    disk.size = 3 * FILE_BYTES
    with (volume / "old" / CHANGED).open("rb") as opened:
        run(hub, NEW, volume / "new", share_files=False, prune="unused")
        assert opened.read() == hub.repositories[OLD].file(CHANGED).read_bytes()


def test_the_command_reports_what_is_missing(
    hub: FakeHub, volume: Path, disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.size = FILE_BYTES
    url: str = hub.url  # type: ignore[attr-defined]
    command = ["models", "fetch", NEW, str(volume / "new"), "--endpoint", url]
    command += ["--owner", "qwen", "--share-files", "--prune", "unused", "--keep", "old", "older"]
    assert main(command) == 1
    status = json.loads(capsys.readouterr().out)
    assert (status["phase"], status["reason"], status["free_bytes"]) == ("Failed", "NoSpace", FILE_BYTES)
    assert status["needed_bytes"] > 2 * FILE_BYTES
