"""Upgrades in waves: the value `rollout` of the operator's flag --defaults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from minisgl_operator.api.base import ApiModel, DnsLabel, Integer, Rule, Unique
from minisgl_operator.api.scheduling import LabelSelector

Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
DAYS: Final[tuple[Day, ...]] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

LAST_WAVE: Final = "others"
"""Name of the wave of all models that no wave selects."""


# The API server never sees these settings.
_NO_CEL: Final = ""


class Wave(ApiModel):
    """Models that are upgraded before those of later waves."""

    name: DnsLabel
    """Name of the wave, for status and messages."""
    selector: LabelSelector
    """Labels of the InferenceModels; a model belongs to the first wave that selects it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=_NO_CEL,
            message=f"{LAST_WAVE} is the name of the wave of all other models: use another name",
            field=".name",
            holds=lambda wave: wave.name != LAST_WAVE,
        ),
        Rule(
            cel=_NO_CEL,
            message="values go with the operators In and NotIn, which need at least one",
            field=".selector.matchExpressions",
            holds=lambda wave: all(
                (each.operator in ("In", "NotIn")) == bool(each.values) for each in wave.selector.match_expressions
            ),
        ),
    )


class UpgradeWindow(ApiModel):
    """Times at which the upgrade of a model may begin, in UTC. One that has begun goes on."""

    days: Annotated[tuple[Day, ...], Field(min_length=1), Unique()] = DAYS
    """Days on which the window opens."""
    start_hour: Integer = Field(default=0, ge=0, le=23)
    """Hour at which it opens."""
    end_hour: Integer = Field(default=24, ge=1, le=24)
    """Hour at which it closes; not after startHour: on the next day."""

    def is_open(self, now: datetime) -> bool:
        # A window of yesterday may last until today.
        begins = (self._begin(now, -1), self._begin(now, 0))
        return any(begin is not None and begin <= now < begin + self._length for begin in begins)

    def opens_after(self, now: datetime) -> timedelta:
        """The time until the window opens the next time."""
        begins = (self._begin(now, offset) for offset in range(len(DAYS) + 1))
        return min(begin - now for begin in begins if begin is not None and begin > now)

    @property
    def _length(self) -> timedelta:
        return timedelta(hours=self.end_hour - self.start_hour + (24 if self.end_hour <= self.start_hour else 0))

    def _begin(self, now: datetime, offset: int) -> datetime | None:
        """Opening of the window on a day relative to today; None on other days."""
        day = now.astimezone(UTC).date() + timedelta(days=offset)
        return datetime.combine(day, time(self.start_hour), UTC) if DAYS[day.weekday()] in self.days else None


class UpgradeSettings(ApiModel):
    """How models get the pods of a new operator."""

    waves: Annotated[tuple[Wave, ...], Field(max_length=32), Unique("name")] = ()
    """Waves in their order; models that none selects are in a last one."""
    max_models: Integer = Field(default=1, ge=1, le=1000)
    """Number of models that may be in an upgrade at a time."""
    window: UpgradeWindow | None = None
    """Times at which upgrades may begin; default: at any time."""

    def wave_of(self, labels: Mapping[str, str]) -> int:
        """Position of the wave of a model with these labels."""
        found = (number for number, wave in enumerate(self.waves) if wave.selector.matches(labels))
        return next(found, len(self.waves))

    def name_of(self, wave: int) -> str:
        return self.waves[wave].name if wave < len(self.waves) else LAST_WAVE
