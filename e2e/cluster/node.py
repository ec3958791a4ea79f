"""One node: containerd, kube-proxy, network policies and kubelet in their own place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Final

from cluster import images, layout
from cluster.certificates import Authority, write_if_changed
from cluster.containers import PAUSE, containerd, ctr
from cluster.control_plane import PLANE, api, http
from cluster.layout import CGROUP, CONTROL_IP, STATE, cgroup_hierarchies, node_ip
from cluster.places import CONTROL, NO_DAD, hold, pid_of, remove_cgroups, run, start, wait

_IPTABLES: Final = "ip6tables" if layout.IPV6 else "iptables"
QUEUE: Final = 98
"""Number of the NFQUEUE in which new connections wait for the decision of the network policies."""


def up(index: int) -> None:
    """Start the components of node<index> that do not run, and wait until the node is Ready."""
    name, ip = f"node{index}", node_ip(index)
    pods, bridge = layout.node_pods(index)
    here = STATE / name
    authority = Authority(PLANE.pki)
    authority.issue(f"{name}-serving", f"system:node:{name}", "system:nodes", [name, ip])
    authority.kubeconfig(here / "kubelet.kubeconfig", PLANE.url, name, f"system:node:{name}", "system:nodes")
    if not pid_of(name):
        # The kubelet would spend 3 s on each control group of a dead pod.
        remove_cgroups(f"{CGROUP}/{name}")
    for hierarchy in cgroup_hierarchies():
        Path(f"{hierarchy}{CGROUP}/{name}").mkdir(parents=True, exist_ok=True)
    _weigh_pods(name)
    hold(
        name,
        f"""ip link add cni0 address {layout.BRIDGE_MAC} type bridge
ip addr add {bridge}/{pods.split("/")[1]} dev cni0{NO_DAD}
ip link set cni0 up
sysctl bridge/bridge-nf-call-{_IPTABLES} 1
{_IPTABLES} -A FORWARD -m conntrack --ctstate NEW -j NFQUEUE --queue-num {QUEUE}""",
    )
    _connect(name, ip, pods)
    write_if_changed(here / "cni/10-cluster.conflist", json.dumps(_network(bridge, pods)))
    write_if_changed(here / "proxy.json", json.dumps(_proxy(name, ip)))
    write_if_changed(here / "resolv.conf", "")
    write_if_changed(here / "kubelet.json", json.dumps(_kubelet(name, ip, here)))
    seed = images.seed_directory()
    if seed is not None and not (here / "containerd").exists():
        _copy_seed(seed, here / "containerd")
    containerd(name, here / "containerd")
    if PAUSE not in ctr(name, "images", "ls", "-q").split():
        images.import_archive(name, images.pause_archive())
    start(name, "kube-proxy", "kube-proxy", f"--config={here}/proxy.json")
    start(
        name,
        "netpol",
        "netpol",
        f"--kubeconfig={PLANE.kubeconfig('netpol')}",
        f"--hostname-override={name}",
        "--disable-nri",
        f"--nfqueue-id={QUEUE}",
        "--metrics-bind-address=127.0.0.1:19080",
        "--fail-open=false",
    )
    start(
        name,
        "kubelet",
        "kubelet",
        f"--config={here}/kubelet.json",
        f"--kubeconfig={here}/kubelet.kubeconfig",
        f"--hostname-override={name}",
        f"--node-ip={ip}",
    )

    def ready() -> bool:
        conditions = api(f"/api/v1/nodes/{name}")["status"]["conditions"]
        says = {condition["type"]: condition["status"] for condition in conditions}
        # A killed node may still be reported Ready: also ask the new kubelet.
        return http("http://127.0.0.1:10248/healthz", name) == "ok" and says.get("Ready") == "True"

    wait(name, ready, 90, [(name, component) for component in ("containerd", "kube-proxy", "netpol", "kubelet")])


def _weigh_pods(name: str) -> None:
    """Give the control groups above the pods the CPU weight that pods have on a machine of their own: the kubelet sets
    1024 shares for each core, and the groups of this kit lie above that one. With the default, the pods of all nodes
    together would get no more than a single daemon."""
    shares = 1024 * (os.cpu_count() or 1)
    for hierarchy in cgroup_hierarchies():
        nodes = list(Path(f"{hierarchy}{CGROUP}").glob("node*/"))
        for group, value in ((Path(f"{hierarchy}{CGROUP}/{name}"), shares), (nodes[0].parent, shares * len(nodes))):
            # Version 1 of control groups has shares, version 2 weights.
            for file, written in (("cpu.shares", value), ("cpu.weight", 1 + (value - 2) * 9999 // 262142)):
                if (group / file).exists():
                    (group / file).write_text(str(written))


def _connect(name: str, ip: str, pods: str) -> None:
    """Connect the node to the bridge of control, which is also its router."""
    if run(CONTROL, "ip", "link", "show", name, check=False).returncode == 0:
        return
    pid = pid_of(name)
    assert pid is not None
    family = "-6 " if layout.IPV6 else ""
    plug = (
        f"ip link add {name} master lan up type veth peer name eth0 netns {pid}; "
        f"ip {family}route replace {pods} via {ip}"
    )
    run(CONTROL, "sh", "-ec", plug)
    address = (
        f"ip addr add {ip}/{layout.LAN_BITS} dev eth0{NO_DAD}; ip link set eth0 up; "
        f"ip {family}route add default via {CONTROL_IP}"
    )
    run(name, "sh", "-ec", address)


def _copy_seed(seed: Path, target: Path) -> None:
    """Populate the node from the seed with hard links: overlayfs never writes to lower layers, and blobs never change.
    Only the databases are copied."""
    unfinished = target.with_name("containerd.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    linkable = os.stat(seed).st_dev == os.stat(STATE).st_dev
    run("", "cp", "-al" if linkable else "-a", seed, unfinished)
    for database in unfinished.rglob("*.db"):
        copy = database.with_name(f"{database.name}.copy")
        shutil.copy(database, copy)
        copy.rename(database)
    unfinished.rename(target)


def _network(bridge: str, pods: str) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": pods, "gateway": bridge}]],
        "routes": [{"dst": layout.ANYWHERE}],
    }
    plugin = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipMasq": False}
    return {"cniVersion": "1.0.0", "name": "cluster", "plugins": [plugin | {"ipam": addresses}]}


def _proxy(name: str, ip: str) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": layout.PODS,
        "hostnameOverride": name,
        "bindAddress": ip,
        "nodePortAddresses": [f"{ip}/{layout.ADDRESS_BITS}"],
        # Without CAP_SYS_RESOURCE, a process cannot lower its OOM score.
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0},
        "nftables": {"syncPeriod": "30s", "minSyncPeriod": "100ms"},
        "clientConnection": {"kubeconfig": str(PLANE.kubeconfig("proxy"))},
    }


def _kubelet(name: str, ip: str, here: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ip,
        "clusterDNS": [CONTROL_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": str(here / "resolv.conf"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(PLANE.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(PLANE.pki / f"{name}-serving.crt"),
        "tlsPrivateKeyFile": str(PLANE.pki / f"{name}-serving.key"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"{CGROUP}/{name}",
        "failCgroupV1": False,
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "seccompDefault": True,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1Gi",
            "imagefs.available": "1Gi",
            "nodefs.inodesFree": "1%",
        },
        "nodeLeaseDurationSeconds": 8,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "volumeStatsAggPeriod": "0s",
        # Otherwise KUBE-* chains would remain.
        "makeIPTablesUtilChains": False,
    }
