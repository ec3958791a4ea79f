"""The replicas that a worker is connected to: which of them can take a request, and why the others cannot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, auto
from itertools import chain
from typing import Any, Final, TypeAlias

from minisgl.router.ended_totals import EndedTotals, Start, add_counters, sum_of
from minisgl.router.queue_times import QueueTimes
from minisgl.router.routing import PrefixIndex
from minisgl.tokenizer.file_hashes import differing_files
from minisgl.wire.messages import FEATURES, WIRE_VERSION, ModelCard, Status, Welcome
from minisgl.wire.status import ReplicaView

STALE_SECONDS: Final = 5.0
"""A replica of a cluster that has sent nothing for this long gets no new requests; a scheduler sends its status ten
times a second."""

NO_WELCOME_YET: Final = "it has not answered yet"

FileHashes: TypeAlias = "Mapping[str, str]"
"""Name → sha256 of each file of a set of tokenizer files."""


class State(IntEnum):
    """State of one address as its router sees it; see docs/glossary.md. The later, the nearer to taking requests."""

    CONNECTING = auto()
    LOST = auto()
    INCOMPATIBLE = auto()
    DRAINING = auto()
    STALE = auto()
    ACCEPTING = auto()
    AWAITING_FILES = auto()
    ROUTABLE = auto()


class Replica:
    """One address: the last messages from it, and the load that this worker has put on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        """None before the first one, and after a loss."""
        self.last_welcome: Welcome | None = None
        """Welcome from before a loss: the next one is probably of the same replica."""
        self.lacks = frozenset(FEATURES)
        """Features of this version that the last welcome does not name."""
        self.status: Status | None = None
        self.queue_times = QueueTimes()
        self.last_message_at = 0.0
        self.reason = NO_WELCOME_YET
        """Reason why there is no welcome."""
        self.refused_as_draining = False
        """It has refused a request as draining, and its status may be older than that."""
        self.drains_since: float | None = None
        self.ends_drain = False
        """It was told to end its drain."""
        self.in_flight = 0
        """Requests of this worker."""
        self.prefixes = PrefixIndex()
        self.sent_since_status = 0

    @property
    def known(self) -> Welcome | None:
        return self.welcome or self.last_welcome

    @property
    def name(self) -> str:
        """Name of the replica, or the address of one that has no name."""
        return (self.known.replica if self.known is not None else "") or self.address

    @property
    def can_end_drain(self) -> bool:
        """It drains, and would end that early if it was told to."""
        knows = self.welcome is not None and "end_drain" not in self.lacks
        return knows and self.draining and not self.ends_drain

    @property
    def start_seconds(self) -> float:
        """Duration of its last start; 0: not reported."""
        return 0.0 if self.status is None else sum(self.status.start_seconds.values())

    @property
    def hashes(self) -> FileHashes:
        return self.welcome.model.tokenizer_hashes if self.welcome is not None else {}

    @property
    def draining(self) -> bool:
        return self.refused_as_draining or (self.status is not None and self.status.draining)

    @property
    def load(self) -> int:
        """Requests of all frontends that run or wait there, those included that its status cannot know of."""
        known = 0 if self.status is None else self.status.running + self.status.waiting
        return max(self.in_flight, known + self.sent_since_status)

    def sent(self, blocks: tuple[int, ...]) -> None:
        """Count a request that was sent there, with the block hashes of its prompt."""
        self.in_flight += 1
        self.sent_since_status += 1
        self.prefixes.add(blocks)


class Replicas:
    """Replicas by address. Times are seconds on the caller's clock."""

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self.now = 0.0
        self.files: FileHashes | None = None
        """Tokenizer files in use."""
        self.changes = 0
        """Counts the moments at which it may have changed which replicas can take requests."""
        self.statuses = 0
        """Counts the statuses that were received."""
        self._stale_seconds = stale_seconds
        self._loaded: Sequence[FileHashes] = ()
        """Tokenizer files that are loaded and can be switched to immediately."""
        self._by_address: dict[str, Replica] = {}
        self._ended = EndedTotals()
        self._assessed: list[tuple[Replica, State, str]] | None = None
        """State of each replica and the reason why it is not routable; None: must be computed again."""
        self._routable: list[Replica] = []
        self._accepting: list[Replica] = []

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_address.values())

    def __getitem__(self, address: str) -> Replica:
        return self._by_address[address]

    def __contains__(self, address: str) -> bool:
        return address in self._by_address

    def add(self, address: str) -> None:
        assert address not in self._by_address
        self._by_address[address] = Replica(address)
        self._change()

    def remove(self, address: str) -> None:
        assert not self._by_address[address].in_flight, "its requests must be resubmitted first"
        self._keep_totals(address)
        del self._by_address[address]
        self._change()

    def set_files_in_use(self, hashes: FileHashes) -> None:
        """Use these tokenizer files: replicas with others cannot take requests."""
        self.files = hashes
        self._change()

    def set_loaded_files(self, file_sets: Sequence[FileHashes]) -> None:
        """Set all tokenizer files that are loaded."""
        self._loaded = file_sets
        self._change()

    def welcome(self, address: str, welcome: Welcome) -> None:
        assert not self[address].in_flight, "requests of an earlier start were taken away"
        self._keep_totals(address)
        replica = self._by_address[address] = Replica(address)
        replica.welcome = welcome
        replica.lacks = frozenset(FEATURES).difference(welcome.features)
        replica.last_message_at = self.now
        self._change()

    def status(self, address: str, status: Status) -> None:
        replica = self[address]
        if replica.status is None or replica.draining != status.draining or self.is_stale(replica):
            self._change()
        replica.status = status
        self._note_drain(replica)
        replica.queue_times.add(status, self.now)
        replica.last_message_at = self.now
        replica.sent_since_status = 0
        self.statuses += 1

    def mark_draining(self, address: str) -> None:
        """It has refused a request as draining; its next status may be older than that."""
        self[address].refused_as_draining = True
        self._note_drain(self[address])
        self._change()

    def lost(self, address: str, reason: str) -> None:
        self._keep_totals(address)
        known, lacks = self[address].known, self[address].lacks
        replica = self._by_address[address] = Replica(address)
        replica.last_welcome, replica.lacks = known, lacks
        replica.reason = reason
        self._change()

    def tick(self) -> None:
        """Time has passed: replicas may be stale now."""
        if any(self.is_stale(replica) for replica in self if replica.welcome is not None):
            self._change()

    def silence(self, replica: Replica) -> float:
        """Seconds since its last message."""
        return self.now - replica.last_message_at

    def is_stale(self, replica: Replica) -> bool:
        return self.silence(replica) > self._stale_seconds

    @property
    def routable(self) -> list[Replica]:
        """Replicas that can take a request now."""
        self._assess()
        return self._routable

    @property
    def accepting(self) -> list[Replica]:
        """Replicas that can take a request now whose token ids belong to their own tokenizer files."""
        self._assess()
        return self._accepting

    def engine_info(self) -> tuple[ModelCard, tuple[int, int]] | None:
        """Return the served model and the latest epoch; None while no replica can take requests. Where
        replicas differ in the longest sequence, the shortest of them is the one that can be promised."""
        welcomes = [replica.welcome for replica in self.routable if replica.welcome is not None]
        if not welcomes:
            return None
        card = min((welcome.model for welcome in welcomes), key=lambda model: model.max_model_len)
        return card, max(welcome.epoch for welcome in welcomes)

    def files_to_load(self) -> list[FileHashes]:
        """Return the tokenizer files of accepting replicas that are not loaded, those of most replicas first."""
        file_sets = self._files_of_accepting()
        missing = [one for i, one in enumerate(file_sets) if one not in self._loaded and one not in file_sets[:i]]
        return sorted(missing, key=lambda hashes: (-file_sets.count(hashes), sorted(hashes.items())))

    def files_to_switch_to(self) -> FileHashes | None:
        """Return the loaded tokenizer files with which most replicas can take requests, if these are more than with
        the files in use. None: keep those."""
        file_sets = self._files_of_accepting()
        best = max(self._loaded, key=lambda hashes: (file_sets.count(hashes), sorted(hashes.items())), default=None)
        in_use = 0 if self.files is None else file_sets.count(self.files)
        return None if best is None or file_sets.count(best) <= in_use else best

    def addresses_with_files(self, hashes: FileHashes) -> list[str]:
        return [replica.address for replica in self if replica.hashes == hashes]

    def views(self) -> tuple[ReplicaView, ...]:
        """Return a view of each replica, sorted by name."""
        return tuple(
            _view(*assessed)
            for assessed in sorted(self._assess(), key=lambda assessed: (assessed[0].name, assessed[0].address))
        )

    def aggregate_status(self) -> Status | None:
        """Return the sums over all replicas. Counters include those of starts that are gone."""
        reporting = [(replica, replica.status) for replica in self if replica.status is not None]
        statuses = [status for _, status in reporting]
        if not statuses:
            return None
        if len(statuses) > 1:
            columns = {name: [getattr(status, name) for status in statuses] for name in Status.__struct_fields__}
            statuses = [Status(**{name: _aggregate(name, values) for name, values in columns.items()})]
        ended = self._ended.without({_start(replica) for replica, _ in reporting})
        return add_counters(statuses[0], ended) if ended else statuses[0]

    def _note_drain(self, replica: Replica) -> None:
        if replica.draining and replica.drains_since is None:
            replica.drains_since = self.now

    def _keep_totals(self, address: str) -> None:
        replica = self[address]
        if replica.status is not None:
            self._ended.keep(_start(replica), replica.status)

    def _change(self) -> None:
        self._assessed = None
        self.changes += 1

    def _assess(self) -> list[tuple[Replica, State, str]]:
        if self._assessed is None:
            latest = self._latest_starts()
            self._assessed = [(replica, *self._state(replica, latest)) for replica in self]
            self._routable = [replica for replica, state, _ in self._assessed if state is State.ROUTABLE]
            self._accepting = [replica for replica, state, _ in self._assessed if state >= State.ACCEPTING]
        return self._assessed

    def _state(self, replica: Replica, latest: _Starts) -> tuple[State, str]:
        """State of a replica, and the reason why it is not routable."""
        welcome = replica.welcome
        if welcome is None:
            return State.CONNECTING if replica.last_welcome is None else State.LOST, replica.reason
        if welcome.version not in (WIRE_VERSION, WIRE_VERSION - 1):
            reason = f"its wire version is {welcome.version}, not {WIRE_VERSION}: update the older side"
            return State.INCOMPATIBLE, reason
        if not replica.hashes:
            reason = "it names no tokenizer files: start it from a checkpoint that has some"
            return State.INCOMPATIBLE, reason
        if latest[replica.name] != (welcome.epoch, replica.address):
            return State.INCOMPATIBLE, "another address is a later start of the same replica"
        if replica.draining:
            return State.DRAINING, "it is draining"
        if self.is_stale(replica):
            return State.STALE, f"it has sent nothing for {self.silence(replica):.0f} s"
        if self.files is None:
            return State.ACCEPTING, "the tokenizer files are not loaded yet"
        if differing := differing_files(replica.hashes, self.files):
            state = State.AWAITING_FILES if replica.hashes in self._loaded else State.ACCEPTING
            return state, f"its tokenizer files differ from those in use ({', '.join(differing)})"
        return State.ROUTABLE, ""

    def _files_of_accepting(self) -> list[FileHashes]:
        """Tokenizer files of each replica that could take requests with them."""
        return [replica.hashes for replica, state, _ in self._assess() if state >= State.ACCEPTING]

    def _latest_starts(self) -> _Starts:
        latest: dict[str, tuple[tuple[int, int], str]] = {}
        for replica in self:
            if replica.welcome is not None:
                start = (replica.welcome.epoch, replica.address)
                latest[replica.name] = max(start, latest.get(replica.name, start))
        return latest


_Starts: TypeAlias = "Mapping[str, tuple[tuple[int, int], str]]"
"""Epoch and address of a replica's latest start, by its name. Of two addresses with one epoch either will do."""


def _aggregate(name: str, values: list[Any]) -> Any:
    """Combine the values that several statuses have in one field."""
    if name == "page_size":
        return values[0]
    if name == "draining":
        return all(values)
    if name == "start_seconds":
        # Replicas start beside each other: the slowest counts, phase by phase.
        return {phase: max(each.get(phase, 0.0) for each in values) for phase in dict.fromkeys(chain(*values))}
    if name == "attention":
        kinds = dict.fromkeys(chain(*values))
        return {kind: ", ".join(sorted({each[kind] for each in values if kind in each})) for kind in kinds}
    if name == "data_types":
        return tuple(dict.fromkeys(chain(*values)))
    return sum_of(values) if name == "counters" else sum(values)


def _start(replica: Replica) -> Start:
    """Name and epoch of the start that the replica's status is of."""
    return replica.name, (0, 0) if replica.welcome is None else replica.welcome.epoch


def _view(replica: Replica, state: State, reason: str) -> ReplicaView:
    known, status = replica.known, replica.status
    return ReplicaView(
        replica="" if known is None else known.replica,
        revision="" if known is None else known.revision,
        epoch=(0, 0) if known is None else known.epoch,
        address=replica.address,
        routable=state is State.ROUTABLE,
        reason=reason,
        waits_for_files=state is State.AWAITING_FILES,
        running=0 if status is None else status.running,
        waiting=0 if status is None else status.waiting,
        queue_ms=replica.queue_times.mean_ms,
        kv_usage=status.used_pages / status.num_pages if status is not None and status.num_pages else None,
    )
