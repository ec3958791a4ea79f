"""How tools judge an InferenceModel: kstatus (Flux, Helm, kpt), and the health check for Argo CD.

The rules of kstatus are those for kinds that it does not know, of sigs.k8s.io/cli-utils v0.37.2, pkg/kstatus/status:
deletion, then the observed generation, then the first condition of `RULES` that is True, then Ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from lupa import LuaRuntime

Health = Literal["Terminating", "InProgress", "Failed", "Current"]

RULES: Final[Mapping[str, Health]] = {"Reconciling": "InProgress", "Stalled": "Failed"}
READY: Final[Mapping[str, Health]] = {"True": "Current", "False": "InProgress", "Unknown": "InProgress"}
ARGO_CD: Final = Path(__file__).parents[3] / "charts" / "health" / "argocd.lua"


def kstatus(live: Mapping[str, Any]) -> Health:
    """The status of a live object."""
    metadata, status = live["metadata"], live.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != metadata.get("generation"):
        return "InProgress"
    conditions = status.get("conditions") or ()
    for condition in conditions:
        if condition["type"] in RULES and condition["status"] == "True":
            return RULES[condition["type"]]
    ready = next((condition["status"] for condition in conditions if condition["type"] == "Ready"), None)
    return "Current" if ready is None else READY[ready]


def argo_cd(live: Mapping[str, Any]) -> tuple[str, str]:
    """Status and message of the health check."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(live, recursive=True)
    health = lua.execute(ARGO_CD.read_text())
    return str(health["status"]), str(health["message"])
