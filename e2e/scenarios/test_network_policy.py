"""Who can reach which port of a model's pods."""

from __future__ import annotations

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
    print("open")
except OSError:
    print("closed")
"""


def test_strangers_reach_the_api_and_nothing_else(
    namespace: Namespace, client: ClientPod, images: dict[str, str]
) -> None:
    namespace.apply(cpu_model("demo", tensor=2))
    # The operator's probes and the frontends' links get through, or it would not be Ready.
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER
    engine = namespace.pods("demo", "engine")[0]["status"]["podIP"]
    frontend = namespace.pods("demo", "frontend")[0]["status"]["podIP"]

    def reach(who: ClientPod, address: str, port: int) -> str:
        return who.run("python3", "-c", TRY, address, str(port)).strip()

    namespace.wait("an open port", lambda: reach(client, frontend, 8000) == "open")
    assert [reach(client, frontend, port) for port in (8080, 5550)] == ["closed", "closed"]
    assert [reach(client, engine, port) for port in (8080, 5550, 5551, 5552, 5560)] == ["closed"] * 5

    elsewhere = Namespace.create(f"{namespace.name[:30]}-elsewhere")
    try:
        stranger = ClientPod.create(elsewhere, images["frontend"])
        assert [reach(stranger, frontend, port) for port in (8000, 8080)] == ["closed", "closed"]
        assert reach(stranger, engine, 5550) == "closed"
    finally:
        elsewhere.delete()
