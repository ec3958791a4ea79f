"""`make demo`: a cluster on this machine, a model on it, and one question to the model."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Final

from cluster import layout, lifecycle, tools
from cluster.places import CommandFailed, NotUp
from cluster.relay import host_kubeconfig
from cluster.system import MachineUnfit
from harness import installation
from harness.client import ClientPod
from harness.installation import ROOT, phase
from harness.namespace import Namespace

SAMPLE: Final = ROOT / "manifests/samples/cpu-two-pods.yaml"
NAMESPACE: Final = "demo"
NODES: Final = 2
QUESTION: Final = "What does a scheduler do?"


def main() -> int:
    try:
        if sys.argv[1:] == ["down"]:
            lifecycle.down()
            print("the cluster is removed; built programs and images are kept in", layout.CACHE)
        else:
            _up()
    except (CommandFailed, MachineUnfit, NotUp, TimeoutError, tools.ToolchainMissing) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    return 0


def _up() -> None:
    began = time.monotonic()
    references = installation.bring_up(NODES)
    with phase("helm install minisgl charts/"):
        installation.install(references)
    namespace = Namespace.create(NAMESPACE)
    installation.publish_checkpoint("demo", ROOT / ".cache/demo")
    namespace.mount_directory("models", installation.MODELS)
    client = ClientPod.create(namespace, references["frontend"])
    with phase(f"kubectl apply -f {SAMPLE.relative_to(ROOT)}, until it is Ready"):
        namespace.kubectl("apply", "-f", str(SAMPLE))
        _wait_with_progress(namespace)
    print(f"\n$ kubectl get imodel -n {NAMESPACE}\n{namespace.kubectl('get', 'imodel')}")
    base_url = client.service_url("demo")
    _ask(client)
    environment = f"export KUBECONFIG={shlex.quote(host_kubeconfig())}"
    print(f"""
Total time: {time.monotonic() - began:.0f} s. The cluster keeps running. Inspect it:

  {environment}
  alias kubectl={tools.program("kubectl")}
  kubectl describe imodel demo -n {NAMESPACE}
  kubectl get pods -n {NAMESPACE} -o wide
  curl {base_url}/v1/models
  .venv/bin/minisgl chat {base_url}

Stop and remove it:  make demo-down""")


def _wait_with_progress(namespace: Namespace) -> None:
    """Wait until the model is Ready; print each change of the Ready condition."""
    shown = ""

    def ready() -> bool:
        nonlocal shown
        condition = namespace.condition("demo", "Ready")
        words = f"{condition.get('reason', 'Pending')}: {condition.get('message', 'no status yet')}"
        if words != shown:
            shown = words
            print(f"    {words}", flush=True)
        return condition.get("status") == "True"

    namespace.wait("the model to be Ready; see `kubectl describe imodel demo -n demo`", ready)


def _ask(client: ClientPod) -> None:
    print(f"Question from a pod of the cluster to http://demo.{NAMESPACE}.svc/v1:\n\n> {QUESTION}\n")
    stream = client.openai("demo").chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        temperature=0,
        max_tokens=120,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(main())
