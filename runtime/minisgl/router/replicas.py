"""The replicas that a worker is connected to: which of them can take a request, and why the others cannot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

from minisgl.router.routing import PrefixIndex
from minisgl.wire.messages import WIRE_VERSION, ModelCard, Status, Welcome
from minisgl.wire.status import ReplicaView

STALE_SECONDS: Final = 5.0
"""Who has said nothing for so long gets nothing new; a scheduler speaks ten times a second."""

NOT_GREETED: Final = "it has not answered yet"


class Replica:
    """What is behind one address: what it has said, and how much was sent there from here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        """None before it has answered, and after its loss."""
        self.before: Welcome | None = None
        """What it said before its loss: it is probably still the same."""
        self.status: Status | None = None
        self.heard = 0.0
        self.reason = NOT_GREETED
        """Why there is no welcome."""
        self.refuses = False
        """It has said that it drains, and its status may still be of before."""
        self.in_flight = 0
        """Requests of this worker."""
        self.seen = PrefixIndex()
        self.sent_since_status = 0

    @property
    def name(self) -> str:
        """The replica's own, or the address where it has not said."""
        known = self.welcome or self.before
        return (known.replica if known is not None else "") or self.address

    @property
    def hashes(self) -> Mapping[str, str]:
        return self.welcome.model.tokenizer_hashes if self.welcome is not None else {}

    @property
    def draining(self) -> bool:
        return self.refuses or (self.status is not None and self.status.draining)

    @property
    def load(self) -> int:
        """Requests that it runs or that wait there, of all frontends, with those that its status cannot know of."""
        known = 0 if self.status is None else self.status.running + self.status.waiting
        return max(self.in_flight, known + self.sent_since_status)

    def sent(self, chain: tuple[int, ...]) -> None:
        """A request with this prompt was sent there."""
        self.in_flight += 1
        self.sent_since_status += 1
        self.seen.add(chain)


class Replicas:
    """By address. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.files: Mapping[str, str] | None = None
        """Hashes of the tokenizer files in use."""
        self._loaded: Sequence[Mapping[str, str]] = ()
        """Hashes of those that could be in use at once."""
        self._by_address: dict[str, Replica] = {}
        self.changes = 0
        """How often it may have become another question who can take a request."""
        self._routable: list[Replica] | None = None
        """None: to be worked out again."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_address.values())

    def __getitem__(self, address: str) -> Replica:
        return self._by_address[address]

    def __contains__(self, address: str) -> bool:
        return address in self._by_address

    def add(self, address: str) -> None:
        assert address not in self._by_address
        self._by_address[address] = Replica(address)

    def remove(self, address: str) -> None:
        assert not self._by_address[address].in_flight, "its requests must go elsewhere first"
        del self._by_address[address]
        self._change()

    def use_files(self, hashes: Mapping[str, str]) -> None:
        """Those of the tokenizer files in use from now on: who has others cannot be understood."""
        self.files = hashes
        self._change()

    def have_loaded(self, kinds: Sequence[Mapping[str, str]]) -> None:
        """Those of all tokenizer files that are loaded."""
        self._loaded = kinds
        self._change()

    def welcome(self, address: str, welcome: Welcome) -> None:
        assert not self[address].in_flight, "requests of an earlier start are gone"
        replica = self._by_address[address] = Replica(address)
        replica.welcome = welcome
        replica.heard = self.now
        self._change()

    def status(self, address: str, status: Status) -> None:
        replica = self[address]
        if replica.status is None or replica.draining != status.draining or self.silence(replica) > STALE_SECONDS:
            self._change()
        replica.status = status
        replica.heard = self.now
        replica.sent_since_status = 0

    def refuses(self, address: str) -> None:
        """It has said that it drains; its next status may still be of before."""
        self[address].refuses = True
        self._change()

    def lost(self, address: str, reason: str) -> None:
        before = self[address].welcome or self[address].before
        replica = self._by_address[address] = Replica(address)
        replica.before = before
        replica.reason = reason
        self._change()

    def tick(self) -> None:
        """Time has passed: some may have been silent for too long."""
        self._change()

    def silence(self, replica: Replica) -> float:
        return self.now - replica.heard

    @property
    def routable(self) -> list[Replica]:
        """Those that can take a request now."""
        if self._routable is None:
            latest = self._latest()
            self._routable = [replica for replica in self if not self._problem(replica, latest)]
        return self._routable

    def card(self) -> tuple[ModelCard, tuple[int, int]] | None:
        """The model as it is served now, and the latest start of an engine; None while nobody can serve it. Where
        replicas differ in the longest sequence, the shortest of them is what can be promised."""
        welcomes = [replica.welcome for replica in self.routable if replica.welcome is not None]
        if not welcomes:
            return None
        card = min((welcome.model for welcome in welcomes), key=lambda model: model.max_model_len)
        return card, max(welcome.epoch for welcome in welcomes)

    def missing_files(self) -> list[Mapping[str, str]]:
        """Hashes of the tokenizer files to load: those of all who could take requests with them, of most first."""
        kinds = self._able_kinds()
        missing = [hashes for i, hashes in enumerate(kinds) if hashes not in self._loaded and hashes not in kinds[:i]]
        return sorted(missing, key=lambda hashes: (-kinds.count(hashes), sorted(hashes.items())))

    def wanted_files(self) -> Mapping[str, str] | None:
        """Hashes of the tokenizer files to change to: those, of the loaded ones, with which most replicas can take
        requests, if these are more than with those in use. None: stay."""
        kinds = self._able_kinds()
        best = max(self._loaded, key=lambda hashes: (kinds.count(hashes), sorted(hashes.items())), default=None)
        in_use = 0 if self.files is None else kinds.count(self.files)
        return None if best is None or kinds.count(best) <= in_use else best

    def with_files(self, hashes: Mapping[str, str]) -> list[str]:
        """Addresses of those who have these."""
        return [replica.address for replica in self if replica.hashes == hashes]

    def states(self) -> tuple[ReplicaView, ...]:
        """What is known of each, by name."""
        latest = self._latest()
        return tuple(
            _state(replica, self._problem(replica, latest), self._waits_for_files(replica, latest))
            for replica in sorted(self, key=lambda replica: (replica.name, replica.address))
        )

    def total_status(self) -> Status | None:
        """Of all replicas together: their sums. Counters of one that goes away go with it, as at a restart."""
        statuses = [replica.status for replica in self if replica.status is not None]
        if len(statuses) < 2:
            return statuses[0] if statuses else None
        return Status(**{name: _together(name, [getattr(status, name) for status in statuses]) for name in _FIGURES})

    def _change(self) -> None:
        self._routable = None
        self.changes += 1

    def _problem(self, replica: Replica, latest: _Latest) -> str:
        """Why it gets nothing new; empty when it can."""
        if problem := self._unable(replica, latest):
            return problem
        if self.files is None:
            return "the tokenizer files are not loaded yet"
        if differing := _differing(replica.hashes, self.files):
            return f"its tokenizer files differ from those in use ({', '.join(differing)})"
        return ""

    def _unable(self, replica: Replica, latest: _Latest) -> str:
        """Why it could get nothing new whichever files were in use; empty when it could."""
        if problem := _unusable(replica, latest):
            return problem
        if replica.draining:
            return "it is draining"
        if (silence := self.silence(replica)) > STALE_SECONDS:
            return f"it has said nothing for {silence:.0f} s"
        return ""

    def _waits_for_files(self, replica: Replica, latest: _Latest) -> bool:
        if self.files is None or replica.hashes == self.files:
            return False
        return replica.hashes in self._loaded and not self._unable(replica, latest)

    def _able_kinds(self) -> list[Mapping[str, str]]:
        """Hashes of the tokenizer files of each replica that could take requests with them."""
        latest = self._latest()
        return [replica.hashes for replica in self if not self._unable(replica, latest)]

    def _latest(self) -> _Latest:
        latest: dict[str, tuple[tuple[int, int], str]] = {}
        for replica in self:
            if replica.welcome is not None:
                start = (replica.welcome.epoch, replica.address)
                latest[replica.name] = max(start, latest.get(replica.name, start))
        return latest


_Latest: TypeAlias = "Mapping[str, tuple[tuple[int, int], str]]"
"""By name of a replica, epoch and address of its latest start. Of two addresses with one start either will do."""

_FIGURES: Final = Status.__struct_fields__


def _together(name: str, values: list[Any]) -> Any:
    """One figure of several statuses as one."""
    if name == "page_size":
        return values[0]
    if name == "draining":
        return all(values)
    if name == "start_seconds":
        # Replicas start beside each other: of each phase the slowest.
        return {phase: max(each.get(phase, 0.0) for each in values) for phase in dict.fromkeys(chain(*values))}
    if isinstance(values[0], tuple):
        # Histograms, where they were said.
        return tuple(map(sum, zip(*filter(None, values), strict=False)))
    return sum(values)


def _unusable(replica: Replica, latest: _Latest) -> str:
    """Why it can never take anything as it is."""
    welcome = replica.welcome
    if welcome is None:
        return replica.reason
    if welcome.version not in (WIRE_VERSION, WIRE_VERSION - 1):
        return f"it speaks wire version {welcome.version}, not {WIRE_VERSION}: update the older side"
    if not replica.hashes:
        return "it does not say which tokenizer files it has: start it from a checkpoint that has some"
    if latest[replica.name] != (welcome.epoch, replica.address):
        return "another address is the same replica, started later"
    return ""


def _differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    return sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))


def _state(replica: Replica, problem: str, waits_for_files: bool) -> ReplicaView:
    known, status = replica.welcome or replica.before, replica.status
    return ReplicaView(
        replica="" if known is None else known.replica,
        revision="" if known is None else known.revision,
        epoch=(0, 0) if known is None else known.epoch,
        address=replica.address,
        routable=not problem,
        reason=problem,
        waits_for_files=waits_for_files,
        running=0 if status is None else status.running,
        waiting=0 if status is None else status.waiting,
    )
