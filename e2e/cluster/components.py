"""Command lines of the control plane, for a cluster and for tests that run it as plain processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.certificates import Authority, signing_key, write_if_changed
from cluster.layout import in_url

AUDIT_POLICY: Final = """{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
 "rules": [
  {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/metrics", "/openapi*"]},
  {"level": "Metadata"}]}
"""


@dataclass(frozen=True)
class ControlPlane:
    """Directories and addresses that the components of a control plane share."""

    directory: Path
    """Directory of keys, etcd's data and the audit log."""
    ip: str
    port: int
    etcd_port: int
    etcd_peer_port: int
    service_cidr: str
    service_api_ip: str
    pod_cidr: str
    has_nodes: bool = True
    """False: extensions are reached by the external name of their Service, as there are no pods."""

    @property
    def url(self) -> str:
        return f"https://{in_url(self.ip)}:{self.port}"

    @property
    def pki(self) -> Path:
        return self.directory / "pki"

    @property
    def audit_log(self) -> Path:
        """Path of the log with one JSON object per answered request."""
        return self.directory / "audit.log"

    def kubeconfig(self, name: str) -> Path:
        return self.directory / f"{name}.kubeconfig"

    def prepare(self) -> Authority:
        """Write keys, certificates, kubeconfigs ("admin" among them) and the audit policy."""
        authority = Authority(self.pki).create()
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names += ["kubernetes.default.svc.cluster.local", "127.0.0.1", self.service_api_ip, self.ip]
        authority.issue("apiserver", "kube-apiserver", addresses=names)
        authority.issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        Authority(self.pki, "front-ca").create().issue("front", "front-proxy-client")
        signing_key(self.pki, "sa")
        users = {
            "admin": "admin",
            "controllers": "system:kube-controller-manager",
            "scheduler": "system:kube-scheduler",
        }
        for name, user in users.items():
            group = "system:masters" if name == "admin" else None
            authority.kubeconfig(self.kubeconfig(name), self.url, name, user, group)
        write_if_changed(self.directory / "audit-policy.json", AUDIT_POLICY)
        return authority

    def etcd(self) -> list[str]:
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.etcd_peer_port}"
        return [
            "etcd",
            f"--data-dir={self.directory}/etcd",
            # Data need not survive a crash of the machine.
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def apiserver(self) -> list[str]:
        pki = self.pki
        return [
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.ip}",
            f"--advertise-address={self.ip}",
            f"--secure-port={self.port}",
            f"--service-cluster-ip-range={self.service_cidr}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--anonymous-auth=false",
            # Without kube-proxy, the API server reaches webhooks and extensions by pod address.
            f"--enable-aggregator-routing={str(self.has_nodes).lower()}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--requestheader-client-ca-file={pki}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki}/front.crt",
            f"--proxy-client-key-file={pki}/front.key",
            f"--audit-policy-file={self.directory}/audit-policy.json",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking-strict",
        ]

    def controller_manager(self, port: int) -> list[str]:
        pki = self.pki
        return [
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('controllers')}",
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            f"--cluster-cidr={self.pod_cidr}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            # By default a lost node is detected after 50 s, and one node per 10 s is then evicted. The rate must not be
            # 1: with it, evictions that stop while no node is ready, as at the start, never begin again, because the
            # limiter that lets nothing through reports the rate 1 and counts as the right one.
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=16s",
            "--node-eviction-rate=10",
            "--secondary-node-eviction-rate=10",
            # By default a load is read every 15 s, and must have been low for 300 s.
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--horizontal-pod-autoscaler-downscale-stabilization=2s",
        ]

    def scheduler(self) -> list[str]:
        kubeconfig = f"--kubeconfig={self.kubeconfig('scheduler')}"
        return ["kube-scheduler", kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1"]
