"""What crosses versions is readable in both directions between version 0.2.0 and this one: messages between frontends
and engines, greetings of the launchers of a replica, bodies of /status, and the record of a fetched checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.compat.frames import FRAMES, Sample, load
from support.compat.previous import unpack, write_and_read
from support.compat.today import commit_of_fetched, families

VERSION = "0.2.0"

RECORDED = load(VERSION)
TODAY = families({family: frames.schema.keys() for family, frames in RECORDED.items()})
NEW = {family: TODAY[family].schema.keys() - frames.schema.keys() for family, frames in RECORDED.items()}
"""Paths of fields and types of messages that version 0.2.0 does not know."""

SAMPLES = [(family, name) for family, frames in RECORDED.items() for name in frames.samples]

EACH_FAMILY = pytest.mark.parametrize("family", RECORDED)
EACH_SAMPLE = pytest.mark.parametrize(("family", "name"), SAMPLES)


@dataclass(frozen=True)
class Previous:
    """Results of the code of 0.2.0: the frames that it wrote, and its values of frames that this version encodes."""

    written: Path
    values: dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    directory = tmp_path_factory.mktemp(VERSION)
    frames = {
        family: {name: TODAY[family].encode(sample.given) for name, sample in recorded.samples.items()}
        for family, recorded in RECORDED.items()
    }
    return Previous(directory, write_and_read(VERSION, unpack(VERSION, directory), directory, frames))


def sample(family: str, name: str) -> Sample:
    return RECORDED[family].samples[name]


def is_in_a_new_message(family: str, path: str) -> bool:
    return any(path.startswith(f"{other}.") for other in NEW[family])


@EACH_FAMILY
def test_no_field_is_renamed_retyped_or_removed_and_new_ones_have_defaults(family: str) -> None:
    today = TODAY[family].schema
    assert {path: text for path, text in today.items() if path not in NEW[family]} == RECORDED[family].schema
    required = {path for path in NEW[family] if today[path].endswith(", required")}
    assert all(is_in_a_new_message(family, path) for path in required)


@EACH_SAMPLE
def test_this_version_reads_what_the_previous_one_sends(family: str, name: str) -> None:
    assert TODAY[family].decode(sample(family, name).frame) == sample(family, name).value


@EACH_SAMPLE
def test_the_previous_version_reads_what_this_one_sends(family: str, name: str, previous: Previous) -> None:
    assert previous.values[family][name] == sample(family, name).value


def test_a_checkpoint_that_the_previous_version_fetched_is_taken_as_it_is(tmp_path: Path) -> None:
    record = sample("fetch_record", "full")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "minisgl-fetch.json").write_bytes(record.frame)
    assert commit_of_fetched(tmp_path) == record.value["commit"]


def test_the_frames_are_what_the_previous_version_writes(previous: Previous) -> None:
    kept = {path.name: path.read_text() for path in (FRAMES / VERSION).iterdir()}
    assert {path.name: path.read_text() for path in previous.written.glob("*.json")} == kept
