"""The attention of a layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.attention.interface import Attention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotation import Rotation, rotate
from minisgl.kernels.pointwise.norm import rms_norm
from minisgl.kernels.pointwise.output_gate import open_heads
from minisgl.layers.linear import ColumnParallelLinear, stacked
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import Rotary
from minisgl.layers.weights.inputs import PreNorm
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.norms import norm_before
from minisgl.models.blocks.output import new_output
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import AttentionConfig, QueryGrowth, attentions


class SelfAttention:
    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of, names = config.layers[layer].attention, config.decoder.names
        assert isinstance(of, AttentionConfig)
        block = f"model.layers.{layer}.{names.attention}"
        self._layer = len(attentions(config.layers[:layer]))
        """Number among the layers with keys and values."""
        self._config = of
        self._norm_kind = config.decoder.norm
        self._parallel = parallel
        local = parallel.shard(of.num_heads), local_kv_heads(of, parallel), local_kv_heads(of, parallel)
        self._sinks = None
        if of.sinks:
            self._sinks = parameters.new(length_of(local[0]))
            parameters.add_source(f"{block}.sinks", (of.num_heads,), self._sinks, local[0])
        order = None if of.rope is None else of.rope.order(of.head_dim)
        parts = 1 if of.reuses_kv else 2 if of.key_is_value else 3
        assert order is None or not of.key_is_value, "values have the checkpoint's order of dimensions"
        self._heads = [length_of(each) for each in local[:parts]]
        # A gate stands behind the queries of each head.
        rows_of_query, query_order = of.head_dim, order
        if of.output_gate:
            self._heads[0] *= 2
            rows_of_query *= 2
            query_order = None if order is None else (*order, *range(of.head_dim, rows_of_query))
        self.norm = norm_before(config, parameters, layer, names.attention_norm)
        self.qkv = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            stacked(
                f"{block}.{names.fused_qkv}" if names.fused_qkv else None,
                [
                    Projection(f"{block}.{part}_proj", heads * size, _scaled(rows, size), of_part)
                    for part, heads, size, rows, of_part in zip(
                        "qkv",
                        (of.num_heads, of.num_kv_heads, of.num_kv_heads),
                        (rows_of_query, of.head_dim, of.head_dim),
                        local,
                        (query_order, order, None),
                        strict=True,
                    )
                ][:parts],
            ),
            bias=of.qkv_bias,
        )
        self.q_norm, self.k_norm = (
            _head_gain(parameters, f"{block}.{name}.weight", of, heads, rows, order) if is_there else None
            for name, heads, rows, is_there in (
                (names.query_norm, of.num_heads, local[0], True),
                (names.key_norm, of.num_kv_heads, local[1], not of.reuses_kv),
            )
        )
        out = f"{block}.{names.attention_output}"
        width = of.num_heads * of.head_dim
        self.out = new_output(config, parallel, parameters, layer, out, width, bias=of.output_bias)
        self._norms_in_kernel = (
            of.query_key_norm == "head" and not (of.norm_after_rotation or of.reuses_kv)
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, then keep only `rows` if given."""
        qkv, residual = self.qkv.weight.normed_product(PreNorm(self.norm, x, residual), self.qkv.bias)
        q, *stored = torch.split(qkv.view(len(qkv), -1, self._config.head_dim), self._heads, dim=1)
        k, v = (stored[0], stored[-1]) if stored else (None, None)
        gate = None
        if self._config.output_gate:
            queries, gates = q.unflatten(1, (-1, 2)).unbind(2)
            q, gate = queries, gates
        if v is not None and self._config.value_norm:
            v = rms_norm(v, None, self._norm_kind.eps)
        q, k, rotation = self._prepared(q, k, angles)
        heads = attention.attend(self._layer, q, k, v, rotation, self._sinks)
        if gate is not None:
            heads = open_heads(heads, gate)
        if rows is not None:
            heads, residual = heads[rows], residual[rows]
        return self.out.forward(heads), residual

    def _prepared(
        self, q: torch.Tensor, k: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor | None, Rotation]:
        """Queries and keys as the kernel that rotates and stores them takes them: all that it does not do is done."""
        of, kind = self._config, self._norm_kind
        cos_sin = angles.of(of.rope, of.head_dim)
        if of.query_growth is not None:
            q = q * angles.growth(of.query_growth).to(q.dtype)
        if self._norms_in_kernel:
            return q, k, Rotation(cos_sin, self.q_norm, self.k_norm, kind.eps, kind.unit_offset, kind.round_last)
        if self.q_norm is None:
            return q, k, Rotation(cos_sin)
        if k is None or self.k_norm is None:
            assert of.query_key_norm == "head" and not of.norm_after_rotation
            return self._head_norm(q, self.q_norm), None, Rotation(cos_sin)
        if of.norm_after_rotation:
            q, k, cos_sin = rotate(q, cos_sin), rotate(k, cos_sin), angles.of(None, of.head_dim)
        if of.query_key_norm == "head":
            q, k = self._head_norm(q, self.q_norm), self._head_norm(k, self.k_norm)
        else:
            q, k = self._whole_norms(q, k, self.q_norm, self.k_norm)
        return q, k, Rotation(cos_sin)

    def _head_norm(self, part: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        kind = self._norm_kind
        return rms_norm(part, gain, kind.eps, unit_offset=kind.unit_offset, round_last=kind.round_last)

    def _whole_norms(
        self, q: torch.Tensor, k: torch.Tensor, q_gain: torch.Tensor, k_gain: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize the queries of all heads together, and the keys."""
        of, ranks = self._config, self._parallel.size
        wide = q.float().flatten(1), k.float().flatten(1)
        sums = torch.stack([part.square().sum(-1) for part in wide], dim=-1)
        # Ranks beyond the number of KV heads hold the same ones.
        copies = max(1, ranks // of.num_kv_heads)
        sums[:, 1] /= of.num_kv_heads * of.head_dim * copies
        sums[:, 0] /= of.num_heads * of.head_dim
        if ranks > 1:
            sums = self._parallel.all_reduce_sum(sums)
        scales = torch.rsqrt(sums + self._norm_kind.eps)
        normed_q, normed_k = (
            _apply_gain(part * scales[:, i, None], gain, q.dtype, round_last=self._norm_kind.round_last)
            for i, (part, gain) in enumerate(zip(wide, (q_gain, k_gain), strict=True))
        )
        return normed_q.view_as(q), normed_k.view_as(k)


class Angles:
    """Angles of the tokens of a step, for all layers."""

    def __init__(self, rotary: Mapping[tuple[RopeConfig | None, int], Rotary], positions: torch.Tensor) -> None:
        """`rotary`: by RoPE and size of the heads."""
        self._cos_sin = {key: table.at(positions) for key, table in rotary.items()}
        self._positions = positions

    def of(self, rope: RopeConfig | None, head_dim: int) -> torch.Tensor:
        """[T, head_dim], see `Rotary.at`."""
        return self._cos_sin[rope, head_dim]

    def growth(self, growth: QueryGrowth) -> torch.Tensor:
        """[T, 1, 1] float32: factor of each token's queries."""
        steps = torch.floor(self._positions.float() / growth.original_max_position)
        return (1 + growth.beta * torch.log(1 + steps))[:, None, None]


def _head_gain(
    parameters: Parameters,
    name: str,
    of: AttentionConfig,
    heads: int,
    local: slice,
    order: tuple[int, ...] | None,
) -> torch.Tensor | None:
    """Gain of the norm of queries or keys: [head_dim], or that of this rank's heads one after the other."""
    if of.query_key_norm is None:
        return None
    if of.query_key_norm == "head":
        gain = parameters.new(of.head_dim)
        parameters.add_source(name, (of.head_dim,), gain, order=order)
        return gain
    rows = _scaled(local, of.head_dim)
    gain = parameters.new(length_of(rows))
    parameters.add_source(name, (heads * of.head_dim,), gain, rows, order=order)
    return gain


def _apply_gain(normed: torch.Tensor, gain: torch.Tensor, dtype: torch.dtype, *, round_last: bool) -> torch.Tensor:
    return (normed * gain.float()).to(dtype) if round_last else gain * normed.to(dtype)


def local_kv_heads(of: AttentionConfig, parallel: TensorParallel) -> slice:
    """KV heads that this rank's query heads read. With fewer KV heads than ranks, neighbours hold the same head."""
    if parallel.size <= of.num_kv_heads:
        return parallel.shard(of.num_kv_heads)
    head = parallel.rank * of.num_kv_heads // parallel.size
    return slice(head, head + 1)


def _scaled(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)


def length_of(part: slice) -> int:
    return int(part.stop - part.start)
