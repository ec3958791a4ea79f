"""containerd in a place."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster import tools
from cluster.certificates import write_if_changed
from cluster.layout import STATE
from cluster.places import run, start, wait

PAUSE: Final = "localhost/pause:1"
"""Image of the container that holds a pod's namespaces."""


def containerd(place: str, root: Path) -> None:
    """Start containerd with its images below `root`, and wait until it answers."""
    here = STATE / place
    write_if_changed(here / "containerd.toml", _configuration(here, root))
    start(place, "containerd", "containerd", f"--config={here}/containerd.toml")
    wait(f"containerd of {place}", lambda: ctr(place, "version"), 30, [(place, "containerd")])


def ctr(place: str, *args: str) -> str:
    return run(place, tools.program("ctr"), "-n", "k8s.io", *args).stdout


def _configuration(here: Path, root: Path) -> str:
    return f"""
version = 3
disabled_plugins = ['io.containerd.nri.v1.nri']
root = '{root}'
state = '/run/containerd'
[plugins.'io.containerd.internal.v1.opt']
  path = '{here}/opt'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE}'
[plugins.'io.containerd.cri.v1.runtime']
  netns_mounts_under_state_dir = true
  enable_cdi = false
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE no process may lower its score
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni']
    conf_dir = '{here}/cni'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '/usr/sbin/runc'
      SystemdCgroup = false
"""
