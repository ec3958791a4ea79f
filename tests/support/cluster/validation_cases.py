"""Valid and invalid InferenceModels with their errors, on which the types and the API server must agree."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final, NamedTuple

Object = dict[str, Any]


def smallest(name: str = "demo", **spec: Any) -> Object:
    """The smallest InferenceModel, with `spec` laid over its spec."""
    model: Object = {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"source": {"pvc": {"claimName": "models"}}}},
    }
    model["spec"].update(deepcopy(spec))
    return model


def hub(**model: Any) -> Object:
    """`spec.model` of a model on the Hub."""
    return {"source": {"huggingFace": {"repo": "owner/name"}}, **model}


class Case(NamedTuple):
    """`field` is empty for a valid object. `message` is part of both errors; messages for a wrong type or a number out
    of bounds differ."""

    name: str
    model: Object
    field: str = ""
    message: str = ""


def _env(**variable: Any) -> Object:
    return smallest(engine={"env": [variable]})


def _source(**source: Any) -> Object:
    return smallest(model={"source": source})


def _without_spec() -> Object:
    model = smallest()
    del model["spec"]
    return model


_PEER: Final = {"namespaceSelector": {"matchLabels": {"team": "blue"}}}
_SPREAD: Final = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}

_POD_TEMPLATE: Final = {
    "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "annotations": {"sidecar.istio.io/inject": "true"},
    "schedulerName": "volcano",
    "volumes": [
        {"name": "ca", "configMap": {"name": "ca", "items": [{"key": "a", "path": "b/.c", "mode": 292}]}},
        {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "a", "path": "b"}], "optional": True}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {
            "name": "vault",
            "csi": {"driver": "d.example.com", "readOnly": True, "fsType": "ext4", "volumeAttributes": {"a": "b"}},
        },
    ],
    "volumeMounts": [
        {"name": "ca", "mountPath": "/etc/ssl/certs/own.pem", "subPath": "b/.c", "readOnly": True},
        {"name": "scratch", "mountPath": "/modelsx"},
    ],
    "resourceClaims": [
        {"name": "nic", "resourceClaimTemplateName": "nic", "gpus": False},
        {"name": "channel", "resourceClaimName": "channel"},
    ],
}

_CLAIM_OF_GPUS: Final = {"name": "gpus", "resourceClaimTemplateName": "gpus", "gpus": True}

EVERYTHING: Final[Object] = {
    "model": {
        "source": {
            "huggingFace": {
                "repo": "Qwen/Qwen3-0.6B",
                "revision": "refs/pr/1",
                "tokenSecretRef": {"name": "hub"},
                "endpoint": "http://mirror:8080/hub",
            }
        },
        "servedNames": ["qwen", "Qwen/Qwen3-0.6B"],
        "dtype": "bfloat16",
        "maxModelLen": 4096,
        "cache": {"size": "20Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce", "retain": True},
    },
    "parallelism": {"tensor": 4, "gpusPerPod": 2, "interconnect": "Network"},
    "task": "embed",
    "replicas": 0,
    "autoscaling": {
        "minReplicas": 0,
        "maxReplicas": 4,
        "target": {"runningPerReplica": 16},
        "scaleDownDelaySeconds": 60,
        "idleSecondsToZero": 600,
    },
    "suspend": True,
    "engine": {
        "device": "cpu",
        "quantization": "fp8",
        "kvCacheDtype": "fp8",
        "speculative": "auto",
        "image": "registry.example.com:5000/engine@sha256:" + "0" * 64,
        "args": ["--page-size=16", "--max-running", "64"],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "EMPTY"},
            {"name": "FROM_SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "FROM_MAP", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
        ],
        "resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"memory": "2Gi"}},
        "gpuResourceName": "amd.com/gpu",
        "runtimeClassName": "nvidia",
        "shmSize": "512Mi",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
                }
            }
        },
        "topologySpreadConstraints": [{**_SPREAD, "labelSelector": {"matchLabels": {"a": "b"}}}],
        "priorityClassName": "high",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "startupTimeoutSeconds": 60,
        "shmMedium": "Node",
        "podTemplate": _POD_TEMPLATE,
    },
    "frontend": {
        "image": "frontend:1",
        "replicas": 2,
        "minReplicas": 0,
        "resources": {"requests": {"cpu": "500m"}},
        "auth": {"apiKeysSecretRef": {"name": "keys"}},
        "args": ["--max-waiting=64"],
        "env": [{"name": "A", "value": "b"}],
        "leaveSeconds": 60,
        "mesh": True,
        "podTemplate": {"labels": {"team": "a"}},
    },
    "fetch": {
        "resources": {"limits": {"cpu": 1}},
        "env": [{"name": "SSL_CERT_FILE", "value": "/ca.pem"}],
        "podTemplate": {"schedulerName": "volcano"},
    },
    "drainSeconds": 1,
    "recovery": {"maxRestarts": 0, "windowSeconds": 60},
    "availability": {"disruptionBudget": "None"},
    "serviceAccountName": "bucket-reader",
    "route": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https", "port": 443}],
        "hostnames": ["models.example.com", "*.example.org"],
        "group": "chat",
        "weight": 0,
    },
    "networkPolicy": {
        "enabled": False,
        "ingressFrom": [_PEER, {"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
    },
}

_RIGHT: Final = (
    Case("smallest", smallest()),
    Case("everything", smallest(**EVERYTHING)),
    Case("image source", _source(image={"reference": "models.example.com/qwen:1", "path": "qwen/fp8"})),
    Case("dummy weights in FP8 blocks", smallest(engine={"quantization": "fp8-block", "args": ["--dummy-weights"]})),
    Case("longest name", smallest("a" * 40)),
    Case("Network without gpusPerPod", smallest(parallelism={"tensor": 2, "interconnect": "Network"})),
    Case("all ranks in one pod", smallest(parallelism={"tensor": 2, "gpusPerPod": 2, "interconnect": "SharedPod"})),
    Case(
        "model in a bucket",
        smallest(
            model={
                "source": {"s3": {"uri": "s3://models/a/b", "endpoint": "http://minio:9000", "region": "lab-1"}},
                "cache": {"size": "1Gi"},
            }
        ),
    ),
    Case("null is as if left out", smallest(parallelism={"gpusPerPod": None})),
)
_WRONG_MODELS: Final = (
    Case("name too long", smallest("a" * 41), "metadata.name", "at most 40 lower-case letters"),
    Case("name that begins with a digit", smallest("3b"), "metadata.name", "beginning with a letter"),
    Case("name with a dot", smallest("a.b"), "metadata.name", "at most 40 lower-case letters"),
    Case("no spec", _without_spec(), "spec", "Required value"),
    Case("no model", {**smallest(), "spec": {}}, "spec.model", "Required value"),
    Case("no source", smallest(model={}), "spec.model.source", "Required value"),
    Case("empty source", _source(), "spec.model.source", "set exactly one of huggingFace, s3, pvc and image"),
    Case(
        "two sources",
        _source(huggingFace={"repo": "a/b"}, pvc={"claimName": "models"}),
        "spec.model.source",
        "set exactly one of huggingFace, s3, pvc and image",
    ),
    Case(
        "two sources that are fetched",
        _source(huggingFace={"repo": "a/b"}, s3={"uri": "s3://models/a"}),
        "spec.model.source",
        "set exactly one of huggingFace, s3, pvc and image",
    ),
    Case("folder of a bucket without scheme", _source(s3={"uri": "models/a"}), "spec.model.source.s3.uri"),
    Case("folder of a bucket without bucket", _source(s3={"uri": "s3:///a/b/c"}), "spec.model.source.s3.uri"),
    Case("folder of a bucket with spaces", _source(s3={"uri": "s3://models/a b"}), "spec.model.source.s3.uri"),
    Case(
        "endpoint of a bucket that is no address",
        _source(s3={"uri": "s3://models/a", "endpoint": "minio:9000"}),
        "spec.model.source.s3.endpoint",
    ),
    Case(
        "region like a flag's value",
        _source(s3={"uri": "s3://models/a", "region": "eu west"}),
        "spec.model.source.s3.region",
    ),
    Case("repository without owner", _source(huggingFace={"repo": "gpt2"}), "spec.model.source.huggingFace.repo"),
    Case("repository like a flag", _source(huggingFace={"repo": "--a/b"}), "spec.model.source.huggingFace.repo"),
    Case(
        "revision like a flag",
        _source(huggingFace={"repo": "a/b", "revision": "-x"}),
        "spec.model.source.huggingFace.revision",
    ),
    Case(
        "endpoint that is no address",
        _source(huggingFace={"repo": "a/b", "endpoint": "mirror"}),
        "spec.model.source.huggingFace.endpoint",
    ),
    Case(
        "token without the Secret's name",
        _source(huggingFace={"repo": "a/b", "tokenSecretRef": {}}),
        "spec.model.source.huggingFace.tokenSecretRef.name",
        "Required value",
    ),
    Case(
        "path from the root",
        _source(pvc={"claimName": "models", "path": "/etc"}),
        "spec.model.source.pvc.path",
        "without a leading / and without ..",
    ),
    Case(
        "path that leads out",
        _source(image={"reference": "a", "path": "x/../../etc"}),
        "spec.model.source.image.path",
        "without a leading / and without ..",
    ),
    Case(
        "cache of a claim",
        smallest(model={"source": {"pvc": {"claimName": "models"}}, "cache": {"size": "1Gi"}}),
        "spec.model.cache",
        "cache goes with source.huggingFace and source.s3 only",
    ),
    Case("negative size", smallest(model=hub(cache={"size": "-1Gi"})), "spec.model.cache.size"),
    Case("negative number as a size", smallest(model=hub(cache={"size": -1})), "spec.model.cache.size"),
    Case("size with an endless exponent", smallest(model=hub(cache={"size": "1e999999999"})), "spec.model.cache.size"),
    Case("size that is none", smallest(model=hub(cache={"size": "big"})), "spec.model.cache.size"),
    Case("access mode", smallest(model=hub(cache={"accessMode": "Shared"})), "spec.model.cache.accessMode"),
    Case(
        "read-only cache that nobody can fill",
        smallest(model=hub(cache={"accessMode": "ReadOnlyMany"})),
        "spec.model.cache.accessMode",
        "name it in claimName",
    ),
    Case(
        "claim for one pod",
        smallest(model=hub(cache={"accessMode": "ReadWriteOncePod"})),
        "spec.model.cache.accessMode",
    ),
    Case("one name twice", smallest(model=hub(servedNames=["a", "a"])), "spec.model.servedNames", "Duplicate value"),
    Case("name with a blank", smallest(model=hub(servedNames=["a b"])), "spec.model.servedNames[0]"),
    Case("too many names", smallest(model=hub(servedNames=list("abcdefghi"))), "spec.model.servedNames"),
    Case("dtype", smallest(model=hub(dtype="fp8")), "spec.model.dtype"),
    Case("no tokens", smallest(model=hub(maxModelLen=1)), "spec.model.maxModelLen"),
)
_WRONG_SHAPES: Final = (
    Case("an unknown task", smallest(task="translate"), "spec.task"),
    Case("no ranks", smallest(parallelism={"tensor": 0}), "spec.parallelism.tensor"),
    Case("too many ranks", smallest(parallelism={"tensor": 65}), "spec.parallelism.tensor"),
    Case("a number as text", smallest(parallelism={"tensor": "2"}), "spec.parallelism.tensor"),
    Case("half a rank", smallest(parallelism={"tensor": 1.5}), "spec.parallelism.tensor"),
    Case(
        "pods of different sizes",
        smallest(parallelism={"tensor": 4, "gpusPerPod": 3}),
        "spec.parallelism.gpusPerPod",
        "gpusPerPod must divide tensor",
    ),
    Case(
        "more ranks in a pod than there are",
        smallest(parallelism={"tensor": 2, "gpusPerPod": 4}),
        "spec.parallelism.gpusPerPod",
        "gpusPerPod must divide tensor",
    ),
    Case(
        "SharedPod in two pods",
        smallest(parallelism={"tensor": 2, "gpusPerPod": 1, "interconnect": "SharedPod"}),
        "spec.parallelism.interconnect",
        "interconnect SharedPod keeps all ranks in one pod",
    ),
    Case("interconnect", smallest(parallelism={"interconnect": "RDMA"}), "spec.parallelism.interconnect"),
    Case("negative replicas", smallest(replicas=-1), "spec.replicas"),
    Case("too many replicas", smallest(replicas=1001), "spec.replicas"),
    Case(
        "two autoscaling targets",
        smallest(autoscaling={"maxReplicas": 2, "target": {"queueTimeMs": 1, "kvCacheUsage": 80}}),
        "spec.autoscaling.target",
        "set exactly one of queueTimeMs, runningPerReplica and kvCacheUsage",
    ),
    Case(
        "no autoscaling target",
        smallest(autoscaling={"maxReplicas": 2, "target": {}}),
        "spec.autoscaling.target",
        "set exactly one of",
    ),
    Case(
        "more replicas at least than at most",
        smallest(autoscaling={"minReplicas": 3, "maxReplicas": 2, "target": {"queueTimeMs": 1}}),
        "spec.autoscaling.minReplicas",
        "minReplicas exceeds maxReplicas",
    ),
    Case(
        "the default of minReplicas and a maximum of none",
        smallest(autoscaling={"maxReplicas": 0, "target": {"queueTimeMs": 1}}),
        "spec.autoscaling.maxReplicas",
    ),
    Case("suspend as text", smallest(suspend="true"), "spec.suspend"),
    Case("unknown field", smallest(scaling={"maxReplicas": 3}), "spec.scaling"),
    Case("unknown field within", smallest(engine={"imagee": "x"}), "spec.engine.imagee"),
    Case("no drain", smallest(drainSeconds=0), "spec.drainSeconds"),
    Case("no window", smallest(recovery={"windowSeconds": 0}), "spec.recovery.windowSeconds"),
)
_WRONG_PODS: Final = (
    Case("device", smallest(engine={"device": "tpu"}), "spec.engine.device"),
    Case("quantization", smallest(engine={"quantization": "awq"}), "spec.engine.quantization"),
    Case(
        "quantization of dummy weights only",
        smallest(engine={"quantization": "int4", "args": ["--page-size=16"]}),
        "spec.engine.quantization",
        "fp8-block and int4 quantize dummy weights only",
    ),
    Case(
        "quantization by a field and by an argument",
        smallest(engine={"quantization": "fp8", "args": ["--quantization=fp8"]}),
        "spec.engine.args",
        "args names an option that follows from other fields",
    ),
    Case(
        "data type of the KV cache as an argument",
        smallest(engine={"args": ["--kv-cache-dtype", "fp8"]}),
        "spec.engine.args",
        "args names an option that follows from other fields",
    ),
    Case("data type of the KV cache", smallest(engine={"kvCacheDtype": "float8"}), "spec.engine.kvCacheDtype"),
    Case("speculative decoding", smallest(engine={"speculative": "eagle"}), "spec.engine.speculative"),
    Case("speculative decoding, off unquoted", smallest(engine={"speculative": False}), "spec.engine.speculative"),
    Case("image with a blank", smallest(engine={"image": "a b"}), "spec.engine.image"),
    Case(
        "option of the operator",
        smallest(engine={"args": ["--page-size=16", "--tp=2"]}),
        "spec.engine.args",
        "args names an option that follows from other fields",
    ),
    Case(
        "option of the operator in two words",
        smallest(engine={"args": ["--replica", "x"]}),
        "spec.engine.args",
        "args names an option that follows from other fields",
    ),
    Case("reserved variable", _env(name="MINISGL_POD_INDEX"), "spec.engine.env[0].name", "the operator sets this"),
    Case("reserved variable of NCCL", _env(name="NCCL_HOSTID"), "spec.engine.env[0].name", "the operator sets this"),
    Case("name of a variable", _env(name="1ST"), "spec.engine.env[0].name"),
    Case(
        "variable with two values",
        _env(name="A", value="1", valueFrom={"secretKeyRef": {"name": "s", "key": "k"}}),
        "spec.engine.env[0].valueFrom",
        "set value or valueFrom, not both",
    ),
    Case(
        "variable from nowhere",
        _env(name="A", valueFrom={}),
        "spec.engine.env[0].valueFrom",
        "set exactly one of secretKeyRef and configMapKeyRef",
    ),
    Case(
        "one variable twice",
        smallest(engine={"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
        "spec.engine.env",
        "Duplicate value",
    ),
    Case(
        "GPUs among the resources",
        smallest(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}}),
        "spec.engine.resources",
        "GPUs follow from parallelism",
    ),
    Case("negative memory", smallest(engine={"resources": {"requests": {"memory": "-1"}}}), "spec.engine.resources"),
    Case("impatience", smallest(engine={"startupTimeoutSeconds": 1}), "spec.engine.startupTimeoutSeconds"),
    Case(
        "toleration of no taint",
        smallest(engine={"tolerations": [{"effect": "NoExecute"}]}),
        "spec.engine.tolerations[0].operator",
        "a toleration without key needs operator Exists",
    ),
    Case(
        "toleration with a needless value",
        smallest(frontend={"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
        "spec.frontend.tolerations[0].value",
        "a toleration with operator Exists has no value",
    ),
    Case("unknown field of affinity", smallest(engine={"affinity": {"nodes": {}}}), "spec.engine.affinity.nodes"),
    Case(
        "spread without a key",
        smallest(engine={"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}),
        "spec.engine.topologySpreadConstraints[0].topologyKey",
        "Required value",
    ),
    Case(
        "pull secret twice",
        smallest(frontend={"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}),
        "spec.frontend.imagePullSecrets",
        "Duplicate value",
    ),
    Case("no frontend", smallest(frontend={"replicas": 0}), "spec.frontend.replicas"),
    Case("two frontends at zero", smallest(frontend={"minReplicas": 2}), "spec.frontend.minReplicas"),
    Case("weight without a group", smallest(route={"weight": 2}), "spec.route.weight", "set group, or remove weight"),
    Case("Gateway without a name", smallest(route={"parentRefs": [{}]}), "spec.route.parentRefs[0].name", "Required"),
    Case("host name of an address", smallest(route={"hostnames": ["http://a"]}), "spec.route.hostnames[0]"),
    Case("account with a slash", smallest(serviceAccountName="a/b"), "spec.serviceAccountName"),
    Case("auth without a Secret", smallest(frontend={"auth": {}}), "spec.frontend.auth.apiKeysSecretRef", "Required"),
)


def _template(**template: Any) -> Object:
    return smallest(engine={"podTemplate": template})


def _volume(**volume: Any) -> Object:
    return _template(volumes=[{"name": "own", **volume}])


def _mounted(path: str, name: str = "own") -> Object:
    volumes = [{"name": "own", "emptyDir": {}}]
    return smallest(frontend={"podTemplate": {"volumes": volumes, "volumeMounts": [{"name": name, "mountPath": path}]}})


_ENGINE_TEMPLATE: Final = "spec.engine.podTemplate"
_MOUNT: Final = "spec.frontend.podTemplate.volumeMounts[0].mountPath"
_WRONG_TEMPLATES: Final = (
    *(
        Case(f"label {key}", _template(labels={"team": "a", key: "b"}), f"{_ENGINE_TEMPLATE}.labels", "one of these")
        for key in ("app.kubernetes.io/name", "serving.minisgl.io/revision", "apps.kubernetes.io/pod-index")
    ),
    Case(
        "label of the fetch pod",
        smallest(fetch={"podTemplate": {"labels": {"job-name": "a"}}}),
        "spec.fetch.podTemplate.labels",
        "one of these",
    ),
    Case("value of a label", _template(labels={"team": "a b"}), f"{_ENGINE_TEMPLATE}.labels"),
    Case(
        "annotation of the operator",
        _template(annotations={"serving.minisgl.io/cache-key": "a"}),
        f"{_ENGINE_TEMPLATE}.annotations",
        "the operator sets annotations that begin with serving.minisgl.io/",
    ),
    *(
        Case(f"more than {most} {field}", _template(**{field: value}), f"{_ENGINE_TEMPLATE}.{field}")
        for field, most, value in (
            ("labels", 32, {f"team-{number}": "a" for number in range(33)}),
            ("annotations", 32, {f"team-{number}": "a" for number in range(33)}),
            ("volumes", 16, [{"name": f"a{number}", "emptyDir": {}} for number in range(17)]),
            ("resourceClaims", 8, [{"name": f"a{number}", "resourceClaimName": "a"} for number in range(9)]),
        )
    ),
    Case(
        "more than 16 mounts",
        _template(
            volumes=[{"name": "own", "emptyDir": {}}],
            volumeMounts=[{"name": "own", "mountPath": f"/data/{number}"} for number in range(17)],
        ),
        f"{_ENGINE_TEMPLATE}.volumeMounts",
    ),
    Case("volume of nothing", _volume(), f"{_ENGINE_TEMPLATE}.volumes[0]", "set exactly one of configMap"),
    Case(
        "volume of two things",
        _volume(emptyDir={}, secret={"secretName": "a"}),
        f"{_ENGINE_TEMPLATE}.volumes[0]",
        "set exactly one of configMap",
    ),
    Case("directory of the node", _volume(hostPath={"path": "/"}), f"{_ENGINE_TEMPLATE}.volumes[0].hostPath"),
    Case(
        "name of a volume of the operator",
        _template(volumes=[{"name": "shm", "emptyDir": {}}]),
        f"{_ENGINE_TEMPLATE}.volumes[0].name",
        "the operator has a volume of this name",
    ),
    Case(
        "one volume twice",
        _template(volumes=[{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]),
        f"{_ENGINE_TEMPLATE}.volumes",
        "Duplicate value",
    ),
    Case(
        "file outside of the volume",
        _volume(configMap={"name": "a", "items": [{"key": "a", "path": "../b"}]}),
        f"{_ENGINE_TEMPLATE}.volumes[0].configMap.items[0].path",
    ),
    *(
        Case(f"mount at {path}", _mounted(path), _MOUNT, "the container has files of its own there")
        for path in ("/models", "/models/a", "/run", "/run/minisgl/x", "/dev/shm", "/dev", "/tmp/a", "/var/run/minisgl")
    ),
    *(
        Case(f"mount over programs at {path}", _mounted(path), _MOUNT, "the container has files of its own there")
        for path in ("/bin", "/lib", "/usr/local", "/usr/local/bin")
    ),
    *(
        Case(f"mount at {path}", _mounted(path), _MOUNT)
        for path in ("/", "data", "/run/../models", "/run//minisgl", "/a/", "/a:b")
    ),
    Case(
        "mount of no volume",
        _mounted("/data", "other"),
        "spec.frontend.podTemplate.volumeMounts",
        "a mount names a volume that is not in volumes",
    ),
    Case(
        "mount without volumes",
        _template(volumeMounts=[{"name": "models", "mountPath": "/data"}]),
        f"{_ENGINE_TEMPLATE}.volumeMounts",
        "a mount names a volume that is not in volumes",
    ),
    Case(
        "claim of two kinds",
        _template(resourceClaims=[{"name": "a", "resourceClaimName": "b", "resourceClaimTemplateName": "c"}]),
        f"{_ENGINE_TEMPLATE}.resourceClaims[0]",
        "set exactly one of resourceClaimName and resourceClaimTemplateName",
    ),
    Case(
        "claim of GPUs of a frontend",
        smallest(frontend={"podTemplate": {"resourceClaims": [_CLAIM_OF_GPUS]}}),
        "spec.frontend.podTemplate.resourceClaims",
        "only engine pods have GPUs",
    ),
    Case(
        "claim of GPUs of a fetch pod",
        smallest(fetch={"podTemplate": {"resourceClaims": [_CLAIM_OF_GPUS]}}),
        "spec.fetch.podTemplate.resourceClaims",
        "only engine pods have GPUs",
    ),
    Case("field of a pod", _template(hostNetwork=True), f"{_ENGINE_TEMPLATE}.hostNetwork"),
    Case(
        "option of the operator for frontends",
        smallest(frontend={"args": ["--port=80"]}),
        "spec.frontend.args",
        "args names an option that follows from other fields",
    ),
    Case(
        "reserved variable of frontends",
        smallest(frontend={"env": [{"name": "HOME", "value": "/"}]}),
        "spec.frontend.env[0].name",
        "the operator sets this",
    ),
    Case(
        "reserved variable of fetches",
        smallest(fetch={"env": [{"name": "A", "value": "b"}, {"name": "HF_TOKEN", "value": "a"}]}),
        "spec.fetch.env",
        "a token goes to source.huggingFace.tokenSecretRef",
    ),
    Case("no time to leave", smallest(frontend={"leaveSeconds": 0}), "spec.frontend.leaveSeconds"),
    Case("medium of /dev/shm", smallest(engine={"shmMedium": "Disk"}), "spec.engine.shmMedium"),
)
_WRONG_PEERS: Final = (
    Case(
        "peer that is nobody",
        smallest(networkPolicy={"ingressFrom": [{}]}),
        "spec.networkPolicy.ingressFrom[0]",
        "set ipBlock alone, or podSelector, namespaceSelector or both",
    ),
    Case(
        "peer that is two things",
        smallest(networkPolicy={"ingressFrom": [{**_PEER, "ipBlock": {"cidr": "10.0.0.0/8"}}]}),
        "spec.networkPolicy.ingressFrom[0]",
        "set ipBlock alone, or podSelector, namespaceSelector or both",
    ),
    Case(
        "range that is none",
        smallest(networkPolicy={"ingressFrom": [{"ipBlock": {"cidr": "10.0.0.0"}}]}),
        "spec.networkPolicy.ingressFrom[0].ipBlock.cidr",
    ),
)

CASES: Final = (*_RIGHT, *_WRONG_MODELS, *_WRONG_SHAPES, *_WRONG_PODS, *_WRONG_TEMPLATES, *_WRONG_PEERS)


class Edit(NamedTuple):
    """A change of an existing object; `field` is empty if it is allowed."""

    name: str
    before: Object
    after: Object
    field: str = ""
    message: str = ""


def _cache(**cache: Any) -> Object:
    return smallest(model=hub(cache=cache))


EDITS: Final[tuple[Edit, ...]] = (
    Edit("cache spelt out", smallest(model=hub()), _cache(size="100Gi", accessMode="ReadWriteMany")),
    Edit("cache retained", _cache(size="1Gi"), _cache(size="1Gi", retain=True)),
    Edit("another source", _cache(size="1Gi"), smallest()),
    Edit("a source that needs a cache", smallest(), _cache(size="1Gi")),
    Edit("other names", smallest(model=hub()), smallest(model=hub(servedNames=["b"]), replicas=2)),
    Edit("a larger size", _cache(size="1Gi"), _cache(size="1.5Gi")),
    Edit("a larger size than the default", smallest(model=hub()), _cache(size="1Ti")),
    Edit("a larger size as a number", _cache(size="1k"), _cache(size=1001)),
    Edit("the same size in other words", _cache(size="1Gi"), _cache(size="1024Mi")),
    Edit("a smaller size", _cache(size="1Gi"), _cache(size="1023Mi"), "spec.model", "cache.size cannot shrink"),
    Edit("less than the default", smallest(model=hub()), _cache(size=5), "spec.model", "cache.size cannot shrink"),
    Edit("back to the default", _cache(size="1Ti"), smallest(model=hub()), "spec.model", "cache.size cannot shrink"),
    Edit(
        "class",
        _cache(storageClassName="a"),
        smallest(model=hub()),
        "spec.model",
        "cache.storageClassName cannot be changed",
    ),
    Edit(
        "mode",
        _cache(size="1Gi"),
        _cache(size="1Gi", accessMode="ReadWriteOnce"),
        "spec.model",
        "cache.accessMode cannot be changed",
    ),
    Edit(
        "mode of a user's claim",
        _cache(claimName="mine"),
        _cache(claimName="mine", accessMode="ReadWriteOnce"),
    ),
    Edit("claim", _cache(), _cache(claimName="mine"), "spec.model", "cache.claimName cannot be changed"),
)
