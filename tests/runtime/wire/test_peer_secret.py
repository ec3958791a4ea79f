"""Proofs of the tokens that the pods of a model know."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from minisgl.wire.peer_secret import NO_SECRET, PeerSecret


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


def test_a_demand_that_is_not_renewed_ends(tmp_path: Path) -> None:
    secret = mounted(tmp_path / "old", a="1.s3cret")
    before = time.time() - 1000
    os.utime(tmp_path / "old.demand", (before, before))
    assert not secret.refuses("", "join")


def test_tokens_are_replaced_one_by_one_while_pods_have_either(tmp_path: Path) -> None:
    old, new = mounted(tmp_path / "old", a="1.one", b="2.two"), mounted(tmp_path / "new", a="3.three", b="2.two")
    for maker, reader in ((old, new), (new, old)):
        assert not reader.refuses(maker.proof("join"), "join")
    (tmp_path / "new" / "b").write_text("4.four")
    assert new.refuses(old.proof("join"), "join")


def test_fingerprints_show_common_tokens_and_nothing_else_of_them(tmp_path: Path) -> None:
    one, other = mounted(tmp_path / "one", a="7.s3cret", b="8.x"), mounted(tmp_path / "other", a="7.s3cret", b="8.y")
    assert one.fingerprints()["a"] == other.fingerprints()["a"]
    assert one.fingerprints()["a"].startswith("7.")
    assert "s3cret" not in one.fingerprints()["a"]
    assert one.fingerprints()["b"] != other.fingerprints()["b"]


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
