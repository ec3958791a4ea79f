"""etcd, API server, controllers, scheduler and DNS, in the place "control"."""

from __future__ import annotations

import json
import ssl
import urllib.request
from typing import Any, Final

from cluster import layout, tools
from cluster.certificates import write_if_changed
from cluster.components import ControlPlane
from cluster.layout import CONTROL_IP, STATE
from cluster.places import CONTROL, NO_DAD, enter, hold, inside, shell, start, wait

PLANE: Final = ControlPlane(
    directory=STATE,
    ip=CONTROL_IP,
    port=6443,
    etcd_port=2379,
    etcd_peer_port=2380,
    service_cidr=layout.SERVICES,
    service_api_ip=layout.SERVICE_API_IP,
    pod_cidr=layout.PODS,
)

_READERS: Final = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "cluster:readers"}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces, nodes], verbs: [get, list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
- {apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "cluster:readers"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "cluster:readers"}
subjects: [{kind: Group, name: "cluster:readers"}]
"""

# A separate server block answers for external names: in one block, `template` would precede `kubernetes`.
_COREFILE: Final = f"""cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {{
  bind {CONTROL_IP}
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {PLANE.kubeconfig("coredns")}
    pods insecure
    ttl 2
  }}
}}
.:53 {{
  bind {CONTROL_IP}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def up() -> None:
    """Start the components that do not run, and wait until the API server answers."""
    authority = PLANE.prepare()
    for name, user, group in (
        ("coredns", "cluster:coredns", "cluster:readers"),
        ("netpol", "cluster:netpol", "cluster:readers"),
        ("proxy", "system:kube-proxy", None),
    ):
        authority.kubeconfig(PLANE.kubeconfig(name), PLANE.url, name, user, group)
    hold(
        CONTROL,
        f"""sysctl ipv4/conf/default/send_redirects 0
ip link add lan address {layout.BRIDGE_MAC} type bridge
ip addr add {CONTROL_IP}/{layout.LAN_BITS} dev lan{NO_DAD}
ip link set lan up""",
    )
    start(CONTROL, "etcd", *PLANE.etcd())
    start(CONTROL, "kube-apiserver", *PLANE.apiserver())
    components = [(CONTROL, "etcd"), (CONTROL, "kube-apiserver")]
    wait("the API server", lambda: http(f"{PLANE.url}/readyz") == "ok", 90, components)
    start(CONTROL, "kube-controller-manager", *PLANE.controller_manager(10257))
    start(CONTROL, "kube-scheduler", *PLANE.scheduler())
    kubectl("apply", "-f", "-", stdin=_READERS)
    write_if_changed(STATE / "control/Corefile", _COREFILE)
    start(CONTROL, "coredns", "coredns", "-conf", STATE / "control/Corefile")


def wait_until_usable() -> None:
    components = [(CONTROL, "kube-controller-manager"), (CONTROL, "kube-scheduler"), (CONTROL, "coredns")]
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait("the default service account", lambda: api(account), 60, components)
    wait("DNS", lambda: http("http://127.0.0.1:8181/ready") == "OK", 30, components)


def kubectl_command() -> list[str]:
    return [*enter(CONTROL, "net"), str(tools.program("kubectl")), f"--kubeconfig={PLANE.kubeconfig('admin')}"]


def kubectl(*args: str, check: bool = True, stdin: str | None = None) -> str:
    """Run kubectl as the administrator; returns its output. Raises CommandFailed if `check`."""
    return shell(*kubectl_command(), *args, check=check, stdin=stdin).stdout


def http(url: str, place: str = CONTROL) -> str:
    """GET from the network of a place; https URLs are requested as the administrator of the API server."""
    tls = None
    if url.startswith("https"):
        tls = ssl.create_default_context(cafile=PLANE.pki / "ca.crt")
        tls.load_cert_chain(PLANE.pki / "admin.crt", PLANE.pki / "admin.key")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))

    def get() -> str:
        with opener.open(url, timeout=2) as response:
            body: bytes = response.read()
            return body.decode()

    return inside(place, get)


def api(path: str) -> Any:
    return json.loads(http(PLANE.url + path))
