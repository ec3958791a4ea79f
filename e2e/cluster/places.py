"""Places (sets of namespaces), and processes in them.

A place is a network, mount, PID, UTS and IPC namespace, held by one `unshare --kill-child`. Its init performs the setup
and then sleeps. The PID namespaces of nodes are inside that of "control", so that killing one process ends all
processes, mounts, links and rules. The empty name is the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cluster import tools
from cluster.certificates import write_if_changed
from cluster.layout import GO, IPV6, STATE, cgroup_hierarchies

HOST: Final = ""
CONTROL: Final = "control"
SEED: Final = "seed"
NO_DAD: Final = " nodad" if IPV6 else ""
"""Option of `ip addr`: an address can be used without waiting until no other host has it."""
T = TypeVar("T")

# Settings in /proc/sys that a kubelet writes. In a place these are files; otherwise it would change the host's kernel.
_TUNABLES: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
_NAMESPACES: Final = {"net": "net", "mount": "mnt", "pid": "pid_for_children", "uts": "uts", "ipc": "ipc"}


class CommandFailed(RuntimeError):
    """A command failed."""


class NotUp(RuntimeError):
    """The place does not exist."""

    code = "cluster_not_up"


def shell(*command: str | Path, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; returns its output. Raises CommandFailed if `check`."""
    done = subprocess.run([str(c) for c in command], check=False, text=True, capture_output=True, input=stdin)
    if check and done.returncode:
        line = " ".join(map(str, command))[:300]
        raise CommandFailed(f"{line}: exit status {done.returncode}: {done.stderr.strip()}")
    return done


def outer(place: str) -> str:
    """Place that contains a place."""
    return HOST if place in (HOST, CONTROL, SEED) else CONTROL


def proc(place: str) -> Path:
    """Path on the host of the /proc of a place, with the PIDs of its namespace."""
    if place == HOST:
        return Path("/proc")
    holder = pid_of(place, outer(place))
    if holder is None:
        raise NotUp(f"{place} does not run; start the cluster first")
    return proc(outer(place)) / f"{holder}/root/proc"


def holder(place: str) -> Path:
    """Path on the host of /proc/PID of the process that holds a place. Raises NotUp."""
    return proc(place).parent.parent


def pid_of(name: str, place: str = CONTROL) -> int | None:
    """PID of a running component in its place. The holder of a place has its name, in the place that contains it."""
    try:
        pid, started = (STATE / place / f"{name}.pid").read_text().split()
        if place != HOST and pid_of(place, outer(place)) is None:
            return None
        fields = _stat(proc(place) / pid)
    except (OSError, ValueError):
        return None
    return int(pid) if fields[19] == started and fields[0] != "Z" else None


def enter(place: str, *kinds: str) -> list[str]:
    """Command prefix that runs a command in a place, or in only these kinds of its namespaces."""
    if place == HOST:
        return []
    return ["nsenter", *(f"--{k}={holder(place)}/ns/{_NAMESPACES[k]}" for k in kinds or _NAMESPACES)]


def run(place: str, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return shell(*enter(place), *command, check=check)


def inside(place: str, call: Callable[[], T]) -> T:
    """Run a function in a thread in the network namespace of a place; its sockets stay in it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def thread() -> None:
        try:
            with (holder(place) / "ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            results.append(call())
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=thread, daemon=True)
    worker.start()
    worker.join()
    if errors:
        raise errors[0]
    return results[0]


def start(place: str, name: str, *command: str | Path, keep: Sequence[int] = ()) -> None:
    """Start a component unless it runs, as a child of the place's init. It inherits the descriptors `keep`."""
    if pid_of(name, place):
        return
    log = log_of(place, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    # A process that replaces nsenter would stay our child; setsid in the background makes it a child of the init.
    script = 'cd "$0"; log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'
    done = subprocess.run(
        [*enter(place), "sh", "-c", script, str(STATE), str(log), *map(str, command)],
        text=True,
        capture_output=True,
        check=True,
        pass_fds=keep,
        env={"PATH": tools.search_path(), "HOME": str(STATE), "PYTHONPATH": str(Path(__file__).parent.parent), **GO},
    )
    pid = done.stdout.strip()
    (STATE / place / f"{name}.pid").write_text(f"{pid} {_stat(proc(place) / pid)[19]}")


def stop(name: str, place: str = CONTROL, seconds: float = 10) -> None:
    """Stop one component with TERM, then KILL, as an outage in a test. Starting the cluster starts it again."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid := pid_of(name, place):
            run(place, "sh", "-c", f"kill -{number.value} {pid}", check=False)
            with contextlib.suppress(TimeoutError):
                wait(f"the end of {name}", lambda: not pid_of(name, place), seconds)


def log_of(place: str, name: str) -> Path:
    return STATE / (place or CONTROL) / f"log/{name}.log"


def wait(what: str, probe: Callable[[], object], seconds: float, components: Sequence[tuple[str, str]] = ()) -> None:
    """Wait until the probe returns true; a probe that raises is repeated.

    Raises TimeoutError, and CommandFailed with the end of the log if the component (place, name) exits meanwhile.
    """
    end, error = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            if probe():
                return
        except Exception as caught:
            error = f": {type(caught).__name__}: {caught}"
        for place, name in components:
            if not pid_of(name, place):
                words = "\n".join(log_of(place, name).read_text().splitlines()[-15:])
                raise CommandFailed(f"{name} of {place} exited; end of its log {log_of(place, name)}:\n{words}")
        time.sleep(0.05)
    raise TimeoutError(f"waited {seconds:.0f} s for {what}{error}; logs are in {STATE}/*/log")


def hold(place: str, setup: str = "") -> None:
    """Create a place unless it exists.

    Its init performs all of the setup: from outside, a setup before unshare(2) would change the host. Finally the init
    ignores SIGCHLD, so that the kernel reaps its adopted children.
    """
    if pid_of(place, outer(place)):
        return
    here = STATE / place
    shutil.rmtree(here / "sys", ignore_errors=True)
    for name in ("log", "kubelet"):
        (here / name).mkdir(parents=True, exist_ok=True)
    for name, value in _TUNABLES.items():
        write_if_changed(here / "sys" / name, f"{value}\n")
    Path("/var/lib/kubelet").mkdir(exist_ok=True)
    script = f"""
hostname {place}
mount --make-rshared /
mount -t tmpfs -o mode=755 run /run
mount --bind {here}/log /var/log
mount --bind {here}/kubelet /var/lib/kubelet
for f in {" ".join(_TUNABLES)}; do mount --bind {here}/sys/$f /proc/sys/$f; done
ip link set lo up
sysctl() {{ echo $2 >/proc/sys/net/$1; }}
sysctl ipv4/ip_forward 1
{"sysctl ipv6/conf/all/forwarding 1" if IPV6 else ""}
sysctl ipv4/conf/all/send_redirects 0
{setup}
exec env --ignore-signal=CHLD sleep infinity"""
    kinds = ("--pid", "--mount-proc", "--mount", "--net", "--uts", "--ipc")
    start(outer(place), place, "unshare", "--fork", "--kill-child", *kinds, "sh", "-ec", script)
    process = holder(place)

    def ready() -> bool:
        unshared = os.readlink(process / "ns/pid") != os.readlink(process / "ns/pid_for_children")
        return unshared and (proc(place) / "1/comm").read_text() == "sleep\n"

    wait(place, ready, 10, [(outer(place), place)])


def kill(place: str) -> None:
    """Kill a place with all its processes, like a power failure. Starting the cluster starts it again."""
    pid = pid_of(place, outer(place))
    if pid is None:
        return
    # SIGKILL works on an init only from outside; its `unshare` exits when all processes have exited.
    init = (proc(outer(place)) / f"{pid}/task/{pid}/children").read_text().strip()
    run(outer(place), "sh", "-c", f"kill -KILL {init or pid}")
    wait(f"the end of {place}", lambda: not pid_of(place, outer(place)), 30)


def remove_cgroups(path: str) -> None:
    """Remove a tree of control groups from every hierarchy, when it has no processes any more."""

    def gone() -> bool:
        for top in (Path(f"{hierarchy}{path}") for hierarchy in cgroup_hierarchies()):
            for group in [*sorted(top.rglob("*/"), reverse=True), *([top] if top.exists() else [])]:
                group.rmdir()
        return True

    wait(f"the end of the processes in {path}", gone, 30)


def nodes() -> list[str]:
    """Names of the running nodes."""
    return sorted(p.stem for p in STATE.glob("control/node*.pid") if pid_of(p.stem))


def _stat(process: Path) -> list[str]:
    """Fields of /proc/PID/stat after the name: state is the first, start time the twentieth (proc_pid_stat(5))."""
    return (process / "stat").read_text().rsplit(")", 1)[1].split()
