"""Memory of a draft head beside the KV pool of its target."""

from __future__ import annotations

from dataclasses import replace

from minisgl.attention.backend import AttentionShape
from minisgl.attention.select import KVGroup
from minisgl.engine.drafting import Drafting
from minisgl.engine.start import kv_pool
from minisgl.engine.tables import Tables
from minisgl.kernels.attention.stored_kv import KVScales
from minisgl.kv_layout import PoolPages
from minisgl.models.decoder import Decoder
from minisgl.models.drafter import Drafter, DrafterConfig


def context_group(of: DrafterConfig, target: AttentionShape) -> KVGroup:
    """Contexts of a draft head beside the pages of its target."""
    attention = of.attention
    shape = replace(
        target,
        query_heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        kv_dtype=None,
    )
    return KVGroup(shape, tuple(range(of.model.num_layers)))


def new_drafting(
    drafter: Drafter, target: Decoder, shape: AttentionShape, tables: Tables, pages: PoolPages, *, audit: bool
) -> Drafting:
    """A draft head with room for the contexts of `pages`. `shape`: that of its target. Raises EngineError when the
    memory is not available."""
    group = context_group(drafter.config, shape)
    scales = [KVScales()] * len(group.layers)
    contexts = kv_pool.allocate([group], scales=scales, pages=pages, audit=audit)
    return Drafting(drafter, target, contexts.groups[0], tables)
