"""Which replica ends its drain early, because requests wait that no other replica can take. Pure.

The only replica of a model refuses new requests while it drains, for minutes if it has long answers, and its successor
may come only when it has gone. Its answers can go on there, so it need not complete them.
"""

from __future__ import annotations

from typing import Final

from minisgl.router.replicas import Replica, Replicas

END_DRAIN_SECONDS: Final = 5.0
"""Time for which requests wait before a drain ends early. Most answers are shorter, and end without a pause; and the
operator, which probes frontends every 3 s, has said by then if the model is suspended."""
MAX_START_SHARE: Final = 0.5
"""Share of the time for which answers may wait that a start may take. The rest is for the pod: its exit, scheduling and
image."""


class DrainEnds:
    """Decides with each tick. One drain ends at a time, so that no more answers pause than necessary."""

    def __init__(self, queue_seconds: float, drain_seconds: float) -> None:
        """Answers of a replica may wait for the rest of its drain, which takes at most `drain_seconds`, and at least
        for `queue_seconds`."""
        self._queue_seconds = queue_seconds
        self._drain_seconds = drain_seconds
        self._since: float | None = None
        """Time since which requests wait in vain, or of the end of a drain after that; None: they do not."""
        self._draining: set[str] = set()
        """Addresses of the replicas that drained at the last tick."""

    def next_replica(self, replicas: Replicas, *, requests_wait: bool) -> Replica | None:
        """Return the replica that ends its drain now: the one with the fewest requests. The next one follows when
        requests wait as long again. None: no drain ends.

        A replica that serves needs none of that, even if its tokenizer files are still being loaded. Nor does one end
        whose start takes so long that its answers would fail meanwhile."""
        draining = {each.address for each in replicas if each.draining}
        # Another worker has ended the drain, or it is over: its successor comes.
        one_has_gone = not self._draining <= draining
        self._draining = draining
        if not requests_wait or replicas.accepting:
            self._since = None
            return None
        if self._since is None or one_has_gone:
            self._since = replicas.now
        if replicas.now - self._since < END_DRAIN_SECONDS:
            return None
        able = [each for each in replicas if each.can_end_drain and self._starts_in_time(each, replicas.now)]
        if not able:
            return None
        self._since = replicas.now
        return min(able, key=lambda replica: (replica.load, replica.name))

    def wait_seconds(self, replica: Replica, now: float) -> float:
        """Return how long the requests of a replica may wait for another one if it is lost now."""
        left = 0.0 if replica.drains_since is None else replica.drains_since + self._drain_seconds - now
        return max(self._queue_seconds, left)

    def _starts_in_time(self, replica: Replica, now: float) -> bool:
        return replica.start_seconds <= self.wait_seconds(replica, now) * MAX_START_SHARE
