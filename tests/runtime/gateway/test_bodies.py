"""What a gateway reads of a body, and how it changes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.gateway import bodies
from minisgl.gateway.bodies import KeptBodies, requested_model, with_model
from minisgl.gateway.holding import check_serves
from minisgl.gateway.models import Address, Key, Model, State

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), _VALUES, max_size=5), st.text(max_size=10), st.booleans())
def test_a_body_gets_another_model_and_keeps_all_else(fields: dict[str, object], name: str, escaped: bool) -> None:
    body = json.dumps({**fields, "model": "team/qwen"}, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    try:
        assert requested_model(body) == "team/qwen"
        changed = with_model(body, name)
    except ApiError as error:
        assert error.code == "invalid_json", "half of a surrogate is no text"
        return
    assert json.loads(changed) == {**json.loads(body), "model": name}


def test_numbers_are_passed_on_digit_by_digit() -> None:
    body = b'{"temperature": 0.10000000000000000001, "seed": 123456789012345678901234567890, "model": "a"}'
    changed = with_model(body, "b")
    assert b"0.10000000000000000001" in changed
    assert b"123456789012345678901234567890" in changed


@example(b'{"model": "a", "x": "\xff"}')
@given(st.binary(max_size=60) | _VALUES.map(lambda value: json.dumps(value).encode()))
def test_every_other_body_is_an_error_of_its_client(body: bytes) -> None:
    try:
        name = requested_model(body)
    except ApiError as error:
        assert error.status == 400
    else:
        assert isinstance(json.loads(body), dict)
        assert name is None or isinstance(name, str)


def test_bodies_that_are_kept_are_limited_with_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_KEPT_BYTES", 100)
    kept = KeptBodies()
    with kept.keep(100, "a"):
        with pytest.raises(ApiError, match="100 bytes wait"), kept.keep(1, "a"):
            raise AssertionError("there is no room")
        with kept.keep(50, "b"):
            pass
    with kept.keep(100, "a"):
        pass


def test_all_bodies_have_room_in_the_memory_of_a_pod() -> None:
    values = yaml.safe_load((Path(__file__).parents[3] / "charts" / "values.yaml").read_text())
    assert values["gateway"]["resources"]["limits"]["memory"] == "1Gi"
    # Shares of tenants may double each.
    assert 2 * (bodies._KEPT_BYTES + RequestLimits().reading_bytes) < 1 << 30


@pytest.mark.parametrize(
    ("state", "code"), [("suspended", "not_serving"), ("failed", "engine_unavailable"), ("idle", ""), ("starting", "")]
)
def test_a_model_that_needs_a_change_of_its_owner_is_not_waited_for(state: State, code: str) -> None:
    model = Model(key=Key("t", "a"), names=("a",), state=state, reason="Why: so", addresses=(Address("h", 1),))
    if not code:
        check_serves(model)
        return
    with pytest.raises(ApiError, match=r"'t/a' .*: Why: so") as caught:
        check_serves(model)
    assert (caught.value.status, caught.value.code) == (503, code)
