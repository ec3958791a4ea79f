"""Secrets with the tokens by which the pods of one model know one another, and their volume.

There are two, so that one can be replaced while pods know the other. The operator writes them, but cannot read them.
Their type keeps it from replacing Secrets of others, because the API server allows no change of a type.
"""

from __future__ import annotations

import base64
from typing import Any, Final

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names
from minisgl_operator.render.child import child

SLOTS: Final = ("a", "b")
DIRECTORY: Final = "/var/run/minisgl/peers"
"""Default of --peer-secret. No flag names it: an older image does not know the flag."""
_TYPE: Final = "serving.minisgl.io/peers"
_KEY: Final = "token"


def secret(model: InferenceModel, slot: str, token: str) -> Manifest:
    """The Secret of one slot. `token`: its public part, which pods report, a dot, and the rest."""
    data = {_KEY: base64.b64encode(token.encode()).decode()}
    return child(model, "v1", "Secret", names.peers(model.name, slot), names.PEERS, {"type": _TYPE, "data": data})


def volume(model: str) -> dict[str, Any]:
    """The tokens of a model, each in a file with the name of its slot. Pods start without them too, and get those that
    are created later."""
    sources = [
        {
            "secret": {
                "name": names.peers(model, slot),
                "items": [{"key": _KEY, "path": slot}],
                "optional": True,
            }
        }
        for slot in SLOTS
    ]
    return {"name": names.PEERS_VOLUME, "projected": {"sources": sources}}
