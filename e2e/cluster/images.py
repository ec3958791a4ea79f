"""Load images onto running nodes, and into a seed for nodes that are created later."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import tools
from cluster.containers import PAUSE, containerd, ctr
from cluster.layout import CACHE, STATE
from cluster.oci import archive_of_blobs, single_file_image
from cluster.places import SEED, CommandFailed, hold, kill, nodes, stop


def pause_archive() -> Path:
    archive = STATE / "pause.tar"
    if not archive.exists():
        unfinished = STATE / "pause.tar.new"
        single_file_image(unfinished, PAUSE, tools.program("pause"), user="65535:65535")
        unfinished.rename(archive)
    return archive


def import_archive(place: str, archive: Path) -> None:
    """Import one image, and check that it is complete."""
    ctr(place, "images", "import", "--local", "--digests=false", str(archive.resolve()))
    for line in ctr(place, "images", "check").splitlines()[1:]:
        if "incomplete" in line or line.rstrip().endswith("false"):
            raise CommandFailed(f"{place}: incomplete image: {line}")


def load_archive(archive: Path) -> None:
    """Import an image archive (docker save, or an OCI archive) into all running nodes."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: import_archive(name, archive), nodes()))


@dataclass(frozen=True)
class BlobImage:
    """Image as files of a directory, named by their SHA-256."""

    reference: str
    blobs: Path
    config: str
    layers: tuple[str, ...]
    """SHA-256 of the layers from the bottom up."""


def load(image: BlobImage, places: Sequence[str] | None = None) -> None:
    """Import an image into these nodes (default: all running ones), without layers that a node has already."""

    def into(name: str) -> None:
        known = set(ctr(name, "content", "ls", "-q").split())
        with tempfile.TemporaryDirectory(dir=STATE) as directory:
            archive = Path(directory) / "image.tar"
            archive_of_blobs(archive, image.reference, image.blobs, image.config, image.layers, known)
            import_archive(name, archive)

    with ThreadPoolExecutor() as pool:
        list(pool.map(into, nodes() if places is None else places))


def seed_directory() -> Path | None:
    """Directory of the seed: a containerd root with large images unpacked, to which new nodes link."""
    pointer = CACHE / "seed/current"
    return pointer.resolve() if pointer.exists() else None


def make_seed(seeded: Sequence[BlobImage]) -> None:
    """Unpack images into the seed, unless it contains exactly these."""
    with tools.locked(CACHE / "seed.lock"):
        _make_seed(seeded)


def _make_seed(seeded: Sequence[BlobImage]) -> None:
    key = hashlib.sha256(repr(seeded).encode()).hexdigest()[:16]
    target = CACHE / "seed" / key
    if not target.exists():
        unfinished = CACHE / "seed/new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        STATE.mkdir(parents=True, exist_ok=True)
        kill(SEED)
        hold(SEED)
        try:
            containerd(SEED, unfinished)
            for image in seeded:
                load(image, [SEED])
        finally:
            # The databases are complete only after containerd was stopped with TERM.
            stop("containerd", SEED, seconds=30)
            kill(SEED)
            shutil.rmtree(STATE / SEED, ignore_errors=True)
        unfinished.rename(target)
    _point_to(target)


def _point_to(target: Path) -> None:
    pointer = target.with_name("current")
    if pointer.exists() and pointer.resolve() == target.resolve():
        return
    unfinished = target.with_name("current.new")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target.name)
    os.replace(unfinished, pointer)
    for old in target.parent.iterdir():
        if old.is_dir() and not old.is_symlink() and old != target:
            shutil.rmtree(old)
