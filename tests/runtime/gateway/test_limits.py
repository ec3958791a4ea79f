"""Rates of tenants, and the headers that tell them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.errors import ApiError
from minisgl.gateway.keys import Tenant
from minisgl.gateway.limits import Bucket, duration
from minisgl.gateway.tenancy import Account

_PAUSES = st.lists(st.floats(0, 30), min_size=1, max_size=200)


@given(st.integers(1, 600), _PAUSES)
def test_no_time_has_more_requests_than_its_rate_and_one_minute_of_savings(
    per_minute: int, pauses: list[float]
) -> None:
    account = Account(Tenant(name="a", requests_per_minute=per_minute), 0.0)
    now, admitted = 0.0, list[float]()
    for pause in pauses:
        now += pause
        try:
            account.begin(now)
        except ApiError:
            continue
        admitted.append(now)
        account.end(0, now)
    for i, begin in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= per_minute * (1 + (admitted[j] - begin) / 60) + 1e-6


@given(st.integers(1, 1000), st.integers(0, 5000), st.floats(0, 100))
def test_a_request_is_admitted_after_the_time_that_its_rejection_names(rate: int, used: int, pause: float) -> None:
    account = Account(Tenant(name="a", tokens_per_minute=rate), 0.0)
    account.begin(0.0)
    account.end(used, 0.0)
    try:
        account.begin(pause)
    except ApiError as error:
        assert error.status == 429
        wait = int(error.headers["retry-after-ms"]) / 1000
        assert float(error.headers["retry-after"]) >= wait - 1e-9
        account.begin(pause + wait + 1e-6)


@given(st.integers(1, 100), st.lists(st.integers(0, 300), min_size=1, max_size=50))
def test_tokens_are_counted_exactly(rate: int, uses: list[int]) -> None:
    bucket = Bucket(rate, 0.0)
    for use in uses:
        bucket.take(use, 0.0)
    missing = sum(uses) - rate
    assert bucket.remaining(0.0) == max(-missing, 0)
    assert bucket.seconds_until(1, 0.0) == pytest.approx(max(missing + 1, 0) * 60 / rate)


def test_concurrent_requests_are_limited() -> None:
    account = Account(Tenant(name="a", max_concurrent=2), 0.0)
    account.begin(0.0)
    account.begin(0.0)
    with pytest.raises(ApiError, match="2 requests of this key's tenant"):
        account.begin(0.0)
    account.end(0, 0.0)
    account.begin(0.0)


def test_headers_tell_limits_as_openai_does() -> None:
    account = Account(Tenant(name="a", requests_per_minute=60, tokens_per_minute=6000), 0.0)
    account.begin(0.0)
    account.end(1500, 0.0)
    assert account.headers(0.5) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4550",
        "x-ratelimit-reset-tokens": "14.5s",
    }
    assert Account(Tenant(name="b"), 0.0).headers(0.0) == {}


def test_other_limits_keep_what_was_used() -> None:
    account = Account(Tenant(name="a", tokens_per_minute=100), 0.0)
    account.begin(0.0)
    account.end(100, 0.0)
    account.change(Tenant(name="a", tokens_per_minute=150), 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "50"
    account.change(Tenant(name="a"), 0.0)
    assert account.headers(0.0) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (3601.25, "60m1.25s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
