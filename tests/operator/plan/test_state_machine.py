"""Plans converge to the last spec and violate no invariant, whatever users, drift, crashes and nodes do.

The simulated cluster asserts that no pod is forced off a node that is not known to be lost.
"""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl_operator.api.objects import Ref, ref_of
from minisgl_operator.facts.cache_use import cache_key_of
from minisgl_operator.facts.observed import NodeState, Readiness
from minisgl_operator.plan.plan import Apply, Delete
from minisgl_operator.render import initial_replicas, names, render
from support.cluster.clock import outcome, recorded
from support.cluster.guarded_cluster import GuardedCluster
from support.cluster.inference_models import CLAIM, DEFAULTS, HUB, raw_model
from support.cluster.simulated_cluster import NODES

IMAGES = ("engine:1", "engine:2", "engine:broken", "engine:unusable", "engine:refused")
PARALLELISM = ({"tensor": 1}, {"tensor": 2, "gpusPerPod": 1}, {"tensor": 4, "gpusPerPod": 2})
REPOS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")
FOREIGN = (
    Ref("Service", "qwen"),
    Ref("StatefulSet", "qwen-r1"),
    Ref("NetworkPolicy", "qwen-engine"),
    Ref("PodDisruptionBudget", "qwen-engine"),
    Ref("PersistentVolumeClaim", "qwen-cache"),
)


class Cluster(RuleBasedStateMachine):
    @initialize(
        source=st.sampled_from((HUB, CLAIM)),
        parallelism=st.sampled_from(PARALLELISM),
        strategy=st.sampled_from(("Auto", "Surge", "Recreate")),
        settled=st.booleans(),
        seed=st.integers(0, 9),
    )
    def begin(
        self, source: dict[str, Any], parallelism: dict[str, Any], strategy: str, settled: bool, seed: int
    ) -> None:
        spec = {
            "replicas": 3,
            "parallelism": parallelism,
            "engine": {"image": IMAGES[0]},
            "rollout": {"strategy": strategy},
        }
        self.cluster = GuardedCluster(raw_model(spec, source=source), DEFAULTS)
        self.cluster.broken = {"engine:broken"}
        self.cluster.refused = {"engine:refused"}
        self.cluster.files = {"engine:2": "other", "engine:unusable": "unusable"}
        self.cluster.unusable = {"unusable"}
        self.cluster.placement = Random(seed)
        self.theirs: dict[Ref, Any] = {}
        if settled:
            self.cluster.settle()

    @rule(image=st.sampled_from(IMAGES))
    def edit_engine(self, image: str) -> None:
        self.cluster.edit({"engine": {"image": image}})

    @rule(replicas=st.integers(0, 4), sent=st.booleans())
    def scale(self, replicas: int, sent: bool) -> None:
        self.cluster.edit({"replicas": replicas, "suspend": False})
        if sent:
            self.cluster.reconcile()

    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.cluster.edit({"suspend": suspend})

    @rule(parallelism=st.sampled_from(PARALLELISM))
    def split_otherwise(self, parallelism: dict[str, Any]) -> None:
        self.cluster.edit({"parallelism": parallelism})

    @rule(repo=st.sampled_from(REPOS))
    def change_model(self, repo: str) -> None:
        self.cluster.edit({"model": {"source": {"huggingFace": {"repo": repo}}}})

    @rule(
        strategy=st.sampled_from(("Auto", "Surge", "Recreate")),
        deadline=st.sampled_from((10, 1800)),
        rolls_back=st.booleans(),
        paused=st.booleans(),
    )
    def roll_out_otherwise(self, strategy: str, deadline: int, rolls_back: bool, paused: bool) -> None:
        settings = {"strategy": strategy, "progressDeadlineSeconds": deadline, "autoRollback": rolls_back}
        self.cluster.edit({"rollout": {**settings, "paused": paused}})

    @rule(enabled=st.booleans())
    def switch_policies(self, enabled: bool) -> None:
        self.cluster.edit({"networkPolicy": {"enabled": enabled}})

    @rule(data=st.data())
    def delete_child(self, data: st.DataObject) -> None:
        ours = sorted(self.cluster.objects.keys() - self.theirs.keys())
        if ours:
            self.cluster.remove(data.draw(st.sampled_from(ours)))

    @rule(data=st.data(), count=st.integers(0, 3))
    def drift(self, data: st.DataObject, count: int) -> None:
        """A user edits a child: its labels, and its number of pods if it has one."""
        ours = sorted(ref for ref in self.cluster.objects.keys() - self.theirs.keys() if ref.kind != "Job")
        if ours:
            body = self.cluster.objects[data.draw(st.sampled_from(ours))]
            body["metadata"]["labels"][names.INSTANCE_LABEL] = "drifted"
            body["metadata"]["generation"] += 1
            if "replicas" in body.get("spec", {}):
                body["spec"]["replicas"] = count

    @rule(ref=st.sampled_from(FOREIGN))
    def someone_takes_a_name(self, ref: Ref) -> None:
        if ref not in self.cluster.objects:
            self.cluster.put_conflicting(ref)
            self.theirs[ref] = self.cluster.objects[ref].copy()

    @rule(ref=st.sampled_from(FOREIGN))
    def someone_gives_it_back(self, ref: Ref) -> None:
        if self.theirs.pop(ref, None) is not None:
            self.cluster.remove(ref)

    @rule(calls=st.none() | st.integers(0, 6))
    def reconcile(self, calls: int | None) -> None:
        self.cluster.reconcile(calls)

    @rule()
    def watches_catch_up(self) -> None:
        self.cluster.look()

    @rule()
    def controllers_run(self) -> None:
        self.cluster.run_controllers()

    @rule(data=st.data())
    def kubelets_run(self, data: st.DataObject) -> None:
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.cluster.pods)), unique=True) if self.cluster.pods else st.just([])
        )
        self.cluster.run_kubelets(some)

    @rule(image=st.sampled_from(IMAGES), replicas=st.none() | st.integers(0, 4))
    def roll_out(self, image: str, replicas: int | None) -> None:
        """A rollout goes as far as it can; then the model may be scaled."""
        self.cluster.edit({"engine": {"image": image}})
        self.cluster.settle()
        if replicas is not None:
            self.scale(replicas, sent=True)

    @rule(data=st.data(), silent=st.booleans())
    def pod_fails(self, data: st.DataObject, silent: bool) -> None:
        """A pod is not ready until its kubelet runs again; its launcher may not answer until all settles."""
        if self.cluster.pods:
            name = data.draw(st.sampled_from(sorted(self.cluster.pods)))
            self.cluster.pods[name]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            if silent:
                self.cluster.silent.add(name)
            self.cluster.look()

    @rule(node=st.sampled_from(NODES))
    def a_node_stops(self, node: str) -> None:
        if node in self.cluster.nodes:
            self.cluster.lose_node(node)

    @rule(node=st.sampled_from(NODES))
    def a_node_reports_that_it_is_not_ready(self, node: str) -> None:
        if node in self.cluster.nodes:
            self.cluster.lose_node(node, "False")

    @rule(node=st.sampled_from(NODES), ready=st.sampled_from(("False", "Unknown")))
    def a_node_stays_not_ready(self, node: str, ready: Readiness) -> None:
        """Kubernetes deletes the pods of the node, and the operator has the time to force them off."""
        if node in self.cluster.nodes:
            self.cluster.lose_node(node, ready)
            for seconds in (301, 61):
                self.cluster.pass_time(seconds)
            self.cluster.look()
            self.cluster.reconcile()

    @rule(node=st.sampled_from(NODES))
    def a_node_returns(self, node: str) -> None:
        self.cluster.nodes[node] = NodeState()

    @rule(node=st.sampled_from(NODES))
    def a_node_is_deleted(self, node: str) -> None:
        self.cluster.nodes.pop(node, None)

    @rule(node=st.sampled_from(NODES), ready=st.sampled_from(("True", "False", "Unknown")))
    def a_node_is_tainted_as_out_of_service(self, node: str, ready: Readiness) -> None:
        since = None if ready == "True" else self.cluster.now
        self.cluster.nodes[node] = NodeState(ready, since, out_of_service=True)

    @rule(data=st.data())
    def a_process_hangs(self, data: st.DataObject) -> None:
        if self.cluster.pods:
            pod = self.cluster.pods[data.draw(st.sampled_from(sorted(self.cluster.pods)))]
            self.cluster.hanging.add(pod["metadata"]["uid"])

    @rule(allowed=st.booleans())
    def nodes_may_be_read(self, allowed: bool) -> None:
        self.cluster.sees_nodes = allowed

    @rule(seconds=st.sampled_from((30, 61, 301)))
    def time_passes(self, seconds: int) -> None:
        self._time_alone_changes_nothing_too_early(seconds)
        self.cluster.pass_time(seconds)

    def _time_alone_changes_nothing_too_early(self, seconds: int) -> None:
        facts = recorded(self.cluster.facts())
        # The end of a pause counts from the time at which the plan that begins it is sent.
        if facts.gang.to_release:
            return
        change, end = facts.next_change, facts.now + timedelta(seconds=seconds)
        if change is not None:
            end = min(end, change - timedelta(seconds=1))
        if end > facts.now:
            assert outcome(facts, end) == outcome(facts, facts.now), f"next change: {change}"

    @rule(pods=st.none() | st.integers(0, 6))
    def a_quota_is_set(self, pods: int | None) -> None:
        self.cluster.quota = pods

    @rule(checkpoints=st.none() | st.integers(1, 3))
    def the_claim_is_sized(self, checkpoints: int | None) -> None:
        self.cluster.room = checkpoints

    @rule(checkpoints=st.integers(1, 3), repos=st.permutations(REPOS))
    def the_claim_is_full(self, checkpoints: int, repos: list[str]) -> None:
        """One model after the other is fetched onto a small claim, while no pod of the earlier ones ends."""
        self.cluster.room = checkpoints
        for repo in repos:
            self.cluster.hanging |= {pod["metadata"]["uid"] for pod in self.cluster.pods.values()}
            self.change_model(repo)
            self.cluster.settle()
        self.cluster.hanging.clear()
        self.cluster.settle()
        self._no_room_can_be_made()

    @rule()
    def frontends_look(self) -> None:
        self.cluster.run_frontends()

    @rule(replicas=st.integers(1, 4), more=st.integers(0, 3), restarted=st.booleans(), by_quota=st.booleans())
    def gpus_are_scarce(self, replicas: int, more: int, restarted: bool, by_quota: bool) -> None:
        """With GPUs, or a quota, for one replica and a part of another, one becomes complete. They stay scarce until
        all settles."""
        for ref in list(self.theirs):
            self.someone_gives_it_back(ref)
        self.cluster.silent.clear()
        self.cluster.nodes = {node: NodeState() for node in NODES}
        self.cluster.hanging.clear()
        self.cluster.slots = self.cluster.quota = self.cluster.room = None
        if restarted:
            self.cluster.edit({"suspend": True})
            self.cluster.settle()
        strategy = self.cluster.raw["spec"]["rollout"]["strategy"]
        wanted = {"engine": {"image": IMAGES[0]}, "rollout": {"strategy": strategy, "autoRollback": False}}
        self.cluster.edit({**wanted, "replicas": replicas, "suspend": False})
        enough = self.cluster.model.spec.parallelism.pods + more
        if by_quota:
            self.cluster.quota = enough
        else:
            self.cluster.slots = enough
        for _ in range(20):
            self.cluster.settle()
            if self.cluster.serving():
                return
            self.cluster.now += timedelta(seconds=60)
        raise AssertionError("no replica became complete")

    @rule(image=st.sampled_from(IMAGES[:2]))
    def all_settles(self, image: str) -> None:
        """Once edits stop at a working spec without conflicts, all objects match the spec."""
        for ref in list(self.theirs):
            self.someone_gives_it_back(ref)
        self.cluster.silent.clear()
        self.cluster.nodes = {node: NodeState() for node in NODES}
        self.cluster.hanging.clear()
        self.cluster.slots = self.cluster.quota = None
        strategy = self.cluster.raw["spec"]["rollout"]["strategy"]
        self.cluster.edit({"engine": {"image": image}, "rollout": {"strategy": strategy, "autoRollback": False}})
        if self.cluster.room is not None:
            self.cluster.settle()
            self._no_room_can_be_made()
            self.cluster.room = None
        for _ in range(2):
            self.cluster.settle()
            self.cluster.now += timedelta(minutes=10)
        self.cluster.settle()
        steps = self.cluster.plan()
        assert not [step for step in steps if isinstance(step, Delete)]
        assert not [step for step in steps if isinstance(step, Apply) and self.cluster.changes(step.manifest)]
        indices = {names.replica_index("qwen", ref.name) for ref in self.cluster.objects if ref.kind == "StatefulSet"}
        assert len(indices) == initial_replicas(self.cluster.model)
        manifests = render(self.cluster.model, DEFAULTS, sorted(index for index in indices if index is not None))
        wanted = {ref_of(manifest): manifest for manifest in manifests}
        kept = {ref for ref in self.cluster.objects if ref.kind in ("ControllerRevision", "PersistentVolumeClaim")}
        # The last three, and that of the last revision that served.
        assert len([ref for ref in kept if ref.kind == "ControllerRevision"]) <= 4
        assert self.cluster.objects.keys() - kept == wanted.keys() - kept
        for ref, manifest in wanted.items():
            live = self.cluster.objects[ref]
            assert live["metadata"]["labels"] == manifest["metadata"]["labels"] or ref.kind == "Job"
            if ref.kind == "StatefulSet":
                assert live["spec"] == manifest["spec"]
                pods = {name for name, pod in self.cluster.pods.items() if name.startswith(ref.name + "-")}
                assert len(pods) == manifest["spec"]["replicas"]
        assert len(self.cluster.routed()) == sum(ref.kind == "StatefulSet" for ref in wanted)

    def _no_room_can_be_made(self) -> None:
        """A fetch waits for room only while no replica serves, or all checkpoints on the claim are in use."""
        cluster = self.cluster
        fetch = cluster.facts().fetch
        if fetch is None or not fetch.needed_bytes or not cluster.serving():
            return
        ours = cluster.observed().children
        templates = [body["spec"]["template"] for ref, body in ours.items() if ref.kind == "StatefulSet"]
        used = {cache_key_of(each) for each in (*templates, *cluster.pods.values())}
        stable = cluster.facts().stable_template
        if stable is not None:
            used.add(stable.cache_key)
        free = set(cluster.checkpoints) - used
        assert len(cluster.checkpoints) - len(free) >= (cluster.room or 0), f"{free} could be removed"

    @invariant()
    def no_replica_has_two_revisions(self) -> None:
        if hasattr(self, "cluster"):
            mixed = {replica: found for replica, found in self.cluster.revisions().items() if len(found) > 1}
            assert not mixed

    @invariant()
    def what_is_theirs_is_untouched(self) -> None:
        if hasattr(self, "cluster"):
            for ref, body in self.theirs.items():
                assert self.cluster.objects[ref] == body


Cluster.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCluster = Cluster.TestCase
