"""The states of all models' upgrades in memory: which model may begin now, and which ones must learn of a change.

It is rebuilt after a start from the reconciles of all models. Until each was reconciled once, no upgrade begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from minisgl_operator.api.upgrades import UpgradeSettings
from minisgl_operator.facts.rollout.upgrade import Upgrade
from minisgl_operator.facts.rollout.waves import Decision, Key, Member, Turn, decide
from minisgl_operator.shell.store import ModelKey


class Upgrades:
    """Used from one event loop; no method blocks."""

    def __init__(
        self,
        settings: UpgradeSettings | None,
        models: Callable[[], Iterable[ModelKey]],
        on_change: Callable[[ModelKey], None],
    ) -> None:
        """`settings`: None if all models are upgraded at once. `models` returns all models. `on_change` is called with
        each model that must be reconciled because its turn has changed."""
        self._settings = settings
        self._models = models
        self._on_change = on_change
        self._members: dict[ModelKey, Member | None] = {}
        self._admitted: dict[ModelKey, str] = {}
        self._decision: Decision | None = None
        self._shown: object = None
        self._is_open = True
        self._is_complete = False

    def turn(self, key: ModelKey, labels: Mapping[str, str], upgrade: Upgrade | None, now: datetime) -> Turn | None:
        """The turn of the model whose upgrade is in this state; None if models have none. A model that is admitted
        counts as being upgraded from this moment on, before anything shows it."""
        settings = self._settings
        if settings is None or upgrade is None:
            return None
        state = upgrade.state
        if state == "Waiting" and self._admitted.get(key) == upgrade.target:
            state = "Upgrading"
        elif state != "Upgrading":
            self._admitted.pop(key, None)
        wave = settings.wave_of(labels)
        self._set(key, Member(wave, state))
        decision = self._decide(settings, now)
        if key in decision.admitted:
            self._admitted[key] = upgrade.target
            self._set(key, Member(wave, "Upgrading"))
            decision = self._decide(settings, now)
        return Turn(
            admitted=key in self._admitted,
            wave=settings.name_of(wave),
            current_wave="" if decision.wave is None else settings.name_of(decision.wave),
            failed="" if decision.failed is None else "/".join(decision.failed),
            opens_at=None if self._is_open or settings.window is None else now + settings.window.opens_after(now),
        )

    def leave_out(self, key: ModelKey, now: datetime) -> None:
        """No other model waits for this one, as its state cannot be known."""
        if self._settings is not None:
            self._admitted.pop(key, None)
            self._set(key, None)
            self._decide(self._settings, now)

    def forget(self, key: ModelKey, now: datetime) -> None:
        """Drop a deleted model."""
        if self._settings is not None and key in self._members:
            self._admitted.pop(key, None)
            del self._members[key]
            self._decision = None
            self._decide(self._settings, now)

    def _set(self, key: ModelKey, member: Member | None) -> None:
        if key not in self._members or self._members[key] != member:
            self._members[key] = member
            self._decision = None

    def _decide(self, settings: UpgradeSettings, now: datetime) -> Decision:
        is_open = settings.window is None or settings.window.is_open(now)
        if self._decision is not None and is_open == self._is_open:
            return self._decision
        self._is_open = is_open
        self._is_complete = self._is_complete or all(key in self._members for key in self._models())
        known: dict[Key, Member] = {key: member for key, member in self._members.items() if member is not None}
        decision = decide(known, settings.max_models, is_open) if self._is_complete else Decision()
        self._decision = decision
        shown = (decision.wave, decision.failed, is_open)
        # The conditions of all waiting models name these; a turn concerns one model.
        affected = decision.admitted
        if shown != self._shown:
            affected |= {key for key, member in known.items() if member.state == "Waiting"}
        self._shown = shown
        for key in affected:
            self._on_change(ModelKey(*key))
        return decision
