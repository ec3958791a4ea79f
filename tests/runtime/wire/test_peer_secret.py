"""Proofs of the tokens that the pods of a model know."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from minisgl.wire.peer_secret import NO_SECRET, PeerSecret, Proof


def mounted(folder: Path, *, required: bool = True, **tokens: str) -> PeerSecret:
    folder.mkdir()
    for name, token in tokens.items():
        (folder / name).write_text(token)
    secret = PeerSecret(str(folder), folder.with_suffix(".demand"))
    if required:
        secret.require()
    return secret


def test_a_greeting_needs_a_proof_of_a_common_token_for_the_same_words(tmp_path: Path) -> None:
    ours, theirs = mounted(tmp_path / "ours", a="1.s3cret\n"), mounted(tmp_path / "theirs", a="1.other\n")
    proof = ours.proof("join", "a", "bc")
    assert not ours.refuses(proof, "join", "a", "bc")
    assert ours.refuses(proof, "join", "ab", "c")
    assert ours.refuses(theirs.proof("join", "a", "bc"), "join", "a", "bc")
    assert ours.refuses("", "join", "a", "bc")
    assert ours.refuses("\u00e9", "join", "a", "bc")


def test_until_it_is_required_all_greetings_are_accepted(tmp_path: Path) -> None:
    secret = mounted(tmp_path / "early", required=False, a="1.s3cret")
    assert not secret.refuses("", "join")
    secret.require()
    assert secret.refuses("", "join")


def test_a_demand_that_is_not_renewed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = mounted(tmp_path / "old", a="1.s3cret")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 40)
    assert secret.refuses("", "join")
    monkeypatch.setattr(time, "monotonic", lambda: now + 50)
    assert not secret.refuses("", "join")
    secret.require()
    assert secret.refuses("", "join")


@pytest.mark.parametrize("seconds", [-100_000.0, 100_000.0])
def test_a_clock_that_is_set_neither_ends_nor_extends_a_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    secret = mounted(tmp_path / "set", a="1.s3cret")
    now, wall = time.monotonic(), time.time()
    monkeypatch.setattr(time, "time", lambda: wall + seconds)
    assert secret.refuses("", "join")
    monkeypatch.setattr(time, "monotonic", lambda: now + 50)
    monkeypatch.setattr(time, "time", lambda: wall)
    assert not secret.refuses("", "join")


def test_a_demand_from_before_a_restart_of_the_machine_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = mounted(tmp_path / "earlier", a="1.s3cret")
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    assert not secret.refuses("", "join")


def test_tokens_are_replaced_one_by_one_while_pods_have_either(tmp_path: Path) -> None:
    old, new = mounted(tmp_path / "old", a="1.one", b="2.two"), mounted(tmp_path / "new", a="3.three", b="2.two")
    for maker, reader in ((old, new), (new, old)):
        assert not reader.refuses(maker.proof("join"), "join")
    (tmp_path / "new" / "b").write_text("4.four")
    assert new.refuses(old.proof("join"), "join")


def test_fingerprints_show_common_tokens_and_nothing_else_of_them(tmp_path: Path) -> None:
    common, own = "7." + "5e" * 32, "8." + "a0" * 32
    one, other = mounted(tmp_path / "one", a=common, b=own), mounted(tmp_path / "other", a=common, b=own[:-1] + "1")
    assert one.fingerprints()["a"] == other.fingerprints()["a"]
    assert one.fingerprints()["a"].startswith("7.")
    assert "5e5e" not in one.fingerprints()["a"]
    assert one.fingerprints()["b"] != other.fingerprints()["b"]


@pytest.mark.parametrize(
    "token", ["s3cret", "s3cret.", "12345", "12345.s3cret", "\u0667." + "5e" * 32, "s3cret." + "5e" * 32]
)
def test_of_a_token_that_the_operator_has_not_written_only_a_hash_is_published(tmp_path: Path, token: str) -> None:
    [published] = mounted(tmp_path / "own", a=token).fingerprints().values()
    assert len(published) == 16
    assert set(published) <= set("0123456789abcdef")


def test_a_pod_that_cannot_read_its_tokens_refuses_everybody(tmp_path: Path) -> None:
    """As one that has as many files open as it may."""
    secret = mounted(tmp_path / "unreadable", a="1.s3cret")
    (tmp_path / "unreadable" / "a").unlink()
    (tmp_path / "unreadable" / "a").mkdir()
    assert secret.refuses("", "join")
    assert secret.proof("join") == ""


def test_the_proofs_of_a_greeting_fit_into_it(tmp_path: Path) -> None:
    secret = mounted(tmp_path / "many")
    for number in range(20):
        (tmp_path / "many" / f"token{number}").write_text(f"1.{number}")
    proof = secret.proof("join")
    assert msgspec.convert(proof, Proof) == proof
    assert not secret.refuses(proof, "join")


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_pod_without_a_token_refuses_nobody(tmp_path: Path, content: str) -> None:
    secret = mounted(tmp_path / "empty", a=content)
    assert secret.proof("join") == ""
    assert not secret.refuses("", "join")
    assert not PeerSecret(str(tmp_path / "missing"), tmp_path / "empty.demand").refuses("", "join")
    assert not NO_SECRET.refuses("", "join")


def test_the_kubelets_own_entries_are_no_tokens(tmp_path: Path) -> None:
    """A kubelet mounts links to files of a directory that it replaces as a whole."""
    secret = mounted(tmp_path / "kubelet")
    (tmp_path / "kubelet" / "..2026").mkdir()
    (tmp_path / "kubelet" / "..2026" / "a").write_text("1.s3cret")
    (tmp_path / "kubelet" / "..data").symlink_to("..2026")
    (tmp_path / "kubelet" / "a").symlink_to("..data/a")
    assert list(secret.fingerprints()) == ["a"]
