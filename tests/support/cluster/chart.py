"""The chart and the kustomize tree, rendered with helm and kubectl."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from cluster import tools
from minisgl_operator.api.objects import copy_of

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "charts"
MANIFESTS: Final = ROOT / "manifests"
SAMPLES: Final = sorted((MANIFESTS / "samples").glob("*.yaml"))
NAMESPACE: Final = "minisgl-system"

Object = dict[str, Any]

MATRIX: Final[dict[str, Object]] = {
    "default": {},
    "namespaced": {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}},
    "without definitions": {"crds": {"enabled": False}},
    "nothing optional": {
        "crds": {"keep": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False, "aggregate": False},
        "metrics": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "gateway": {"gateway": {"enabled": True}},
    "gateway of two namespaces": {
        "watchNamespaces": ["team-a", "team-b"],
        "rbac": {"aggregate": False},
        "gateway": {"enabled": True, "replicas": None, "ingressFrom": [{"podSelector": {}}]},
    },
    "everything": {
        "commonLabels": {"team": "platform"},
        "imageRegistry": "registry.example.com:5000/mirror",
        "operator": {
            "image": {"digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "registry"}],
            "replicas": 2,
            "resyncSeconds": 30,
            "logLevel": "debug",
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "control", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
        },
        "defaults": {
            "engineImage": {"tag": "1.2.3"},
            "imagePullPolicy": "IfNotPresent",
            "imagePullSecrets": [{"name": "registry-of-models"}],
            "podIdentity": "Namespace",
            "storageClassName": "fast",
            "s3": {"endpoint": "https://minio.example.com", "region": "lab-1", "secretName": "minio"},
            "hub": {
                "endpoint": "https://hub.example.com",
                "tokenSecret": {"name": "hub"},
                "caConfigMap": {"name": "company-ca", "key": "bundle.pem"},
            },
            "proxy": {"https": "http://proxy:3128", "noProxy": ".svc,10.0.0.0/8"},
            "networkPolicy": {
                "ingressFrom": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"client": "yes"}}}],
                "monitoringNamespaces": ["monitoring"],
            },
            "route": {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["*.example.com"]},
            "traces": {"endpoint": "http://collector.observability", "sampling": 0},
            "engine": {
                "priorityClassName": "engines",
                "labels": {"team": "a"},
                "annotations": {"example.com/price": "$(POD_NAMESPACE) $5 <&>"},
                "resources": {"requests": {"cpu": 4, "memory": "64Gi"}},
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "runtimeClassName": "nvidia",
            },
            "frontend": {
                "minReplicas": 0,
                "priorityClassName": "frontends",
                "nodeSelector": {"pool": "web"},
                "resources": {"limits": {"memory": "1Gi"}},
            },
            "fetch": {"annotations": {"a": "b"}},
            "rollout": {
                "waves": [
                    {"name": "canary", "selector": {"matchLabels": {"stage": "canary"}}},
                    {
                        "name": "large",
                        "selector": {"matchExpressions": [{"key": "size", "operator": "In", "values": ["70b"]}]},
                    },
                ],
                "maxModels": 2,
                "window": {"days": ["Monday"], "startHour": 22, "endHour": 4},
            },
        },
        "gateway": {
            "enabled": True,
            "replicas": 3,
            "keySecrets": True,
            "oidc": {
                "issuer": "https://id.example.com/realms/a",
                "audiences": ["minisgl", "api://models"],
                "tenantClaim": "azp",
                "jwksUrl": "https://id.example.com/keys",
            },
            "redis": {"url": "rediss://limits@redis.example.com:6380/2", "passwordSecret": {"name": "redis"}},
            "endpointPicker": {"enabled": True, "plaintext": True, "ingressFrom": [{"namespaceSelector": {}}]},
            "args": ["--queue-timeout", "30"],
            "env": [{"name": "OTEL_TRACES_SAMPLER", "value": "traceidratio"}],
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "nodeSelector": {"pool": "web"},
            "tolerations": [{"key": "web", "operator": "Exists"}],
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
        },
        "serviceAccount": {"annotations": {"a": "b"}},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True, "interval": "10s", "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboards": {"enabled": True},
        },
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
        "test": {"model": "demo", "apiKeysSecret": "keys"},
    },
}


class HelmError(Exception):
    """Output of helm."""


def helm(*arguments: str, values: Object | None = None) -> str:
    """Run helm with `values` and return its output. Skips the test where helm cannot be built."""
    try:
        program = tools.program("helm")
    except tools.ToolchainMissing as error:
        pytest.skip(str(error))
    command = [str(program), *arguments, *(("--values", "-") if values is not None else ())]
    done = subprocess.run(command, check=False, text=True, capture_output=True, input=json.dumps(values or {}))
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def rendered(values: Object, release: str = "minisgl") -> list[Object]:
    """Objects of the chart, including the pod of `helm test`."""
    return copy_of(_rendered(json.dumps(values), release))


@cache
def _rendered(values: str, release: str) -> list[Object]:
    return _objects(helm("template", release, str(CHART), "--namespace", NAMESPACE, values=json.loads(values)))


def kustomized(folder: Path = MANIFESTS) -> list[Object]:
    try:
        program = tools.program("kubectl")
    except tools.ToolchainMissing as error:
        pytest.skip(str(error))
    command = [str(program), "kustomize", str(folder)]
    return _objects(subprocess.run(command, check=True, text=True, capture_output=True).stdout)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: list[Object]) -> list[Object]:
    """Specs of all pods among the objects and in their templates."""
    templates = [each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment")]
    return templates + [each["spec"] for each in of_kind(objects, "Pod")]


def operator_pod(objects: list[Object]) -> Object:
    """Spec of the operator's pod."""
    [found] = [pod for pod in pods(objects) if pod["containers"][0]["name"] == "operator"]
    return found


def _objects(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
