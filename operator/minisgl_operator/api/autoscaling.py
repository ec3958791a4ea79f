"""spec.autoscaling: the number of replicas follows the load."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic import Field

from minisgl_operator.api.base import ApiModel, Integer, Rule

_MOST: Final = 1000


class ScaleTarget(ApiModel):
    """Load that one replica shall have: exactly one of the fields."""

    queue_time_ms: Integer | None = Field(default=None, ge=1, le=3_600_000)
    """Mean time for which requests wait in the engine's queue, in milliseconds."""
    running_per_replica: Integer | None = Field(default=None, ge=1, le=1_000_000)
    """Requests that run or wait, divided by the number of replicas."""
    kv_cache_usage: Integer | None = Field(default=None, ge=1, le=100)
    """Part of the KV cache that requests use, in percent."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.queueTimeMs), has(self.runningPerReplica), has(self.kvCacheUsage)]"
            ".filter(present, present).size() == 1",
            message="set exactly one of queueTimeMs, runningPerReplica and kvCacheUsage",
            holds=lambda target: (
                [target.queue_time_ms, target.running_per_replica, target.kv_cache_usage].count(None) == 2
            ),
        ),
    )


class Autoscaling(ApiModel):
    """Limits and target of the number of replicas."""

    min_replicas: Integer = Field(default=1, ge=0, le=_MOST)
    """Minimum number of replicas, with which a new model begins. With 0 an idle model has no engine pods, and the first
    request starts it."""
    max_replicas: Integer = Field(ge=1, le=_MOST)
    """Maximum number of replicas."""
    target: ScaleTarget
    """Load that one replica shall have: exactly one of queueTimeMs, runningPerReplica and kvCacheUsage."""
    scale_down_delay_seconds: Integer = Field(default=300, ge=0, le=86_400)
    """Time for which fewer replicas must suffice before replicas are removed, in seconds."""
    idle_seconds_to_zero: Integer = Field(default=900, ge=1, le=604_800)
    """Time without a request after which a model with minReplicas 0 has no replica, in seconds. Every frontend must
    report it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas exceeds maxReplicas: lower one, or raise the other",
            field=".minReplicas",
            holds=lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )
