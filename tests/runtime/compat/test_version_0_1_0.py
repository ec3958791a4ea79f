"""Messages and files are readable in both directions between version 0.1.0 and this one: pods of both run side by side
while a model is updated, and files outlive the version that wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.compat.frames import FRAMES, Sample, load
from support.compat.previous import unpack, write_and_read
from support.compat.today import NEW_SINCE, commit_of_fetched, families

VERSION = "0.1.0"

RECORDED = load(VERSION)
TODAY = families(VERSION)
NEW = NEW_SINCE[VERSION]

SAMPLES = [(family, name) for family, frames in RECORDED.items() for name in frames.samples]

EACH_FAMILY = pytest.mark.parametrize("family", RECORDED)
EACH_SAMPLE = pytest.mark.parametrize(("family", "name"), SAMPLES)


@dataclass(frozen=True)
class Previous:
    """Results of the code of 0.1.0: the frames that it wrote, and its values of frames that this version encodes."""

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


def test_every_family_of_messages_has_frames() -> None:
    assert RECORDED.keys() == TODAY.keys()


@EACH_FAMILY
def test_every_type_of_message_has_a_full_and_a_least_frame(family: str) -> None:
    known = [tag for tag in TODAY[family].tags if tag not in NEW.get(family, ())]
    assert {f"{tag}/{kind}".lstrip("/") for tag in known for kind in ("full", "least")} <= RECORDED[
        family
    ].samples.keys()


@EACH_FAMILY
def test_messages_have_the_same_fields_types_and_defaults(family: str) -> None:
    """New fields are listed in `support.compat.today.NEW_SINCE`; no field is renamed, retyped or removed."""
    new = NEW.get(family, frozenset())
    today = TODAY[family].schema
    assert new <= today.keys()
    assert {path: text for path, text in today.items() if path not in new} == RECORDED[family].schema


@EACH_SAMPLE
def test_this_version_reads_what_the_previous_one_sends(family: str, name: str) -> None:
    assert TODAY[family].decode(sample(family, name).frame) == sample(family, name).value


def has_new_fields(family: str, name: str) -> bool:
    """Then more may be sent than the previous version would, which it must be able to read all the same."""
    tag = name.partition("/")[0]
    return any(path.startswith((f"{tag}.", ".", "[")) for path in NEW.get(family, ()))


@pytest.mark.parametrize(("family", "name"), [each for each in SAMPLES if not has_new_fields(*each)])
def test_this_version_sends_the_same_bytes(family: str, name: str) -> None:
    assert TODAY[family].encode(sample(family, name).given) == sample(family, name).frame


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
