"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How fast examples are made or run says how busy the machine is, and nothing about the code. With CI=true hypothesis
# has a profile of its own for that.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "CI" not in os.environ:
    settings.load_profile("busy")
