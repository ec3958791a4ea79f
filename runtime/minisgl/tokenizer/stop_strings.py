"""Stop strings: the end of an answer, and the text that is safe to send before it is known."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the earliest of several strings in a text that arrives in pieces.

    Only a suffix that is a proper prefix of some stop string is held back: everything before it can never become part
    of a match. The stop string itself is not part of the answer. The first complete match counts, and of several that
    end at the same character the longest, so the answer does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        self.matched: str | None = None
        """Stop string that was found."""

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Add text and return the part that is safe to send now; nothing after a match (`stopped`). Without `may_stop`
        stop strings are ordinary text."""
        if not self._stops:
            return piece
        if self.stopped or not piece:
            return ""
        # A match that is complete now ends in the new piece, and of the text before it only the held part matters. That
        # part may contain a whole shorter match, which arrived without `may_stop`.
        held, text = len(self._held), self._held + piece
        starts = ((stop, text.find(stop, max(held - len(stop) + 1, 0))) for stop in self._stops)
        found = [(at + len(stop), at, stop) for stop, at in starts if at >= 0]
        if found and may_stop:
            self.stopped = True
            self._held = ""
            end, begin, self.matched = min(found)
            return text[: end if self._include else begin]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the held text, when the answer has ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Return the length of the longest suffix that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
