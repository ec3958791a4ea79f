"""The processes between clients and engines, the same beside an engine and in a pod of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minisgl.frontend.config import FrontendConfig
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import ProcessSpec
from minisgl.router.config import TokenizerConfig


def endpoint_groups(frontend: FrontendConfig, tokenizers: Sequence[TokenizerConfig]) -> list[GroupSpec]:
    """Each process a group of its own. A frontend that runs a tokenizer itself has no tokenizer process."""
    assert frontend.socket_fd is not None, "the launcher holds the socket, so that clients outlive a frontend"
    specs = [
        *(
            ProcessSpec(name=tokenizer.name, target="minisgl.launcher.roles:tokenizer", config=tokenizer)
            for tokenizer in tokenizers
            if frontend.tokenizer is None
        ),
        ProcessSpec(
            name="frontend",
            target="minisgl.launcher.roles:frontend",
            config=frontend,
            descriptors=(frontend.socket_fd,),
            drains=True,
            preload=("minisgl.frontend.process",),
        ),
    ]
    return [GroupSpec(name=spec.name, processes=partial(_same, spec)) for spec in specs]


def _same(spec: ProcessSpec, number: int) -> list[ProcessSpec]:
    return [spec]
