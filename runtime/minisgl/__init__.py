"""minisgl: an LLM serving runtime with an OpenAI endpoint, on one machine or on Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from minisgl.offline import LLM
    from minisgl.wire.messages import SamplingParams


def __getattr__(name: str) -> Any:
    """Import the public classes on first use: `import minisgl` must stay free of torch."""
    if name == "LLM":
        from minisgl.offline import LLM

        return LLM
    if name == "SamplingParams":
        from minisgl.wire.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
