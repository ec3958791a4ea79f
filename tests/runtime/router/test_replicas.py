from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.router.replicas import STALE_SECONDS, Replicas
from minisgl.wire.messages import FEATURES, WIRE_VERSION, Welcome
from minisgl.wire.status import DataTypes
from support.frontend.fake_scheduler import card
from support.messages import status_of

OLD, NEW = {"tokenizer.json": "0" * 64}, {"tokenizer.json": "1" * 64}

BFLOAT16 = DataTypes(weights="bfloat16", kv_cache="bfloat16")
FP8 = DataTypes(weights="fp8-channel", kv_cache="fp8_e4m3")
STATUS = status_of(
    waiting=1,
    running=2,
    used_pages=3,
    num_pages=10,
    page_size=16,
    queue_times=[1, 2],
    queue_seconds=0.5,
    steps=4,
    prompt_tokens=5,
    cached_tokens=6,
    prefill_tokens=7,
    generated_tokens=8,
    preemptions=9,
    finished=10,
    start_seconds={"load": 1.5},
    attention={"prefill": "fa3", "decode": "balanced"},
    data_types=(BFLOAT16,),
    compiled_after_ready=1,
)


def welcome(number: int, hashes: dict[str, str] = OLD, **changes: object) -> Welcome:
    made = Welcome(
        version=WIRE_VERSION,
        epoch=(1, 1),
        model=card(tokenizer_hashes=hashes),
        replica=f"chat-r{number}",
        revision="a",
        features=FEATURES,
    )
    return msgspec.structs.replace(made, **changes)


def replicas_of(*welcomes: Welcome, hashes: dict[str, str] | None = OLD) -> Replicas:
    made = Replicas()
    if hashes is not None:
        made.set_files_in_use(hashes)
    for number, one in enumerate(welcomes):
        made.add(str(number))
        made.welcome(str(number), one)
    return made


def reasons(replicas: Replicas) -> list[str]:
    return [state.reason for state in replicas.views()]


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (welcome(0), ""),
        (welcome(0, version=WIRE_VERSION - 1), ""),
        (welcome(0, version=WIRE_VERSION + 1), "update the older side"),
        (welcome(0, version=WIRE_VERSION - 2), "update the older side"),
        (welcome(0, {}), "names no tokenizer files"),
        (welcome(0, NEW), r"differ from those in use \(tokenizer.json\)"),
    ],
)
def test_each_state_is_routable_or_names_a_reason(one: Welcome, reason: str) -> None:
    replicas = replicas_of(one)
    assert [not reason] == [state.routable for state in replicas.views()]
    assert bool(replicas.routable) is (replicas.engine_info() is not None) is not reason
    assert re.search(reason, reasons(replicas)[0])


def test_a_silent_replica_is_stale_until_its_next_status() -> None:
    replicas = replicas_of(welcome(0))
    replicas.now = STALE_SECONDS + 1
    replicas.tick()
    assert reasons(replicas) == ["it has sent nothing for 6 s"]
    assert not replicas.routable
    replicas.status("0", STATUS)
    assert replicas.routable


def test_a_draining_replica_is_routable_again_after_a_restart() -> None:
    replicas = replicas_of(welcome(0))
    replicas.mark_draining("0")
    replicas.status("0", STATUS)
    assert reasons(replicas) == ["it is draining"]
    replicas.lost("0", "gone")
    assert reasons(replicas) == ["gone"]
    replicas.welcome("0", welcome(0, epoch=(1, 2)))
    assert replicas.routable


def test_the_load_counts_requests_of_all_frontends() -> None:
    replicas = replicas_of(welcome(0))
    assert replicas["0"].load == 0
    replicas["0"].sent(())
    assert replicas["0"].load == 1
    replicas.status("0", STATUS)
    assert replicas["0"].load == 3
    for _ in range(2):
        replicas["0"].sent(())
    assert replicas["0"].load == 5
    for _ in range(8):
        replicas["0"].sent(())
    replicas.status("0", STATUS)
    # The status does not count requests that are still in transit.
    assert replicas["0"].load == 11


def test_all_tokenizer_files_are_loaded_those_of_most_replicas_first() -> None:
    replicas = replicas_of(welcome(0), welcome(1, NEW), welcome(2, NEW), hashes=None)
    assert replicas.files_to_load() == [NEW, OLD]
    assert replicas.addresses_with_files(NEW) == ["1", "2"]
    replicas.set_loaded_files([NEW])
    assert replicas.files_to_load() == [OLD]
    replicas.status("0", status_of(STATUS, draining=True))
    assert replicas.files_to_load() == []


def test_files_of_most_replicas_are_switched_to_once_they_are_loaded() -> None:
    replicas = replicas_of(welcome(0), welcome(1), welcome(2, NEW), welcome(3, NEW))
    replicas.set_loaded_files([OLD])
    replicas.status("0", status_of(STATUS, draining=True))
    assert replicas.files_to_switch_to() is None
    replicas.set_loaded_files([OLD, NEW])
    assert replicas.files_to_switch_to() == NEW
    replicas.set_files_in_use(NEW)
    assert replicas.files_to_switch_to() is None
    assert [replica.address for replica in replicas.routable] == ["2", "3"]


def test_an_equal_number_of_replicas_does_not_switch_files() -> None:
    replicas = replicas_of(welcome(0), welcome(1, NEW))
    replicas.set_loaded_files([OLD, NEW])
    assert replicas.files_to_switch_to() is None
    replicas.lost("0", "gone")
    assert replicas.files_to_switch_to() == NEW
    replicas.set_files_in_use(NEW)
    replicas.welcome("0", welcome(0))
    assert replicas.files_to_switch_to() is None


def test_a_replica_awaits_files_that_are_loaded_but_not_in_use() -> None:
    replicas = replicas_of(welcome(0), welcome(1, NEW), welcome(2, NEW), hashes=None)

    def waiting() -> list[str]:
        return [state.address for state in replicas.views() if state.waits_for_files]

    replicas.set_loaded_files([NEW])
    assert waiting() == [], "none are in use yet"
    replicas.set_files_in_use(OLD)
    assert waiting() == ["1", "2"]
    replicas.mark_draining("1")
    assert waiting() == ["2"]
    replicas.set_loaded_files([OLD])
    assert waiting() == [], "whether they can be used is not known"
    replicas.set_loaded_files([OLD, NEW])
    replicas.set_files_in_use(NEW)
    assert waiting() == ["0"]


def test_without_accepting_replicas_files_are_neither_loaded_nor_switched() -> None:
    for replicas in (replicas_of(), replicas_of(welcome(0, {}))):
        replicas.set_loaded_files([OLD])
        assert (replicas.files_to_load(), replicas.files_to_switch_to()) == ([], None)


def test_the_shortest_model_length_of_all_replicas_is_reported() -> None:
    replicas = replicas_of(welcome(0, epoch=(1, 9)), welcome(1, model=card(tokenizer_hashes=OLD, max_model_len=100)))
    served = replicas.engine_info()
    assert served is not None
    assert (served[0].max_model_len, served[1]) == (100, (1, 9))


def test_statuses_of_several_replicas_are_summed() -> None:
    replicas = replicas_of(welcome(0), welcome(1))
    assert replicas.aggregate_status() is None
    replicas.status("0", STATUS)
    assert replicas.aggregate_status() == STATUS
    slower = {"load": 3.0, "capture": 0.5}
    other = {"attention": {"prefill": "torch", "decode": "balanced"}, "compiled_after_ready": 2, "data_types": (FP8,)}
    drafts = {"accepted_draft_tokens": 3, "accepted_by_place": [2, 1, 0, 0, 0, 0, 0]}
    replicas.status("1", status_of(STATUS, draining=True, start_seconds=slower, **other, **drafts))
    total = replicas.aggregate_status()
    assert total is not None
    assert total.start_seconds == slower
    assert total.attention == {"prefill": "fa3, torch", "decode": "balanced"}
    assert total.compiled_after_ready == 3
    assert total.data_types == (BFLOAT16, FP8)
    counters = total.counters
    assert (total.waiting, counters.steps, counters.queue_seconds, counters.queue_times) == (2, 8, 1.0, [2, 4])
    assert (counters.accepted_draft_tokens, counters.accepted_by_place) == (3, [2, 1, 0, 0, 0, 0, 0])
    assert (total.page_size, total.num_pages, total.draining) == (16, 20, False)


def test_totals_do_not_fall_when_a_replica_restarts_or_goes_away() -> None:
    """Prometheus would take a sum that falls for a restart of all replicas, and count the rest again."""
    replicas = replicas_of(welcome(0), welcome(1))
    busy = status_of(STATUS, generated_tokens=1000, queue_times=[7, 5], queue_seconds=9.0)
    young = status_of(STATUS, generated_tokens=3, queue_times=[1, 0], queue_seconds=0.5)

    def totals() -> tuple[int, list[int], float]:
        total = replicas.aggregate_status()
        assert total is not None
        counters = total.counters
        return counters.generated_tokens, counters.queue_times, counters.queue_seconds

    for address in ("0", "1"):
        replicas.status(address, busy)
    assert totals() == (2000, [14, 10], 18.0)
    replicas.lost("0", "gone")
    assert totals() == (2000, [14, 10], 18.0)
    # A connection that was lost for a moment: it is still the same start.
    replicas.welcome("0", welcome(0))
    assert totals() == (2000, [14, 10], 18.0)
    replicas.status("0", busy)
    assert totals() == (2000, [14, 10], 18.0)
    replicas.welcome("0", welcome(0, epoch=(1, 2)))
    replicas.status("0", young)
    assert totals() == (2003, [15, 10], 18.5)
    total = replicas.aggregate_status()
    assert total is not None and (total.waiting, total.num_pages) == (2 * STATUS.waiting, 2 * STATUS.num_pages)
    replicas.remove("1")
    assert totals() == (2003, [15, 10], 18.5)
    replicas.remove("0")
    assert replicas.aggregate_status() is None


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["status", "lost", "again", "restart"])), max_size=300))
def test_totals_are_those_of_all_starts(steps: list[tuple[int, str]]) -> None:
    """However often replicas are lost, return or start anew."""
    replicas = replicas_of(*map(welcome, range(3)))
    epochs, tokens = [1] * 3, {(number, 1): 0 for number in range(3)}
    for number, step in steps:
        address = str(number)
        if step == "restart":
            epochs[number] += 1
            tokens[number, epochs[number]] = 0
        if step in ("restart", "again"):
            replicas.welcome(address, welcome(number, epoch=(1, epochs[number])))
        elif step == "lost":
            replicas.lost(address, "gone")
        elif replicas[address].welcome is not None:
            tokens[number, epochs[number]] += 5
            replicas.status(address, status_of(STATUS, generated_tokens=tokens[number, epochs[number]]))
    total = replicas.aggregate_status()
    assert total is None or total.counters.generated_tokens == sum(tokens.values())


def test_a_view_has_the_mean_queue_time_of_the_last_half_minute_and_the_usage_of_the_cache() -> None:
    replicas = replicas_of(welcome(0))
    assert (replicas.views()[0].queue_ms, replicas.views()[0].kv_usage) == (None, None)
    for second in range(0, 101):
        # One request is admitted each second; from second 60 on each has waited for 2 s.
        replicas.now = float(second)
        waited = max(0, second - 60) * 2.0
        replicas.status(
            "0", status_of(STATUS, waiting=0, queue_times=[second, 0], queue_seconds=waited, used_pages=3)
        )
        if second == 60:
            assert replicas.views()[0].queue_ms == 0.0
        if second == 75:
            assert replicas.views()[0].queue_ms == pytest.approx(1000.0), "half of them waited"
    assert replicas.views()[0].queue_ms == pytest.approx(2000.0)
    assert replicas.views()[0].kv_usage == pytest.approx(0.3)


def test_a_queue_from_which_none_is_admitted_has_waited_since_then() -> None:
    replicas = replicas_of(welcome(0))
    stuck = status_of(STATUS, waiting=3, queue_times=[7, 0], queue_seconds=1.0)
    for second in range(0, 11):
        replicas.now = float(second)
        replicas.status("0", stuck)
    assert replicas.views()[0].queue_ms == pytest.approx(10_000.0)
    replicas.status("0", status_of(stuck, deferred=3))
    assert replicas.views()[0].queue_ms == 0.0, "their grammars are being compiled"
