"""Offline inference: the runtime in the caller's process, without a server."""

from minisgl.offline.llm import LLM
from minisgl.offline.outputs import Logprob, OfflineError, Output, Usage
from minisgl.wire.text import StructuredOutput

__all__ = ["LLM", "Logprob", "OfflineError", "Output", "StructuredOutput", "Usage"]
