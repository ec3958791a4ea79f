"""Requirements for the machine: Linux, root, and some Debian packages, which are installed if missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.tools import say

NODE_PACKAGES: Final = {
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "nftables": "nft",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "iproute2": "ip",
    "mount": "mount",
    "util-linux": "nsenter",
}
"""Debian packages of a node, each with one of its programs."""

IMAGE_PACKAGES: Final = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "gcc": "gcc", "binutils": "nm"}
"""Debian packages for building images, each with one of its programs."""


class MachineUnfit(Exception):
    """This machine cannot run the cluster, for the reason in the message."""

    code = "machine_unfit"


def require(packages: Mapping[str, str] = NODE_PACKAGES) -> None:
    """Install missing packages. Raises MachineUnfit."""
    if os.geteuid() != 0:
        raise MachineUnfit("the cluster creates namespaces and mounts, which requires root; run this with sudo")
    missing = [package for package, program in packages.items() if not _there(program)]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise MachineUnfit(f"missing {', '.join(missing)}, and apt-get is not available; install the programs manually")
    say(f"installing system packages: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if subprocess.run(install, check=False, env=environment, capture_output=True).returncode:
        subprocess.run(["apt-get", "update", "-q"], check=False, env=environment, capture_output=True)
        done = subprocess.run(install, check=False, env=environment, text=True, capture_output=True)
        if done.returncode:
            raise MachineUnfit(f"apt-get could not install {' '.join(missing)}: {done.stderr.strip()[-500:]}")


def _there(program: str) -> bool:
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    return found is not None or Path(program).exists()
