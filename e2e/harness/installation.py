"""Start the cluster with the images, CRD, operator and chart of the working tree."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cluster import images as cluster_images
from cluster import lifecycle, tools
from cluster.containers import ctr
from cluster.control_plane import kubectl
from cluster.images import BlobImage
from cluster.layout import STATE
from cluster.places import CommandFailed, shell
from cluster.relay import host_kubeconfig
from cluster.tools import say
from harness.objects import forget, read_all
from image_builder import build
from image_builder.buildah import BLOBS

ROOT: Final = Path(__file__).parents[2]
NAMESPACE: Final = "minisgl-system"
RELEASE: Final = "minisgl"
OPERATOR: Final = "app.kubernetes.io/name=minisgl-operator"
MODELS: Final = STATE / "models"
"""Checkpoints for pods: a directory of the host that all nodes mount."""


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Print what begins, and the time that it took."""
    began = time.monotonic()
    say(f"--- {what} ...")
    yield
    say(f"--- {what}: {time.monotonic() - began:.1f} s")


def prepare() -> dict[str, build.Built]:
    """Build programs and images, each only if necessary; returns the images by name."""
    with phase("tools (Kubernetes, containerd, helm): built once, which takes 5 to 15 minutes"):
        for each in tools.ALL:
            tools.directory(each)
    with phase("images"):
        built = build.build_all()
    with phase("dependencies of the images, unpacked once"):
        cluster_images.make_seed([_blob_image(one.dependencies) for one in built.values()])
    return built


def bring_up(nodes: int = lifecycle.NODES) -> dict[str, str]:
    """Start the cluster, build and load the images, each only if necessary; returns the image references by name."""
    built = prepare()
    with phase(f"cluster with {nodes} nodes"):
        lifecycle.up(nodes)
    with phase("own code of the images onto the nodes"):
        for one in built.values():
            cluster_images.load(_blob_image(one.image))
    return {name: one.image.reference for name, one in built.items()}


def load_previous() -> dict[str, str]:
    """Build and load the images of the previous version, each only if necessary; returns their references by name."""
    with phase(f"images of {build.PREVIOUS}"):
        built = build.build_previous()
        for image in built.values():
            cluster_images.load(_blob_image(image))
    return {name: image.reference for name, image in built.items()}


def install(
    references: Mapping[str, str],
    values: Mapping[str, object] | None = None,
    *,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    chart: Path = ROOT / "charts",
) -> None:
    """Install or upgrade a chart with these images, and wait until the operator is ready."""
    # Dozens of pods that start at the same time leave it none of the cores that all nodes share, and it would lose its
    # Lease.
    settings = {"operator.resources.requests.cpu": "500m", **(values or {})}
    for value, image in (
        ("operator.image", "operator"),
        ("defaults.engineImage", "engine"),
        ("defaults.frontendImage", "frontend"),
    ):
        settings[f"{value}.repository"], _, settings[f"{value}.tag"] = references[image].rpartition(":")
    options = [f"--set-json={name}={json.dumps(value)}" for name, value in settings.items()]
    helm(
        "upgrade",
        "--install",
        release,
        str(chart),
        "--create-namespace",
        "--wait",
        "--timeout=600s",
        *options,
        namespace=namespace,
    )


def helm(*args: str, namespace: str = NAMESPACE) -> str:
    """Run helm in the namespace of a release. Raises CommandFailed."""
    return shell(tools.program("helm"), f"--kubeconfig={host_kubeconfig()}", f"--namespace={namespace}", *args).stdout


def publish_checkpoint(name: str, directory: Path) -> Path:
    """Copy a checkpoint to the directory that nodes mount, readable for all users."""
    target = MODELS / name
    if not target.exists():
        unfinished = target.with_name(f"{name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(directory, unfinished)
        shell("chmod", "-R", "a+rX", unfinished)
        unfinished.rename(target)
    return target


def kill(pod: Mapping[str, Any]) -> None:
    """Kill the processes of a pod with SIGKILL."""
    for status in pod["status"].get("containerStatuses", []):
        container = status.get("containerID", "").removeprefix("containerd://")
        if "running" in status["state"]:
            try:
                ctr(pod["spec"]["nodeName"], "task", "kill", "--signal=SIGKILL", container)
            except CommandFailed as error:
                # It may have ended since the API server told of it.
                if "no running task found" not in str(error):
                    raise


def kill_operator(name: str | None = None) -> None:
    """Kill the operator process of this pod, or of all pods, with SIGKILL, so that it cannot release its Lease. Its pod
    is deleted too, because a container that is killed repeatedly is restarted with growing delays; the Deployment
    creates another pod."""
    for pod in read_all(NAMESPACE, "pods", OPERATOR):
        if name not in (None, pod["metadata"]["name"]):
            continue
        kill(pod)
        forget(NAMESPACE, "pods", pod["metadata"]["name"])


def operator_report() -> str:
    """The operator's pods and the last lines of their logs."""
    pods = kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide", check=False)
    logs = kubectl("-n", NAMESPACE, "logs", f"--selector={OPERATOR}", "--tail=200", "--prefix", check=False)
    return f"{pods}\n{logs}"


def _blob_image(image: build.Image) -> BlobImage:
    return BlobImage(image.reference, BLOBS, image.exported.config, image.exported.layers)
