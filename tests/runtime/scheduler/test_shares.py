"""Tenants of a scheduler get equal shares of its tokens and rows."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from minisgl.scheduler.shares import EXPECTED_SECONDS, MAX_TENANTS, Shares, has_share

NAMES = [b"a", b"b", b"c"]
costs = st.integers(1, 1000)


def serve(shares: Shares, queued: dict[bytes, deque[int]]) -> tuple[bytes, int]:
    """Serve a request of the tenant that comes first."""
    tenant = min((tenant for tenant in queued if queued[tenant]), key=shares.rank)
    cost = queued[tenant].popleft()
    shares.charge(tenant, cost)
    return tenant, cost


def joined(shares: Shares, queued: dict[bytes, deque[int]]) -> Shares:
    for tenant in queued:
        shares.join(tenant, queued, 0.0)
    return shares


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(costs, min_size=5, max_size=40), min_size=2))
def test_tenants_that_always_have_requests_get_equal_numbers_of_tokens(sizes: dict[bytes, list[int]]) -> None:
    """Up to the largest request, whatever their requests cost."""
    queued = {tenant: deque(costs) for tenant, costs in sizes.items()}
    shares, got = joined(Shares({}), queued), Counter(dict.fromkeys(queued, 0))
    while all(queued.values()):
        tenant, cost = serve(shares, queued)
        got[tenant] += cost
        assert max(got.values()) - min(got.values()) <= max(max(one) for one in sizes.values())


@given(st.lists(costs, min_size=1, max_size=30), st.integers(0, 30), costs)
def test_one_that_comes_waits_for_at_most_one_request_of_a_flood(flood: list[int], begun: int, size: int) -> None:
    queued = {b"flood": deque(flood)}
    rows = {b"flood": 5}
    shares = Shares(rows)
    shares.join(b"flood", (), 0.0)
    for _ in range(min(begun, len(flood) - 1)):
        serve(shares, queued)
    queued[b"new"] = deque([size])
    shares.join(b"new", (b"flood",), 0.0)
    assert serve(shares, queued)[0] == b"new"


@given(st.lists(costs, max_size=30), st.lists(costs, max_size=30))
def test_one_that_comes_back_has_saved_nothing_and_owes_what_it_had(before: list[int], meanwhile: list[int]) -> None:
    shares = Shares({})
    shares.join(b"a", (), 0.0)
    shares.join(b"b", (b"a",), 0.0)
    for cost in before:
        shares.charge(b"a", cost)
    for cost in meanwhile:
        shares.charge(b"b", cost)
    shares.join(b"a", (b"b",), 0.0)
    assert shares.rank(b"a")[0] == max(sum(before), sum(meanwhile))


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50)), st.sampled_from(NAMES))
def test_rows_are_given_up_until_they_are_equal_and_not_taken_back(rows: dict[bytes, int], waits: bytes) -> None:
    shares = Shares(rows)
    for _ in range(200):
        if shares.has_most(waits):
            break
        tenant = max(rows, key=rows.__getitem__)
        rows[tenant] -= 1
        rows[waits] = rows.get(waits, 0) + 1
        assert rows[waits] <= rows[tenant] + 1, "the row would go to and fro"
    else:
        raise AssertionError("it does not end")
    assert not rows or max(rows.values()) <= rows.get(waits, 0) + 1


def test_nothing_is_remembered_of_tenants_before_the_scheduler_was_idle() -> None:
    shares = Shares({})
    shares.charge(b"a", 1000)
    shares.join(b"a", (), 0.0)
    assert shares.rank(b"a") == (0, 0)


def test_a_limited_number_of_tenants_is_remembered() -> None:
    shares = Shares({})
    for number in range(5 * MAX_TENANTS):
        shares.join(b"%d" % number, (b"always",), 0.0)
        shares.charge(b"%d" % number, 1)
    assert len(shares._served) <= MAX_TENANTS


def test_tenants_with_requests_are_not_forgotten_for_those_that_come_and_go() -> None:
    shares = joined(Shares({}), {b"a": deque(), b"b": deque()})
    shares.charge(b"a", 200_000)
    shares.charge(b"b", 200_400)
    for number in range(2 * MAX_TENANTS):
        shares.join(b"%d" % number, (b"a", b"b"), 0.0)
        shares.charge(b"%d" % number, 50 + number % 7)
    assert (shares.rank(b"a")[0], shares.rank(b"b")[0]) == (200_000, 200_400)


def test_another_tenant_is_expected_for_some_time_after_one_has_come() -> None:
    rows = {b"a": 1}
    shares = Shares(rows)
    shares.join(b"a", (), 0.0)
    assert not shares.expects_others(0.0)
    shares.join(b"b", (b"a",), 5.0)
    assert shares.expects_others(5.0 + EXPECTED_SECONDS / 2)
    assert not shares.expects_others(5.0 + EXPECTED_SECONDS)
    rows[b"b"] = 1
    assert shares.expects_others(5.0 + EXPECTED_SECONDS), "it has rows"


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(1, 10))
def test_a_full_queue_has_room_for_every_tenant_below_its_share(most: int, tenants: int, more: int) -> None:
    waiting, own = most, Counter({-1: most})
    for tenant in range(tenants):
        while has_share(own[tenant], more, waiting, most, (+own).keys()):
            own[tenant] += more
            waiting += more
    assert waiting <= 2 * most
    assert own[0] + more > most // 2
    assert not has_share(own[-1], 1, waiting, most, (+own).keys())
