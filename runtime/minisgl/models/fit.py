"""Engine options that cannot fit a model or a device, as far as it is known without loading anything."""

from __future__ import annotations

from minisgl.config import EngineConfig
from minisgl.errors import ModelError
from minisgl.kv_layout import PoolPages
from minisgl.models.config import ModelConfig


def check_fit(model: ModelConfig, engine: EngineConfig, memory: int | None) -> None:
    """Raise ModelError for options that no start can succeed with. `memory`: bytes of the device of each rank; None:
    unknown."""
    model.check_tensor_parallel(engine.tensor_parallel)
    max_model_len = engine.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ModelError("max_model_len_too_large", too_long(model, max_model_len))
    model.check_length(max_model_len)
    if engine.num_pages is None:
        return
    layout = model.kv_layout(engine, max_model_len)
    tokens = engine.num_pages * layout.page_size
    if engine.max_model_len is not None and tokens < engine.max_model_len:
        raise ModelError("kv_pool_too_small", pool_too_small(tokens, engine.max_model_len))
    needed = layout.pool_bytes(PoolPages(engine.num_pages, layout.window_pages(engine.num_pages)))
    if memory is not None and needed > memory:
        raise ModelError(
            "out_of_memory",
            f"--num-pages {engine.num_pages} needs {needed / 2**30:,.1f} GiB for the KV pool of a rank, and there are "
            f"{memory / 2**30:,.1f} GiB for all of it; use fewer pages, or leave the flag out to fill the memory",
        )


def too_long(model: ModelConfig, max_model_len: int) -> str:
    """Message about a length beyond the model's."""
    return (
        f"--max-model-len {max_model_len} exceeds the model's limit of {model.max_model_len} tokens; "
        "lower it, or extend the model with --hf-overrides (YaRN) if its authors say so"
    )


def pool_too_small(tokens: int, max_model_len: int) -> str:
    """Message about a KV pool that is smaller than one sequence."""
    return (
        f"the KV pool holds {tokens} tokens, fewer than --max-model-len {max_model_len}; lower it, or "
        "give the pool more memory (--num-pages, --memory-fraction, --tp; recurrent states: a lower --max-running)"
    )
