"""The images and their sources.

The tag of an image is the hash of its sources: a tag never changes its meaning, and an existing image is not built
again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.layout import CACHE
from cluster.places import shell
from cluster.system import IMAGE_PACKAGES, NODE_PACKAGES, require
from cluster.tools import locked, say
from image_builder import buildah, cpu_torch
from image_builder.buildah import Exported

ROOT: Final = Path(__file__).parents[2]
BASE_PACKAGES: Final = "python3,python3-pip,ca-certificates,procps"
NAMES: Final = ("operator", "frontend", "engine")
PREVIOUS: Final = "0.2.0"
"""Version from which upgrades are tested."""
_ARCHIVE: Final = ROOT / f"e2e/previous/{PREVIOUS}.tar.xz"
_IMPORTS: Final = "import torch, triton, flashinfer; print('torch', torch.__version__, 'for CUDA', torch.version.cuda)"
_OWN: Final = {
    "operator": ("runtime/minisgl", "operator/minisgl_operator", "images/minisgl-operator"),
    "frontend": ("runtime/minisgl", "images/minisgl"),
    "engine": ("runtime/minisgl", "images/minisgl"),
}


@dataclass(frozen=True)
class Image:
    """Built image."""

    reference: str
    exported: Exported


@dataclass(frozen=True)
class Built:
    """Image with our code, and the image with its dependencies that it is based on."""

    image: Image
    dependencies: Image


def build_all() -> dict[str, Built]:
    """Build all images that are not up to date; returns them by name: operator, frontend, engine. Raises CommandFailed,
    MachineUnfit."""
    require({**NODE_PACKAGES, **IMAGE_PACKAGES})
    with locked(CACHE / "images.lock"):
        built = {name: _build(name) for name in NAMES}
        previous = {reference for reference in map(_previous_reference, NAMES) if _record(reference).exists()}
        today = {image.reference for b in built.values() for image in (b.image, b.dependencies)}
        _remove_all_but({_base(), *today, *previous})
        return built


def build_previous() -> dict[str, Image]:
    """Build the images of the previous version: its code on the dependencies of today's images. Raises CommandFailed,
    MachineUnfit."""
    require({**NODE_PACKAGES, **IMAGE_PACKAGES})
    with locked(CACHE / "images.lock"):
        return {name: _build_previous(name) for name in NAMES}


def previous_sources() -> Path:
    """Directory with the files of the previous version, unpacked once."""
    target = CACHE / "previous" / f"{PREVIOUS}-{_key(_ARCHIVE)}"
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        with tarfile.open(_ARCHIVE) as archive:
            # Python 3.11.2, which Debian 12 has, takes no filter.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(unfinished)
        (unfinished / PREVIOUS).rename(target)
        unfinished.rmdir()
    return target


def check_engine() -> None:
    """Build the engine image of users, with the CUDA libraries, import in it the packages that need no GPU, and remove
    it. Does nothing if its dependencies were checked before. Raises CommandFailed, MachineUnfit."""
    require(IMAGE_PACKAGES)
    with locked(CACHE / "images.lock"):
        dockerfile = ROOT / "images/engine/Dockerfile"
        key = _key(_base(), dockerfile, dockerfile.with_name("requirements.lock"), dockerfile.with_name("apt-install"))
        checked = CACHE / f"images/engine-{key}.checked"
        if checked.exists():
            return
        began = time.monotonic()
        say("building the engine image of users, with the CUDA libraries (5 GB, some minutes) ...")
        dependencies, reference = (f"localhost/minisgl-engine-cuda{part}:{key}" for part in ("-dependencies", ""))
        # Only Docker's images of Debian name a snapshot of the archive.
        arguments = {"BASE": _base(), "APT_ARCHIVE": "current"}
        # In two steps: this version of buildah does not take the name of a stage from an argument.
        buildah.bud(dependencies, dockerfile, ROOT, arguments, target="dependencies")
        buildah.bud(reference, dockerfile, ROOT, {"BASE": _base(), "DEPENDENCIES": dependencies})
        try:
            output = buildah.run_in(reference, "python3", "-c", _IMPORTS)
            minisgl = buildah.run_in(reference, "minisgl", "version")
        finally:
            buildah.run("rmi", reference, dependencies)
        say(f"{output.strip()}\n{minisgl.strip()}\n[{time.monotonic() - began:4.0f} s] built and checked image engine")
        checked.touch()


def _build(name: str) -> Built:
    dockerfile = ROOT / "images" / name / "Dockerfile"
    dependencies = _dependencies(name)
    key = _key(dependencies, dockerfile, *(ROOT / own for own in _OWN[name]))
    reference = f"localhost/minisgl-{name}:{key}"

    def make() -> None:
        buildah.bud(reference, dockerfile, ROOT, {"BASE": _base(), "DEPENDENCIES": dependencies})

    exported = _cached(reference, make, f"{name}: own code")
    return Built(Image(reference, exported), Image(dependencies, _load(dependencies)))


def _build_previous(name: str) -> Image:
    reference = _previous_reference(name)

    def make() -> None:
        sources = previous_sources()
        arguments = {"BASE": _base(), "DEPENDENCIES": _dependencies(name)}
        buildah.bud(reference, sources / "images" / name / "Dockerfile", sources, arguments)

    return Image(reference, _cached(reference, make, f"{name}: code of {PREVIOUS}"))


def _previous_reference(name: str) -> str:
    return f"localhost/minisgl-{name}-{PREVIOUS}:{_key(_dependencies(name), _ARCHIVE)}"


def _dependencies(name: str) -> str:
    """Image with the dependencies of another image; returns its reference."""
    base = _base()
    dockerfile = ROOT / "images" / name / "Dockerfile"
    if name == "engine":
        return _cpu_dependencies(base)
    stage = dockerfile.read_text().partition("FROM ${DEPENDENCIES}")[0]
    key = _key(base, stage, dockerfile.with_name("requirements.lock"))
    reference = f"localhost/minisgl-{name}-dependencies:{key}"

    def make() -> None:
        buildah.bud(reference, dockerfile, ROOT, {"BASE": base}, target="dependencies")

    _cached(reference, make, f"{name}: dependencies")
    return reference


def _cpu_dependencies(base: str) -> str:
    here = Path(__file__).parent
    dockerfile = here / "cpu-dependencies.Dockerfile"
    key = _key(base, cpu_torch.requirements(), dockerfile, here / "cpu_torch.py")
    reference = f"localhost/minisgl-engine-cpu:{key}"

    def make() -> None:
        context = CACHE / "engine-cpu.new"
        shutil.rmtree(context, ignore_errors=True)
        (context / "site").mkdir(parents=True)
        lock = context / "requirements.lock"
        lock.write_text(cpu_torch.requirements())
        cpu_torch.install(context / "site", lock)
        buildah.bud(reference, dockerfile, context, {"BASE": base})
        shutil.rmtree(context)

    _cached(reference, make, "engine: dependencies for CPUs")
    return reference


def _base() -> str:
    """Base image with Debian's Python, built from packages: a registry may not be available."""
    reference = f"localhost/minisgl-base:{_key(BASE_PACKAGES)}"

    def make() -> None:
        # mmdebstrap writes a tar file if the name ends in .tar, otherwise a directory.
        archive = CACHE / "base.new.tar"
        sources = [p for p in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian.sources"))]
        unneeded = [f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in ("doc", "man", "locale")]
        clean = '--customize-hook=rm -rf "$1"/etc/apt/sources.list* "$1"/var/lib/apt/lists/*'
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", *unneeded, clean]
        shell(*command, "bookworm", archive, *(p for p in sources if p.exists()))
        buildah.image_from_directory_tar(reference, archive)
        archive.unlink()

    _cached(reference, make, "base")
    return reference


def _record(reference: str) -> Path:
    return CACHE / "images" / (reference.removeprefix("localhost/").replace(":", "-") + ".json")


def _load(reference: str) -> Exported:
    record = json.loads(_record(reference).read_text())
    return Exported(record["config"], tuple(record["layers"]))


def _cached(reference: str, make: Callable[[], None], what: str) -> Exported:
    record = _record(reference)
    if not record.exists():
        began = time.monotonic()
        say(f"building image {what} ...")
        make()
        exported = buildah.export(reference)
        unfinished = record.with_suffix(".new")
        unfinished.write_text(json.dumps(dataclasses.asdict(exported)))
        unfinished.rename(record)
        say(f"[{time.monotonic() - began:4.0f} s] built image {what}")
    return _load(reference)


def _remove_all_but(references: set[str]) -> None:
    """Remove all other images, and the blobs that only they need."""
    kept = {_record(reference) for reference in references}
    needed: set[str] = set()
    for reference in references:
        exported = _load(reference)
        needed |= {exported.config, *exported.layers}
    for record in (CACHE / "images").glob("*.json"):
        if record not in kept:
            record.unlink()
    for blob in buildah.BLOBS.iterdir():
        if blob.name not in needed:
            blob.unlink()
    buildah.remove_all_but(references)


def _key(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode() + b"\0")
            continue
        for file in _files(part):
            digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_mode & 0o777:o}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return sorted(f for f in path.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
