"""Which requests are recorded: the trace that their headers name, and the share of others."""

from __future__ import annotations

import pytest

from minisgl.frontend.tracing.context import Parent, read_traceparent, read_tracestate, traceparent
from minisgl.frontend.tracing.sampling import Sampler, SamplerError, make_sampler

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = Parent(1, 1, True), Parent(1, 1, False)
LOW, HIGH = 1 << 64 | 5, (1 << 64) - 1
"""Trace ids whose low bits are recorded first and last."""


@pytest.mark.parametrize("flags", ["00", "01", "03"])
def test_the_parent_of_a_request_is_read_and_written(flags: str) -> None:
    parent = read_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert parent is not None
    assert (f"{parent.trace_id:x}", f"{parent.span_id:x}") == (TRACE.lstrip("0"), SPAN)
    assert traceparent(parent.trace_id, parent.span_id, sampled=parent.is_sampled)[:-2] == f"00-{TRACE}-{SPAN}-"
    assert parent.is_sampled == (flags != "00")


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
    ],
)
def test_a_header_that_is_not_valid_names_no_parent(header: str) -> None:
    assert read_traceparent(header) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert read_traceparent(f"01-{TRACE}-{SPAN}-01-more") is not None


def test_the_state_of_several_headers_is_joined_and_limited() -> None:
    assert read_tracestate(["a=1", "b=2"]) == "a=1,b=2"
    assert read_tracestate(["a=" + "x" * 511]) == read_tracestate(["a=\x7f"]) == read_tracestate([]) == ""


@pytest.mark.parametrize(
    ("share", "variables", "expected"),
    [
        (0.5, {"OTEL_TRACES_SAMPLER": "always_on"}, Sampler(0.5, True)),
        (0.5, {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, Sampler(0.5, False)),
        (None, {}, Sampler(0.1, True)),
        (None, {"OTEL_TRACES_SAMPLER_ARG": "0.25"}, Sampler(0.25, True)),
        (None, {"OTEL_TRACES_SAMPLER": "always_on"}, Sampler(1.0, False)),
        (None, {"OTEL_TRACES_SAMPLER": "always_off"}, Sampler(0.0, False)),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, Sampler(1.0, True)),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampler(0.0, True)),
        (None, {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, Sampler(1.0, False)),
    ],
)
def test_a_flag_comes_before_the_variables(share: float | None, variables: dict[str, str], expected: Sampler) -> None:
    assert make_sampler(share, variables) == expected


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER=jaeger_remote is not known"),
        ({"OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG=2 is not a number from 0 to 1"),
        ({"OTEL_TRACES_SAMPLER_ARG": "some"}, "OTEL_TRACES_SAMPLER_ARG=some is not a number from 0 to 1"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], error: str) -> None:
    with pytest.raises(SamplerError, match=f"^{error}"):
        make_sampler(None, variables)


def test_the_parent_decides_unless_the_sampler_says_otherwise() -> None:
    for share in (0.0, 1.0):
        assert Sampler(share, True).records(LOW, SAMPLED) and not Sampler(share, True).records(LOW, UNSAMPLED)
    assert Sampler(1.0, False).records(HIGH, UNSAMPLED) and not Sampler(0.0, False).records(LOW, SAMPLED)


def test_the_parent_of_a_gateway_decides_also_where_clients_have_no_say() -> None:
    for share in (0.0, 1.0):
        sampler = Sampler(share, False)
        assert sampler.records(HIGH, SAMPLED, is_trusted=True) and not sampler.records(LOW, UNSAMPLED, is_trusted=True)
        assert sampler.records(LOW, None, is_trusted=True) == bool(share)


def test_the_low_bits_of_a_number_decide_about_one_without_a_parent() -> None:
    half = Sampler(0.5, True)
    assert half.records(LOW, None) and not half.records(HIGH, None)
    assert Sampler(1.0, True).records(HIGH, None) and not Sampler(0.0, True).records(0, None)
