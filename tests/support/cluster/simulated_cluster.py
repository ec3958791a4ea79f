"""A cluster in a dict: as much of the API server, of its controllers, of kubelets and of our own pods as a plan needs.

Every step is one call, so a test can stop anywhere. Nothing happens by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import msgspec

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import (
    Manifest,
    Ref,
    controller_uid,
    copy_of,
    has_condition,
    is_deleting,
    ref_of,
)
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.cache_use import cache_key_of
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.lost_nodes import NODE_LOST_AFTER
from minisgl_operator.facts.observed import DryRun, NodeState, ObjectEvent, Observed, Readiness, Unreachable
from minisgl_operator.facts.pods import revision_of
from minisgl_operator.facts.rollout.waves import Turn
from minisgl_operator.plan.plan import Apply, Check, Delete, Step, plan
from minisgl_operator.render import names
from minisgl_operator.shell.store import trim
from minisgl_operator.status.rollout import rollout_status
from minisgl_operator.status.status import derive_status
from support.frontend.simulated_frontend import SimulatedFrontend

START = datetime(2026, 1, 1, tzinfo=UTC)
NODES = ("node-0", "node-1", "node-2")
REFUSAL = "ValidatingAdmissionPolicy 'images' with binding 'images' denied request: this image is not allowed"
NO_ROOM = {"kind": "fetch", "phase": "Failed", "reason": "NoSpace", "needed_bytes": 2, "free_bytes": 1}
_IMMUTABLE = ("selector", "serviceName", "podManagementPolicy")


@functools.lru_cache(64)
def _parsed(raw: bytes) -> InferenceModel:
    return InferenceModel.parse(msgspec.json.decode(raw))


class _Copies:
    """Copies of objects as they were last seen. An object that has not changed keeps its copy."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[bytes, Any]] = {}

    def of(self, objects: dict[str, Any]) -> dict[str, Any]:
        before, self._found = self._found, {}
        for name, value in objects.items():
            content = msgspec.msgpack.encode(value)
            known = before.get(name)
            if known is None or known[0] != content:
                known = (content, msgspec.msgpack.decode(content))
            self._found[name] = known
        return {name: copy for name, (_, copy) in self._found.items()}


class SimulatedCluster:
    """One model in its cluster. `broken` images never become ready: their launchers fail permanently. `files` has the
    tokenizer files of images that differ from the others; frontends cannot load `unusable` ones. `silent` has the names
    of pods whose launcher does not answer probes. `slots` is the number of engine pods for which nodes have room,
    shared with the `neighbours`; None: enough for all. The scheduler places pods in the order of their names, or as
    `placement` shuffles them. `quota` is the number of engine pods that may exist, shared with the `neighbours`; None:
    any. Admission refuses pods with `refused` images; `dry_run` is the HTTP status of a dry run instead.

    `downloads`: fetch Jobs complete, unless the claim with its `checkpoints` has no room for another one. `room` is the
    number of checkpoints that fit on it; None: any.

    `load`: what frontends report about requests, for models with an autoscaler.

    `full_status`: the operator writes all of the status, not only what plans read in general.

    `nodes` are those that exist. The kubelet of one that is not ready does nothing, and `hanging` pods, by uid, are
    never ended by theirs. `sees_nodes`: the operator may read them."""

    full_status = False

    def __init__(self, raw: Manifest, defaults: Defaults) -> None:
        self.raw = raw
        self.defaults = defaults
        self.objects: dict[Ref, Manifest] = {}
        self.pods: dict[str, Manifest] = {}
        self.broken: set[str] = set()
        self.files: dict[str, str] = {}
        self.unusable: set[str] = set()
        self.silent: set[str] = set()
        self.nodes = {name: NodeState() for name in NODES}
        self.hanging: set[str] = set()
        self.sees_nodes = True
        self.slots: int | None = None
        self.quota: int | None = None
        self.refused: set[str] = set()
        self.dry_run: int | None = None
        self.dry_runs = 0
        self.events: dict[str, tuple[ObjectEvent, ...]] = {}
        self.downloads = True
        self.room: int | None = None
        self.checkpoints: list[str] = []
        self.neighbours: list[SimulatedCluster] = []
        self.placement: Random | None = None
        self.load: dict[str, Any] = {}
        self.now = START
        self.turn: Turn | None = None
        self._frontend = SimulatedFrontend()
        self._uids = itertools.count(1)
        self._frontend_pod = self._make_frontend_pod()
        self._copies_of_pods, self._copies_of_status = _Copies(), _Copies()
        self._seen_pods: dict[str, Manifest] = {}
        self._seen_status: dict[str, Any] = {}
        self._facts: Facts | None = None
        self.look()

    # The user.

    def edit(self, spec: dict[str, Any]) -> None:
        self.raw = {**self.raw, "spec": {**self.raw["spec"], **spec}}
        self.raw["metadata"] = self.raw["metadata"] | {"generation": self.raw["metadata"]["generation"] + 1}

    def put_conflicting(self, ref: Ref) -> None:
        """Create an object of another owner with a free name of a child."""
        if ref not in self.objects:
            metadata = {"name": ref.name, "namespace": "team-a", "uid": self._uid(), "labels": {"whose": "theirs"}}
            self.objects[ref] = {"kind": ref.kind, "metadata": metadata, "spec": {"replicas": 7}}

    def remove(self, ref: Ref) -> None:
        """Delete an object, as kubectl does."""
        gone = self.objects.pop(ref, None)
        if gone is None:
            return
        if ref.kind == "PersistentVolumeClaim":
            self.checkpoints.clear()
        for pod in self.pods.values():
            if controller_uid(pod) == gone["metadata"]["uid"]:
                self._terminate(pod)
        self.look()

    # The operator.

    @property
    def model(self) -> InferenceModel:
        return _parsed(msgspec.json.encode({name: value for name, value in self.raw.items() if name != "status"}))

    def look(self) -> None:
        """Let the watches catch up on pods and on writes of controllers. Own writes are visible immediately."""
        self._seen_pods = self._copies_of_pods.of(self.pods)
        self._seen_status = self._copies_of_status.of(
            {body["metadata"]["uid"]: body.get("status") for body in self.objects.values()}
        )

    def observed(self, dry_run: DryRun | None = None) -> Observed:
        ours = {ref: body for ref, body in self.objects.items() if self._ours(body)}
        children = {ref: self._as_seen(body) for ref, body in ours.items()}
        conflicting = {ref: "someone else's" for ref in self.objects.keys() - ours.keys()}
        uid = self._frontend_pod["metadata"]["uid"]
        reports: dict[str, Any] = {uid: self._frontend.report() | self.load}
        for pod in self._seen_pods.values():
            if self._image(pod) in self.broken:
                reports[pod["metadata"]["uid"]] = {"kind": "engine", "phase": "Failed", "restarts": 5}
            if pod["metadata"]["name"] in self.silent:
                reports[pod["metadata"]["uid"]] = Unreachable("timed out")
        fetches = [self._make_fetch_pod(body) for ref, body in ours.items() if ref.kind == "Job" and _has_failed(body)]
        reports |= {pod["metadata"]["uid"]: NO_ROOM for pod in fetches}
        pods = (*self._seen_pods.values(), self._frontend_pod, *fetches)
        nodes = dict(self.nodes) if self.sees_nodes else None
        return Observed(
            self.raw,
            children=children,
            conflicting=conflicting,
            pods=pods,
            reports=reports,
            events=self.events,
            nodes=nodes,
            dry_run=dry_run,
        )

    def facts(self, dry_run: DryRun | None = None) -> Facts:
        model, observed, last = self.model, self.observed(dry_run), self._facts
        if last is None or last.model is not model or last.defaults is not self.defaults:
            self._facts = Facts(model, observed, self.defaults, self.now, self.turn)
        else:
            self._facts = last.seen_again(observed, self.turn, self.now)
        return self._facts

    def plan(self) -> tuple[Step, ...]:
        return self.plan_of(self.facts())

    def plan_of(self, facts: Facts) -> tuple[Step, ...]:
        return plan(facts)

    def reconcile(self, calls: int | None = None, facts: Facts | None = None) -> None:
        """Plan and send; a crash after `calls` requests loses the rest. `facts` are those of now, if they are known."""
        facts, changed, answer = facts or self.facts(), False, None
        for step in self.plan_of(facts)[:calls]:
            if isinstance(step, Check):
                answer = self._dry_run(step)
            else:
                changed |= self.send(step)
        if calls is None:
            if changed or answer is not None:
                facts = self.facts(answer)
            state = {
                "failedRevision": facts.failed_revision,
                "rollout": rollout_status(facts),
            }
            if self.full_status:
                state |= derive_status(facts, {})
            self.raw = {**self.raw, "status": {name: value for name, value in state.items() if value is not None}}

    def _dry_run(self, step: Check) -> DryRun:
        self.dry_runs += 1
        if self.dry_run is not None:
            no_right = 'pods is forbidden: User "minisgl" cannot create resource "pods" in API group ""'
            return DryRun(step.revision, self.dry_run, "", no_right if self.dry_run == 403 else "failed")
        refusal = self._refusal(step.pod)
        return DryRun(step.revision, 403, "Forbidden", refusal) if refusal else DryRun(step.revision, 201)

    def send(self, step: Apply | Delete) -> bool:
        """Return False if this changes nothing."""
        if isinstance(step, Apply):
            return self.apply(step.manifest)
        if step.ref.kind == "Pod":
            self._force_off(step)
        else:
            live = self.objects.get(step.ref)
            if live is not None and live["metadata"]["uid"] == step.uid:
                assert controller_uid(live) == self.raw["metadata"]["uid"], f"deletes what is not ours: {step.ref}"
                self.remove(step.ref)
        return True

    def apply(self, manifest: Manifest) -> bool:
        """Return False if this changes nothing."""
        ref = ref_of(manifest)
        live = self.objects.get(ref)
        if live is None:
            created = copy_of(manifest)
            created["metadata"] |= {
                "uid": self._uid(),
                "generation": 1,
                "creationTimestamp": self.now.isoformat(),
            }
            self.objects[ref] = created
            return True
        assert self._ours(live), f"applies onto what is not ours: {ref}"
        if not self.changes(manifest):
            return False
        if ref.kind == "StatefulSet":
            assert all(live["spec"][name] == manifest["spec"][name] for name in _IMMUTABLE)
        assert ref.kind != "Job" or live["spec"]["template"] == manifest["spec"]["template"], "immutable"
        live["metadata"] |= {"annotations": {}} | copy_of(manifest["metadata"])
        live["metadata"]["generation"] += 1
        for field in manifest.keys() - {"metadata"}:
            live[field] = copy_of(manifest[field])
        return True

    def changes(self, manifest: Manifest) -> bool:
        """True if an apply would change anything."""
        live = self.objects.get(ref_of(manifest))
        if live is None:
            return True
        fields = manifest.keys() - {"metadata", "kind", "apiVersion"}
        metadata = manifest["metadata"]
        return any(live.get(field) != manifest[field] for field in fields) or any(
            (live["metadata"].get(name) or {}) != (metadata.get(name) or {})
            for name in ("annotations", "labels", "ownerReferences")
        )

    # Controllers, kubelets, pods.

    def run_controllers(self) -> None:
        """Run the StatefulSet and Job controllers once."""
        self.now += timedelta(seconds=1)
        for ref, body in list(self.objects.items()):
            if not self._ours(body):
                continue
            if ref.kind == "StatefulSet":
                self._run_stateful_set(body)
            elif ref.kind == "Deployment":
                self._run_deployment(body)
            elif ref.kind == "Job" and not has_condition(body, "Complete") and self.downloads:
                self._run_job(body)

    def run_scheduler(self, order: Iterable[str] | None = None) -> None:
        """Place pods on nodes while there are free slots, in this order; report the others as unschedulable."""
        waiting = sorted(self.pods) if order is None else list(order)
        if self.placement is not None:
            self.placement.shuffle(waiting)
        for name in waiting:
            pod = self.pods[name]
            if pod["spec"]["nodeName"] is None and not is_deleting(pod):
                fits = self.slots is None or self.slots > sum(each.placed for each in (self, *self.neighbours))
                if fits:
                    pod["spec"]["nodeName"] = self._free_node()
                self._set_scheduled(pod, fits)

    @property
    def placed(self) -> int:
        """Number of pods on nodes. A terminating pod keeps its slot."""
        return sum(pod["spec"]["nodeName"] is not None for pod in self.pods.values())

    def _set_scheduled(self, pod: Manifest, fits: bool) -> None:
        said = {"type": "PodScheduled", "status": "True"}
        if not fits:
            said |= {"status": "False", "reason": "Unschedulable", "message": "Insufficient nvidia.com/gpu."}
        self._set_condition(pod, said)

    def _set_condition(self, pod: Manifest, said: dict[str, str]) -> None:
        """Replace the condition of this type, unless it has the same status."""
        before = {each["type"]: each for each in pod["status"]["conditions"]}
        if before.get(said["type"], {}).get("status") != said["status"]:
            said = {**said, "lastTransitionTime": self.now.isoformat()}
            pod["status"]["conditions"] = [*(before | {said["type"]: said}).values()]

    def run_kubelets(self, which: Iterable[str] | None = None) -> None:
        """Remove deleted pods; make the pods of complete groups with one revision ready, and member pods that have
        joined pod 0."""
        for name in list(self.pods) if which is None else which:
            pod = self.pods.get(name)
            if pod is None:
                continue
            if pod["spec"]["nodeName"] is None:
                if is_deleting(pod):
                    del self.pods[name]
                continue
            node = self.nodes.get(pod["spec"]["nodeName"])
            if node is None or node.not_ready_since is not None:
                continue
            if is_deleting(pod):
                if pod["metadata"]["uid"] not in self.hanging:
                    del self.pods[name]
                continue
            pod["status"]["phase"] = "Running"
            pod["status"]["containerStatuses"] = [{"name": "main", "started": True}]
            group = [other for other in self.pods.values() if self._replica(other) == self._replica(pod)]
            alike = len({revision_of(other) for other in group}) == 1
            size = self._size(pod)
            placed = all(other["spec"]["nodeName"] is not None for other in group)
            up = alike and placed and len(group) >= size and self._image(pod) not in self.broken
            ready = up or self._has_joined(pod)
            self._set_condition(pod, {"type": "Ready", "status": "True" if ready else "False"})

    def _has_joined(self, pod: Manifest) -> bool:
        """True for a member pod with a link to pod 0, whether or not the ranks of the replica serve."""
        leader = self.pods.get(f"{self._replica(pod)}-0")
        if leader is None or leader is pod or is_deleting(leader) or leader["status"]["phase"] != "Running":
            return False
        reachable = self.nodes.get(leader["spec"]["nodeName"]) == NodeState()
        return reachable and revision_of(leader) == revision_of(pod) and self._image(pod) not in self.broken

    def lose_node(self, name: str, ready: Readiness = "Unknown") -> None:
        """Stop a node, or with `ready` False all that its kubelet does except its reports: its pods stay as they are,
        and are marked as not ready."""
        self.nodes[name] = NodeState(ready, self.now)
        for pod in self.pods.values():
            if pod["spec"]["nodeName"] == name:
                pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    def pass_time(self, seconds: float) -> None:
        """Let time pass; Kubernetes deletes the pods of nodes that have not been ready for five minutes."""
        self.now += timedelta(seconds=seconds)
        for pod in self.pods.values():
            node = self.nodes.get(pod["spec"]["nodeName"])
            since = None if node is None else node.not_ready_since
            if since is not None and self.now - since >= timedelta(minutes=5) and not is_deleting(pod):
                end = self.now + timedelta(seconds=330)
                pod["metadata"] |= {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": 330}

    def run_frontends(self) -> None:
        """Let frontends discover ready replicas."""
        images = {self._replica(pod): self._image(pod) for pod in self.pods.values()}
        serving = {
            replica: (revision, self.files.get(images[replica], "")) for replica, revision in self.serving().items()
        }
        self._frontend.look(serving, self.unusable)

    def routed(self) -> dict[str, str]:
        """Replicas that are routable, with their revision."""
        routes = self._frontend.routes()
        return {replica: revision for replica, revision in self.serving().items() if replica in routes}

    def serving(self) -> dict[str, str]:
        """Replicas with all pods ready and of one revision, with that revision."""
        groups: dict[str, list[Manifest]] = {}
        for pod in self.pods.values():
            groups.setdefault(self._replica(pod), []).append(pod)
        return {
            replica: str(revision_of(group[0]))
            for replica, group in groups.items()
            if len(group) >= self._size(group[0])
            and len({revision_of(pod) for pod in group}) == 1
            and all(_ready(pod) and not is_deleting(pod) for pod in group)
        }

    def settle(self, rounds: int = 100) -> None:
        """Run operator, controllers, kubelets and frontends until nothing changes."""
        for _ in range(rounds):
            before = self.image_of_all()
            self.look()
            self.reconcile()
            self.run_controllers()
            self.run_scheduler()
            self.run_kubelets()
            self.run_frontends()
            if before == self.image_of_all():
                return
        raise AssertionError(f"not settled after {rounds} rounds")

    def revisions(self) -> dict[str, set[str | None]]:
        """Revisions of each replica's pods, including terminating ones."""
        found: dict[str, set[str | None]] = {}
        for pod in self.pods.values():
            found.setdefault(self._replica(pod), set()).add(revision_of(pod))
        return found

    def image_of_all(self) -> bytes:
        """All that may change, without the time."""
        return msgspec.msgpack.encode([self.raw, list(self.objects.values()), self.pods, self._frontend.report()])

    def _run_stateful_set(self, body: Manifest) -> None:
        name, uid, count = body["metadata"]["name"], body["metadata"]["uid"], body["spec"]["replicas"]
        self.events.pop(uid, None)
        for index in range(count):
            refusal = self._refusal(body["spec"]["template"])
            if refusal and f"{name}-{index}" not in self.pods:
                message = f"create Pod {name}-{index} in StatefulSet {name} failed error: {refusal}"
                self.events[uid] = (ObjectEvent("FailedCreate", message),)
            elif f"{name}-{index}" not in self.pods:
                self.pods[f"{name}-{index}"] = self._make_pod(body, index)
        own = [pod for pod in self.pods.values() if controller_uid(pod) == uid]
        for pod in own:
            if int(pod["metadata"]["labels"][names.POD_INDEX_LABEL]) >= count:
                self._terminate(pod)
        body["status"] = {"observedGeneration": body["metadata"]["generation"], "replicas": len(own)}

    def _run_job(self, body: Manifest) -> None:
        """Fetch a checkpoint; one that does not fit fails after an attempt to remove others."""
        arguments = body["spec"]["template"]["spec"]["containers"][0]["args"]
        wanted = arguments[arguments.index("fetch") + 2].rpartition("/")[2]
        kept = [wanted, *(arguments[arguments.index("--keep") + 1 :] if "--keep" in arguments else [])]
        removable = [each for each in self.checkpoints if each not in kept] if "unused" in arguments else []
        excess = 0
        if self.room is not None and wanted not in self.checkpoints:
            excess = max(0, len(self.checkpoints) + 1 - self.room)
        if excess > len(removable):
            body["status"] = {"active": 1, "failed": 1}
            return
        for each in removable[:excess]:
            assert all(cache_key_of(pod) != each for pod in self.pods.values()), f"removes {each}, which a pod reads"
            self.checkpoints.remove(each)
        if wanted not in self.checkpoints:
            self.checkpoints.append(wanted)
        done = {"type": "Complete", "status": "True"}
        body["status"] = {"conditions": [done], "completionTime": self.now.isoformat()}

    def _make_fetch_pod(self, job: Manifest) -> Manifest:
        uid = job["metadata"]["uid"]
        metadata = {
            "name": f"{job['metadata']['name']}-1",
            "uid": f"{uid}-pod",
            "labels": names.labels(self.raw["metadata"]["name"], names.FETCH),
            "ownerReferences": [{"kind": "Job", "uid": uid, "controller": True}],
        }
        return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": "Failed", "conditions": []}}

    def _refusal(self, pod: Manifest) -> str:
        """The message with which admission refuses a pod or a pod template; "" if it does not. Quotas come last."""
        if self._image(pod) in self.refused:
            return f'pods "qwen" is forbidden: {REFUSAL}'
        full = self.quota is not None and sum(len(each.pods) for each in (self, *self.neighbours)) >= self.quota
        return 'pods "qwen" is forbidden: exceeded quota: gpus, requested: pods=1' if full else ""

    def _run_deployment(self, body: Manifest) -> None:
        """Replace frontends at once; those with a broken image never become ready, and the old ones stay."""
        count = body["spec"]["replicas"]
        status = {"observedGeneration": body["metadata"]["generation"], "replicas": count}
        if body["spec"]["template"]["spec"]["containers"][0]["image"] in self.broken:
            late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
            status |= {"replicas": count + 1, "updatedReplicas": 1, "readyReplicas": count, "conditions": [late]}
        else:
            status |= {"updatedReplicas": count, "readyReplicas": count}
        body["status"] = status

    def _make_pod(self, body: Manifest, index: int) -> Manifest:
        template = copy_of(body["spec"]["template"])
        template["metadata"]["labels"][names.POD_INDEX_LABEL] = str(index)
        template["spec"]["nodeName"] = self._free_node() if self.slots is None else None
        template["metadata"] |= {
            "name": f"{body['metadata']['name']}-{index}",
            "uid": self._uid(),
            "ownerReferences": [{"kind": "StatefulSet", "uid": body["metadata"]["uid"], "controller": True}],
        }
        return {"kind": "Pod", **template, "status": {"phase": "Pending", "conditions": []}}

    def _make_frontend_pod(self) -> Manifest:
        labels = names.labels(self.raw["metadata"]["name"], names.FRONTEND)
        metadata = {"name": "frontend-pod", "uid": self._uid(), "labels": labels}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": status}

    def _free_node(self) -> str:
        """The ready node with the fewest pods."""
        used = [pod["spec"]["nodeName"] for pod in self.pods.values()]
        ready = [name for name, node in self.nodes.items() if node == NodeState()]
        return min(ready or NODES, key=used.count)

    def _force_off(self, step: Delete) -> None:
        """Remove a pod whose kubelet has not confirmed its end, which only a lost node justifies."""
        pod = self.pods.get(step.ref.name)
        if pod is None or pod["metadata"]["uid"] != step.uid:
            return
        node = self.nodes.get(pod["spec"]["nodeName"])
        lost = node is None or (node.out_of_service and node.ready != "True")
        if node is not None and node.ready == "Unknown" and node.not_ready_since is not None:
            lost |= self.now - node.not_ready_since >= NODE_LOST_AFTER
        assert lost and is_deleting(pod) and self.sees_nodes, f"forced off a node that is not lost: {step}"
        del self.pods[step.ref.name]

    def _terminate(self, pod: Manifest) -> None:
        pod["metadata"].setdefault("deletionTimestamp", self.now.isoformat())

    def _as_seen(self, body: Manifest) -> Manifest:
        seen = {key: value for key, value in body.items() if key != "status"}
        status = self._seen_status.get(body["metadata"]["uid"])
        return trim(seen if status is None else seen | {"status": status})

    def _ours(self, body: Manifest) -> bool:
        uid = controller_uid(body)
        labelled = body["metadata"]["labels"].get(names.MODEL_LABEL) == self.raw["metadata"]["name"]
        return uid == self.raw["metadata"]["uid"] or (uid is None and labelled)

    def _replica(self, pod: Manifest) -> str:
        return str(pod["metadata"]["labels"][names.REPLICA_LABEL])

    def _size(self, pod: Manifest) -> int:
        arguments = pod["spec"]["containers"][0]["args"]
        tensor, ranks = (int(arguments[arguments.index(name) + 1]) for name in ("--tp", "--ranks-per-pod"))
        return tensor // ranks

    def _image(self, pod: Manifest) -> str:
        return str(pod["spec"]["containers"][0]["image"])

    def _uid(self) -> str:
        return f"10000000-0000-4000-8000-{next(self._uids):012d}"


def _has_failed(job: Manifest) -> bool:
    return bool(job.get("status", {}).get("failed"))


def _ready(pod: Manifest) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])
