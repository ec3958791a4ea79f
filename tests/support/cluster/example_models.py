"""Example models: each differs from the smallest one in the fields that its name describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import render
from minisgl_operator.render.route import Member
from support.cluster.inference_models import CLAIM, DEFAULTS, inference_model

_IMAGE = {"image": {"reference": "registry.example.com/models/qwen3-8b:1", "path": "model", "pullPolicy": "Always"}}
_TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "qwen"}},
}
_NODES = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
        }
    }
}
_APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"noisy": "yes"}}}
        ]
    }
}
_SCHEDULING = {
    "nodeSelector": {"pool": "serving"},
    "tolerations": _TOLERATIONS,
    "affinity": _NODES,
    "topologySpreadConstraints": [_SPREAD],
    "priorityClassName": "serving",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
}

_POD_TEMPLATE = {
    "labels": {"kueue.x-k8s.io/queue-name": "gpus", "app.kubernetes.io/part-of": "chat"},
    "annotations": {"sidecar.istio.io/inject": "true", "example.com/cost-centre": "7"},
    "schedulerName": "volcano",
    "volumes": [
        {"name": "ca", "configMap": {"name": "ca", "items": [{"key": "ca.pem", "path": "ca.pem", "mode": 292}]}},
        {"name": "license", "secret": {"secretName": "license", "optional": True}},
        {"name": "plugins", "persistentVolumeClaim": {"claimName": "plugins", "readOnly": True}},
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1024Mi"}},
        {"name": "vault", "csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}},
    ],
    "volumeMounts": [
        {"name": "ca", "mountPath": "/etc/ssl/own/ca.pem", "subPath": "ca.pem", "readOnly": True},
        {"name": "license", "mountPath": "/etc/license"},
        {"name": "plugins", "mountPath": "/plugins", "readOnly": True},
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "vault", "mountPath": "/vault"},
    ],
    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
}

_EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "smallest": ({}, None),
    "hub-with-token-and-mirror": (
        {},
        {
            "huggingFace": {
                "repo": "meta-llama/Llama-3.3-70B-Instruct",
                "revision": "v1",
                "tokenSecretRef": {"name": "hub", "key": "read"},
                "endpoint": "http://hub.mirror.svc:8080",
            }
        },
    ),
    "bucket-with-keys-and-endpoint": (
        {},
        {
            "s3": {
                "uri": "s3://models/meta-llama/Llama-3.3-70B-Instruct",
                "secretName": "minio",
                "endpoint": "http://minio.storage.svc:9000",
                "region": "lab-1",
            }
        },
    ),
    "bucket-of-the-cloud": ({"serviceAccountName": "reads-models"}, {"s3": {"uri": "s3://models/qwen3"}}),
    "cache-of-a-class": (
        {
            "model": {"cache": {"size": "0.5Ti", "storageClassName": "fast", "accessMode": "ReadWriteOnce"}},
            "engine": {"nodeSelector": {"pool": "gpu"}, "tolerations": _TOLERATIONS, "affinity": _NODES | _APART},
            "frontend": {"nodeSelector": {"pool": "web"}, "imagePullSecrets": [{"name": "registry"}]},
        },
        None,
    ),
    "cache-to-keep": ({"model": {"cache": {"retain": True}}}, None),
    "cache-on-a-claim-of-ones-own": ({"model": {"cache": {"claimName": "shared-models"}}}, None),
    "cache-filled-beforehand": (
        {"model": {"cache": {"claimName": "shared-models", "accessMode": "ReadOnlyMany"}}},
        None,
    ),
    "claim": ({}, CLAIM),
    "claim-of-one-node": ({"replicas": 2}, {"pvc": CLAIM["pvc"] | {"accessMode": "ReadWriteOnce"}}),
    "image-volume": ({}, _IMAGE),
    "four-gpus-in-one-pod": ({"parallelism": {"tensor": 4}, "replicas": 2}, CLAIM),
    "eight-gpus-on-two-nodes": ({"parallelism": {"tensor": 8, "gpusPerPod": 4}}, CLAIM),
    "ranks-in-pods-of-their-own-on-cpus": (
        {
            "parallelism": {"tensor": 2, "interconnect": "Network"},
            "engine": {
                "device": "cpu",
                "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}, "limits": {"memory": "1.5Gi"}},
                "shmSize": "64Mi",
            },
        },
        CLAIM,
    ),
    "every-engine-field": (
        {
            "model": {"servedNames": ["qwen3", "gpt-4"], "dtype": "bfloat16", "maxModelLen": 8192},
            "engine": {
                "image": "registry.example.com/own/engine:2",
                "args": ["--max-running-requests", "64"],
                "env": [
                    {"name": "NCCL_DEBUG", "value": "INFO"},
                    {"name": "EMPTY", "value": ""},
                    {"name": "LICENSE", "valueFrom": {"secretKeyRef": {"name": "license", "key": "key"}}},
                    {"name": "TUNING", "valueFrom": {"configMapKeyRef": {"name": "tuning", "key": "level"}}},
                ],
                "resources": {"requests": {"cpu": 16, "memory": "128Gi"}, "limits": {"memory": "128Gi"}},
                "gpuResourceName": "amd.com/gpu",
                "runtimeClassName": "nvidia",
                "shmSize": "16Gi",
                "startupTimeoutSeconds": 600,
                **_SCHEDULING,
            },
            "drainSeconds": 60,
            "recovery": {"maxRestarts": 3, "windowSeconds": 600},
        },
        CLAIM,
    ),
    "embeddings": ({"task": "embed"}, CLAIM),
    "fp8": ({"engine": {"quantization": "fp8", "kvCacheDtype": "fp8"}}, CLAIM),
    "speculative": ({"engine": {"speculative": "auto"}}, CLAIM),
    "every-frontend-field": (
        {
            "frontend": {
                "image": "registry.example.com/own/frontend:2",
                "replicas": 3,
                "resources": {"requests": {"cpu": "0.5", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
                "auth": {"apiKeysSecretRef": {"name": "api-keys", "key": "team-a"}},
                **_SCHEDULING,
            },
            "networkPolicy": {
                "ingressFrom": [
                    {"namespaceSelector": {"matchLabels": {"team": "web"}}, "podSelector": {}},
                    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                ]
            },
        },
        None,
    ),
    "pod-templates": (
        {
            "engine": {"podTemplate": _POD_TEMPLATE, "shmMedium": "Node"},
            "frontend": {
                "podTemplate": _POD_TEMPLATE,
                "args": ["--max-waiting", "64"],
                "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                "leaveSeconds": 60,
            },
            "fetch": {
                "podTemplate": _POD_TEMPLATE,
                "resources": {"limits": {"memory": "2Gi"}},
                "env": [{"name": "SSL_CERT_FILE", "value": "/etc/ssl/own/ca.pem"}],
            },
        },
        None,
    ),
    "behind-a-gateway": ({}, CLAIM),
    "route-of-a-group": (
        {
            "model": {"servedNames": ["qwen3"]},
            "route": {
                "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
                "hostnames": ["models.example.com"],
                "group": "chat",
                "weight": 9,
            },
        },
        CLAIM,
    ),
    "suspended": ({"suspend": True, "replicas": 2}, None),
    "without-network-policies": ({"networkPolicy": {"enabled": False}}, CLAIM),
}

EXAMPLES: dict[str, InferenceModel] = {
    name: inference_model(spec, source=source) for name, (spec, source) in _EXAMPLES.items()
}
EXAMPLES["longest-name"] = inference_model({"replicas": 2}, name="m" * 40)


def children_of(example: str) -> tuple[Manifest, ...]:
    """Everything that the operator applies for the example."""
    model = EXAMPLES[example]
    if example == "behind-a-gateway":
        return render(model, replace(DEFAULTS, gateway="minisgl"), gateway_addresses=["10.0.0.1", "10.0.0.2"])
    if example == "route-of-a-group":
        return render(model, DEFAULTS, group=[Member("qwen", ("qwen3",), 9), Member("qwen-canary", ("qwen3",), 1)])
    return render(model, DEFAULTS)
