"""OCI images as tar files for `ctr images import`, without a registry.

The archive has the image layout of the OCI image specification, with uncompressed layers.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

_MEDIA: Final = "application/vnd.oci.image."


def single_file_image(out: Path, reference: str, program: Path, user: str) -> None:
    """Image with a single file: a static program, which is also its entry point."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, program.name, program.read_bytes(), 0o755)
    blob = layer.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [_digest(blob)]},
    }
    encoded = json.dumps(config).encode()
    with tarfile.open(out, "w") as tar:
        _add_head(tar, reference, _manifest(encoded, [_described(blob, "layer.v1.tar")]))
        for content in (encoded, blob):
            _add(tar, _name(_digest(content)), content)


def archive_of_blobs(
    out: Path, reference: str, blobs: Path, config: str, layers: Sequence[str], known: Collection[str]
) -> None:
    """Pack an image from a directory of blobs named by their SHA-256, without layers that the receiver has.

    `config` and `layers` are SHA-256 sums, `known` are digests ("sha256:...") of what the receiver has.
    """
    encoded = (blobs / config).read_bytes()
    described = [_sized(layer, (blobs / layer).stat().st_size, "layer.v1.tar") for layer in layers]
    manifest = _manifest(encoded, described)
    with tarfile.open(out, "w", dereference=True) as tar:
        _add_head(tar, reference, manifest)
        _add(tar, _name(_digest(encoded)), encoded)
        for layer in dict.fromkeys(layers):
            if f"sha256:{layer}" not in known:
                tar.add(blobs / layer, _name(f"sha256:{layer}"))


def _manifest(config: bytes, layers: list[dict[str, Any]]) -> bytes:
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MEDIA + "manifest.v1+json",
            "config": _described(config, "config.v1+json"),
            "layers": layers,
        }
    ).encode()


def _add_head(tar: tarfile.TarFile, reference: str, manifest: bytes) -> None:
    named = _described(manifest, "manifest.v1+json") | {"annotations": {"io.containerd.image.name": reference}}
    _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
    _add(tar, _name(_digest(manifest)), manifest)


def _described(blob: bytes, kind: str) -> dict[str, Any]:
    return _sized(hashlib.sha256(blob).hexdigest(), len(blob), kind)


def _sized(sha256: str, size: int, kind: str) -> dict[str, Any]:
    return {"mediaType": _MEDIA + kind, "size": size, "digest": f"sha256:{sha256}"}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
