"""Ports of a model's pods that other pods can reach."""

from __future__ import annotations

import json

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

ENGINE_PORTS = (8080, 5550, 5551, 5552, 5560, 5561, 5562)
FRONTEND_PORTS = (8000, 8080)
TRY = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def is_open(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=3).close()
        return True
    except OSError:
        return False

ports = [int(port) for port in sys.argv[2:]]
with ThreadPoolExecutor(len(ports)) as pool:
    print(json.dumps([port for port, found in zip(ports, pool.map(is_open, ports)) if found]))
"""


def test_other_pods_reach_only_the_api(namespace: Namespace, client: ClientPod, images: dict[str, str]) -> None:
    namespace.apply(cpu_model("demo", tensor=2))
    # Ready implies that the operator's probes are allowed.
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER
    rank0, rank1 = (namespace.get("pods", f"demo-r0-{rank}") for rank in (0, 1))
    assert rank0 and rank1
    engines = [pod["status"]["podIP"] for pod in (rank0, rank1)]
    frontend = namespace.pods("demo", "frontend")[0]["status"]["podIP"]

    def reach(pod: ClientPod, address: str, *ports: int) -> list[int]:
        """Ports that this pod can connect to."""
        found: list[int] = json.loads(pod.run("python3", "-c", TRY, address, *map(str, ports)))
        return found

    # The pods that need the ports can reach them.
    ranks = [ClientPod(namespace, f"demo-r0-{rank}") for rank in (0, 1)]
    listening = [reach(ranks[1], engines[0], *ENGINE_PORTS), reach(ranks[0], engines[1], *ENGINE_PORTS)]
    assert {8080, 5550} <= set(listening[0])
    assert 8080 in listening[1] and len(listening[1]) > 1
    front = ClientPod(namespace, namespace.pods("demo", "frontend")[0]["metadata"]["name"])
    assert reach(front, engines[0], *ENGINE_PORTS) == [8080, 5550]

    namespace.wait("an open port", lambda: reach(client, frontend, *FRONTEND_PORTS) == [8000])
    assert [reach(client, engine, *ENGINE_PORTS) for engine in engines] == [[], []]

    elsewhere = Namespace.create(f"{namespace.name[:30]}-elsewhere")
    try:
        stranger = ClientPod.create(elsewhere, images["frontend"])
        assert reach(stranger, frontend, *FRONTEND_PORTS) == []
        assert [reach(stranger, engine, *ENGINE_PORTS) for engine in engines] == [[], []]

        invited = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": elsewhere.name}}}
        namespace.patch("inferencemodel", "demo", {"spec": {"networkPolicy": {"ingressFrom": [invited]}}})
        namespace.wait("access from the other namespace", lambda: reach(stranger, frontend, *FRONTEND_PORTS) == [8000])
        namespace.wait("no access from its own namespace", lambda: reach(client, frontend, *FRONTEND_PORTS) == [])
        assert [reach(stranger, engine, *ENGINE_PORTS) for engine in engines] == [[], []]

        namespace.patch("inferencemodel", "demo", {"spec": {"networkPolicy": {"enabled": False}}})
        namespace.wait("all ports open", lambda: reach(stranger, engines[0], *ENGINE_PORTS) == listening[0])
    finally:
        elsewhere.delete()
