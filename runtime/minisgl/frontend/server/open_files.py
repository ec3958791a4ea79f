"""Warning before connections are refused for want of descriptors. The event loop closes such connections without a
word, so nothing else would show why clients cannot connect."""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

_NEAR: Final = 0.9
"""Share of the limit from which a warning is logged."""
_FAR: Final = 0.8
"""Share of the limit below which the next warning may follow."""


class OpenFiles:
    """Limit of open files of this process."""

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._has_warned = False

    def watch(self, descriptor: int) -> None:
        """Look at the descriptor of a new connection. The kernel gives the lowest free number, so nearly all are in use
        when it is near the limit."""
        if descriptor >= _NEAR * self._limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of at most %d files are open, most of them connections; beyond the limit new connections are "
                "closed: raise the hard limit of open files (ulimit -Hn, LimitNOFILE=), or limit the clients",
                *(descriptor + 1, self._limit),
            )
        elif descriptor < _FAR * self._limit:
            self._has_warned = False
