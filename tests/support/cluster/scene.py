"""The observed state of one model for tests of its status: everything is ready, except for the changes of the test."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from minisgl_operator.api.objects import Manifest, Ref, ref_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import NodeState, ObjectEvent, Observed, Rejection, Unreachable
from minisgl_operator.render import names, render, revision
from minisgl_operator.status.status import Status, derive_status
from support.cluster.inference_models import DEFAULTS, HUB, raw_model

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
EARLIER = "2026-01-01T11:00:00Z"
OLD_REVISION = "0000000000"


class Scene:
    """Children, pods and reports of a model that is ready. Tests remove, add and change them."""

    def __init__(self, spec: dict[str, Any] | None = None, *, source: dict[str, Any] | None = None) -> None:
        self.raw = raw_model(spec, source=source, generation=3)
        self.model = InferenceModel.parse(self.raw)
        self.revision = revision(self.model, DEFAULTS)
        self.children: dict[Ref, Manifest] = {}
        self.pods: dict[str, Manifest] = {}
        self.reports: dict[str, Mapping[str, Any] | Unreachable] = {}
        self.events: dict[str, tuple[ObjectEvent, ...]] = {}
        self.conflicting: dict[Ref, str] = {}
        self.rejections: tuple[Rejection, ...] = ()
        self.nodes: dict[str, NodeState] | None = {f"node-{name}": NodeState() for name in "0123456789d"}
        for manifest in render(self.model, DEFAULTS):
            self._add(manifest)
        if "suspend" not in self.raw["spec"]:
            self.frontends_report()

    def status(self, previous: Mapping[str, Any] | None = None, now: datetime = NOW) -> Status:
        return derive_status(Facts(self.model, self.observed(), DEFAULTS, now), previous or {})

    def conditions(self, previous: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        return {each["type"]: each for each in self.status(previous)["conditions"]}

    def observed(self) -> Observed:
        return Observed(
            model_object=self.raw,
            children=self.children,
            conflicting=self.conflicting,
            pods=tuple(self.pods.values()),
            reports={self.pods[name]["metadata"]["uid"]: said for name, said in self.reports.items()},
            events=self.events,
            nodes=self.nodes,
            rejections=self.rejections,
        )

    @property
    def job(self) -> str:
        """Name of the fetch Job."""
        return next(ref.name for ref in self.children if ref.kind == "Job")

    def child(self, kind: str, name: str) -> Manifest:
        return self.children[Ref(kind, name)]

    def admission(self, result: str, message: str = "") -> None:
        """Record the result of a dry run of a pod of the current revision."""
        found = {"revision": self.revision, "result": result, "message": message}
        self.raw["status"] = {"rollout": {"revision": self.revision, "admission": found}}

    def no_pods(self, prefix: str = "") -> None:
        """Remove pods with these names, and their reports."""
        for name in [name for name in self.pods if name.startswith(prefix)]:
            del self.pods[name]
            self.reports.pop(name, None)

    def not_ready(self, name: str, **status: Any) -> Manifest:
        """Make an existing pod not ready."""
        pod = self.pods[name]
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        pod["status"] |= status
        return pod

    def waiting(self, name: str, reason: str, message: str = "", **container: Any) -> None:
        """Make a container of the pod wait, and remove its report."""
        before = self.pods[name]["status"]["containerStatuses"][0]
        waiting = {"reason": reason, "message": message}
        state = {
            "name": before["name"],
            "image": before["image"],
            "state": {"waiting": waiting},
            "started": False,
            **container,
        }
        self.not_ready(name, phase="Pending", containerStatuses=[state])
        self.reports.pop(name, None)

    def unschedulable(self, name: str, message: str) -> None:
        pod = self.not_ready(name, phase="Pending", containerStatuses=[])
        pod["spec"]["nodeName"] = None
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pod["status"]["conditions"].append(said)
        self.reports.pop(name, None)

    def event(self, of: Manifest, reason: str, message: str) -> None:
        uid = of["metadata"]["uid"]
        self.events[uid] = (*self.events.get(uid, ()), ObjectEvent(reason, message))

    def leader_reports(self, replica: str, **said: Any) -> None:
        """Set the report of a leader; fields that are not given are those of a ready replica."""
        index = int(replica.rsplit("-r", 1)[1])
        if said.get("phase", "Ready") != "Ready":
            for number in range(self.model.spec.parallelism.pods):
                if (name := f"{replica}-{number}") in self.pods:
                    self.not_ready(name)
        tensor = self.model.spec.parallelism.tensor
        report = {
            "kind": "engine",
            "replica": replica,
            "pod": f"{replica}-0",
            "revision": self.revision,
            "epoch": [1767265200000 + index, 1],
            "phase": "Ready",
            "ready": True,
            "ready_ranks": tensor if said.get("phase", "Ready") == "Ready" else 0,
            "tensor": tensor,
            "transport": "",
            "timings": {"rendezvous": 0.51, "load": 3.04, "total": 7.99},
            "restarts": 0,
            "max_restarts": 5,
            "last_failure": None,
            "card": {
                **{"name": "qwen", "architecture": "Qwen3ForCausalLM", "task": "generate"},
                **{"max_model_len": 40960, "vocab_size": 151936},
            },
        }
        self.reports[f"{replica}-0"] = report | said

    def frontends_report(self, *unroutable: str, waits_for_files: bool = False) -> None:
        """Make every frontend route to all replicas except these, which it could use with other tokenizer files."""
        entries = [
            {
                "replica": stateful_set["metadata"]["name"],
                "revision": stateful_set["spec"]["template"]["metadata"]["labels"][names.REVISION_LABEL],
                "routable": stateful_set["metadata"]["name"] not in unroutable,
                "waits_for_files": waits_for_files and stateful_set["metadata"]["name"] in unroutable,
            }
            for ref, stateful_set in self.children.items()
            if ref.kind == "StatefulSet"
        ]
        for name, pod in self.pods.items():
            if pod["metadata"]["labels"][names.COMPONENT_LABEL] == names.FRONTEND:
                self.reports[name] = {"kind": "frontend", "ready": True, "draining": False, "replicas": entries}

    def fetch_pod(self, status: dict[str, Any]) -> Manifest:
        """Add the pod of a Job that is neither complete nor failed, and remove all engines."""
        job = next(body for ref, body in self.children.items() if ref.kind == "Job")
        job["status"] = {"active": 1}
        for ref in [ref for ref in self.children if ref.kind == "StatefulSet"]:
            del self.children[ref]
        self.no_pods("qwen-r")
        self.no_frontends()
        labels = names.labels("qwen", names.FETCH)
        pod = self._pod("fetch-pod", labels, job["metadata"]["uid"], "frontend:1")
        pod["status"] = {"phase": "Running", "conditions": [], "containerStatuses": []} | status
        self.pods["fetch-pod"] = pod
        return pod

    def no_frontends(self) -> None:
        """Make frontends run without a routable replica."""
        self.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 0
        for name, pod in self.pods.items():
            if pod["metadata"]["labels"][names.COMPONENT_LABEL] == names.FRONTEND:
                self.not_ready(name)
        self.frontends_report(*(ref.name for ref in self.children if ref.kind == "StatefulSet"))

    def outdate(self, *replicas: str) -> None:
        """Give these replicas and their pods an old template."""
        for replica in replicas:
            stateful_set = self.child("StatefulSet", replica)
            stateful_set["spec"]["template"]["metadata"]["labels"][names.REVISION_LABEL] = OLD_REVISION
            for name, pod in self.pods.items():
                if name.startswith(f"{replica}-"):
                    pod["metadata"]["labels"][names.REVISION_LABEL] = OLD_REVISION
        self.frontends_report()

    def _add(self, manifest: Manifest) -> None:
        body = copy.deepcopy(manifest)
        ref = ref_of(body)
        body["metadata"] |= {"uid": f"{ref.kind}/{ref.name}", "generation": 1, "creationTimestamp": EARLIER}
        self.children[ref] = body
        match ref.kind:
            case "StatefulSet":
                count = body["spec"]["replicas"]
                body["status"] = {"observedGeneration": 1, "replicas": count}
                template = body["spec"]["template"]
                for index in range(count):
                    labels = template["metadata"]["labels"] | {names.POD_INDEX_LABEL: str(index)}
                    name = f"{ref.name}-{index}"
                    image = template["spec"]["containers"][0]["image"]
                    self.pods[name] = self._pod(name, labels, body["metadata"]["uid"], image)
                self.leader_reports(ref.name)
            case "Deployment":
                count = body["spec"]["replicas"]
                body["status"] = {"replicas": count, "updatedReplicas": count, "readyReplicas": count}
                template = body["spec"]["template"]
                for index in range(count):
                    name = f"frontend-{index}"
                    image = template["spec"]["containers"][0]["image"]
                    self.pods[name] = self._pod(name, template["metadata"]["labels"], body["metadata"]["uid"], image)
            case "Job":
                body["status"] = {
                    "conditions": [{"type": "Complete", "status": "True"}],
                    "completionTime": EARLIER,
                    "succeeded": 1,
                }
            case "PersistentVolumeClaim":
                body["status"] = {"phase": "Bound"}

    def _pod(self, name: str, labels: dict[str, str], owner: str, image: str) -> Manifest:
        return {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": f"Pod/{name}",
                "creationTimestamp": EARLIER,
                "labels": dict(labels),
                "ownerReferences": [{"kind": "X", "name": "x", "uid": owner, "controller": True}],
            },
            "spec": {"nodeName": f"node-{name[-1]}"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [
                    {
                        "name": labels[names.COMPONENT_LABEL],
                        "image": image,
                        "state": {"running": {}},
                        "started": True,
                    }
                ],
            },
        }


def fetch_scene(status: dict[str, Any] | None = None, **source: Any) -> Scene:
    """A model from the Hub whose fetch is in progress."""
    scene = Scene(source={"huggingFace": HUB["huggingFace"] | source})
    scene.fetch_pod(status or {})
    return scene


def with_observed(scene: Scene, **changes: Any) -> Observed:
    return replace(scene.observed(), **changes)
