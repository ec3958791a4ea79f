"""Run buildah with its own store in the cache, in a mount namespace, so that its mounts disappear with it."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.layout import CACHE
from cluster.places import CommandFailed, shell

STORE: Final = CACHE / "buildah"
BLOBS: Final = CACHE / "images/blobs"
"""Layers and configurations of all images, uncompressed and named by their SHA-256."""

_SETTINGS: Final = ("/etc/pip.conf", "/etc/ssl/certs", "/etc/apt/sources.list.d", "/etc/apt/sources.list")
"""Settings of the machine that are mounted during a build and are not part of the image."""


@dataclass(frozen=True)
class Exported:
    """Blobs of an image: SHA-256 of its configuration, and of its layers from the bottom up."""

    config: str
    layers: tuple[str, ...]


def run(*args: str) -> str:
    where = ["--root", f"{STORE}/storage", "--runroot", f"{STORE}/run", "--storage-driver", "overlay"]
    return shell("unshare", "--mount", "buildah", *where, *args).stdout


def remove_all_but(images: Collection[str]) -> None:
    """Remove all other images from the store."""
    for image in run("images", "--format", "{{.Name}}:{{.Tag}}").split():
        if image not in images and "<none>" not in image:
            run("rmi", image)


def run_in(image: str, *command: str) -> str:
    """Run a command in a container of the image; returns its output."""
    container = run("from", image).strip()
    try:
        return run("run", "--isolation", "chroot", container, "--", *command)
    finally:
        run("rm", container)


def image_from_directory_tar(image: str, archive: Path) -> None:
    """Create an image with one layer from a root file system in a tar file."""
    container = run("from", "scratch").strip()
    try:
        run("add", "--quiet", container, str(archive), "/")
        run("commit", "--quiet", container, image)
    finally:
        run("rm", container)


def bud(image: str, dockerfile: Path, context: Path, arguments: Mapping[str, str], target: str | None = None) -> None:
    """Build a Dockerfile. Each step runs in a chroot with the network of the host; no layer is cached."""
    command = ["bud", "--isolation", "chroot", "--network", "host", "--layers=false", "--tag", image]
    command += [f"--volume={path}:{path}:ro" for path in _SETTINGS if Path(path).exists()]
    command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command += [f"--target={target}"] if target else []
    run(*command, "--file", str(dockerfile), str(context))


def export(image: str) -> Exported:
    """Write the image's blobs into BLOBS, except for those that exist already."""
    BLOBS.mkdir(parents=True, exist_ok=True)
    where = ["--root", f"{STORE}/storage", "--runroot", f"{STORE}/run", "--storage-driver", "overlay"]
    command = ["unshare", "--mount", "buildah", *where, "push", "--quiet", "--disable-compression", image]
    manifest = None
    with subprocess.Popen([*command, "docker-archive:/dev/stdout"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|", bufsize=1 << 20) as tar:
            for member in tar:
                digest, _, kind = member.name.partition(".")
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                if member.name == "manifest.json":
                    (manifest,) = json.loads(content.read())
                elif kind in ("tar", "json") and "/" not in digest and not (BLOBS / digest).exists():
                    unfinished = BLOBS / f"{digest}.new"
                    with unfinished.open("wb") as file:
                        while block := content.read(1 << 20):
                            file.write(block)
                    unfinished.rename(BLOBS / digest)
    if process.returncode or manifest is None:
        raise CommandFailed(f"buildah push of {image}: exit status {process.returncode}")
    return Exported(
        config=manifest["Config"].removesuffix(".json"),
        layers=tuple(layer.removesuffix(".tar") for layer in manifest["Layers"]),
    )
