"""InferenceModels for the scenarios: the demo checkpoint on CPUs, small enough for a laptop."""

from __future__ import annotations

from typing import Any, Final

AGENT: Final = {"source": {"pvc": {"claimName": "models", "path": "agent"}}, "dtype": "float32"}
"""`spec.model` with the demo checkpoint that has tools and thinking."""


def cpu_model(name: str, *, tensor: int = 1, **spec: Any) -> dict[str, Any]:
    """InferenceModel with the demo checkpoint from the claim "models"; each rank has its own pod.

    `spec` replaces whole fields of the spec. Without `recovery` in it no process is restarted in its pod: the standby
    of a frontend would do its imports a second time.
    """
    parallelism = {"tensor": tensor, "interconnect": "Network"} if tensor > 1 else {"tensor": 1}
    return inference_model(
        name,
        {
            "model": {"source": {"pvc": {"claimName": "models", "path": "demo"}}, "dtype": "float32"},
            "parallelism": parallelism,
            "engine": {
                "device": "cpu",
                "args": ["--max-running=8", "--num-pages=256"],
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                "resources": {"requests": {"cpu": "100m", "memory": "300Mi"}},
            },
            "frontend": {"resources": {"requests": {"cpu": "50m", "memory": "100Mi"}}},
            "drainSeconds": 10,
            "recovery": {"maxRestarts": 0},
            **spec,
        },
    )


def spread_model(name: str, **spec: Any) -> dict[str, Any]:
    """Two replicas and two frontends of `cpu_model`, on different nodes where possible."""
    model = cpu_model(name, replicas=2, **spec)
    for component in ("engine", "frontend"):
        labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/component": component}
        term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        model["spec"][component]["affinity"] = affinity
    model["spec"]["frontend"]["replicas"] = 2
    return model


def inference_model(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": spec,
    }
