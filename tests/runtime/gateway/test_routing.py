"""Which model a request is for: names, qualified names, paths, and the header Host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.errors import ApiError
from minisgl.frontend.openapi import openapi
from minisgl.gateway.models import Address, Key, Model
from minisgl.gateway.paths import INFORMATION_PATHS, POST_PATHS, split_path
from minisgl.gateway.routing import Table, Target, served_name


def model(namespace: str, name: str, *names: str) -> Model:
    return Model(key=Key(namespace, name), names=names or (name,), state="ready", addresses=(Address("host", 1),))


QWEN_A = model("team-a", "qwen", "qwen", "Qwen/Qwen3")
QWEN_B = model("team-b", "qwen")
LLAMA = model("team-b", "llama", "meta/llama", "llama-latest")
TABLE = Table([QWEN_A, QWEN_B, LLAMA])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen3", QWEN_A),
        ("meta/llama", LLAMA),
        ("llama-latest", LLAMA),
        ("team-a/qwen", QWEN_A),
        ("team-b/qwen", QWEN_B),
        ("team-b/llama", LLAMA),
    ],
)
def test_a_model_is_found_by_its_names(name: str, found: Model) -> None:
    assert TABLE.find(name) is found


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("qwen", 400, "ambiguous_model"),
        ("llama", 404, "model_not_found"),
        ("team-a/llama", 404, "model_not_found"),
        ("", 404, "model_not_found"),
        ("/", 404, "model_not_found"),
        (None, 400, "missing_required_parameter"),
        ("default", 400, "missing_required_parameter"),
    ],
)
def test_other_names_are_errors(name: str | None, status: int, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        TABLE.find(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "model")


def test_an_ambiguous_name_lists_the_qualified_ones() -> None:
    with pytest.raises(ApiError, match="'team-a/qwen', 'team-b/qwen'"):
        TABLE.find("qwen")


def test_a_name_that_a_tenant_may_use_once_is_not_ambiguous() -> None:
    def allowed(found: Model) -> bool:
        return found.key.namespace == "team-b"

    assert TABLE.find("qwen", None, allowed) is QWEN_B


@pytest.mark.parametrize("target", [Target("qwen", "team-a"), None])
@pytest.mark.parametrize("name", [None, "default", "Qwen/Qwen3", "team-a/qwen", "qwen"])
def test_an_error_does_not_tell_whether_a_model_exists_that_a_tenant_may_not_use(
    name: str | None, target: Target | None
) -> None:
    def allowed(found: Model) -> bool:
        return found.key.namespace == "team-c"

    with pytest.raises(ApiError) as caught:
        TABLE.find(name, target, allowed)
    with pytest.raises(ApiError) as other:
        Table().find(name, target, allowed)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert caught.value.message == other.value.message


def test_a_served_name_does_not_take_over_a_qualified_name() -> None:
    other = model("team-b", "other", "team-a/qwen", "other")
    table = Table([QWEN_A, other])
    assert table.find("team-a/qwen") is QWEN_A
    assert table.listed_name(other, "team-a/qwen") == "team-b/other"
    assert table.listed_name(other, "other") == "other"
    assert Table([other]).find("team-a/qwen") is other


def test_the_only_model_needs_no_name() -> None:
    table = Table([LLAMA])
    assert table.find(None) is table.find("default") is LLAMA
    with pytest.raises(ApiError, match="there is no model"):
        Table().find(None)


@pytest.mark.parametrize("name", [None, "default", "qwen", "Qwen/Qwen3", "team-a/qwen"])
def test_a_target_takes_all_names_of_its_model(name: str | None) -> None:
    assert TABLE.find(name, Target("qwen", "team-a")) is QWEN_A


def test_a_target_takes_no_name_of_another_model() -> None:
    with pytest.raises(ApiError, match="'meta/llama' does not exist"):
        TABLE.find("meta/llama", Target("qwen", "team-a"))
    with pytest.raises(ApiError, match="'team-c/qwen' does not exist"):
        TABLE.find(None, Target("qwen", "team-c"))


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("qwen", None),
        ("qwen:8000", None),
        ("qwen.", None),
        ("qwen..svc", None),
        ("qwen.team-a", Target("qwen", "team-a")),
        ("QWEN.team-a.svc:80", Target("qwen", "team-a")),
        ("qwen.team-a.svc.cluster.local.", Target("qwen", "team-a")),
        ("qwen.team-a.svc.some.other.domain", Target("qwen", "team-a")),
        ("qwen.team-c.svc", None),
        ("qwen.example.com", None),
        ("qwen.team-a.example.com", None),
        ("minisgl-gateway.minisgl-system.svc", None),
        ("localhost:8000", None),
        ("[::1]:8000", None),
        ("", None),
        (".", None),
    ],
)
def test_the_host_names_the_model_of_a_service(host: str, target: Target | None) -> None:
    assert TABLE.target_of_host(host) == target


def test_frontends_get_a_name_that_they_know() -> None:
    assert served_name(QWEN_A, "team-a/qwen") == "qwen"
    assert served_name(QWEN_A, "Qwen/Qwen3") is None
    assert served_name(QWEN_A, "default") is None
    assert served_name(QWEN_A, None) is None


_NAMES = st.sampled_from(["a", "b", "c", "x/a", "x/b", "y/a", "default"])
_MODELS = st.builds(
    lambda namespace, name, names: model(namespace, name, *names),
    st.sampled_from(["x", "y", "z"]),
    st.sampled_from(["a", "b", "c"]),
    st.lists(_NAMES, min_size=1, max_size=3, unique=True),
)


@given(st.lists(st.tuples(st.booleans(), _MODELS), max_size=12), _NAMES)
def test_a_table_of_any_history_finds_what_a_new_one_finds(changes: list[tuple[bool, Model]], name: str) -> None:
    table, models = Table(), dict[Key, Model]()
    for is_put, each in changes:
        if is_put:
            table.put(each)
            models[each.key] = each
        else:
            table.remove(each.key)
            models.pop(each.key, None)
    assert _found(table, name) == _found(Table(models.values()), name)
    for each in models.values():
        assert table.find(str(each.key), Target(each.key.name, each.key.namespace)) == each
        assert table.find(str(each.key)) == each, "no served name takes over a qualified name"
        for listed in each.names:
            called = table.listed_name(each, listed)
            assert called == str(each.key) or called == listed
            assert called == "default" or table.find(called) == each


def _found(table: Table, name: str) -> Model | tuple[str, str]:
    try:
        return table.find(name)
    except ApiError as error:
        return error.code, error.message


@pytest.mark.parametrize("path", sorted(POST_PATHS | INFORMATION_PATHS | {"/v1/models", "/v1/models/x/y"}))
def test_every_path_has_a_form_that_names_a_model(path: str) -> None:
    assert split_path(path) == (None, path)
    assert split_path(f"/team-a/qwen{path}") == (Target("qwen", "team-a"), path)


@given(st.text(alphabet="/ab.%vV1", max_size=20))
def test_no_other_path_names_a_model(path: str) -> None:
    target, inner = split_path(path)
    assert target is None or path == f"/{target.namespace}/{target.name}{inner}"


@pytest.mark.parametrize("path", ["/team-a/qwen", "/team-a/qwen/health", "/team-a/qwen/metrics", "//qwen/v1/models"])
def test_what_frontends_say_of_themselves_is_not_forwarded(path: str) -> None:
    assert split_path(path) == (None, path)


def test_the_gateway_knows_every_path_of_a_frontend() -> None:
    paths = openapi(None)["paths"]
    own = {"/v1/models", "/v1/models/{name}", "/version", "/health", "/ready", "/metrics"}
    assert {path for path, methods in paths.items() if "post" in methods} == POST_PATHS
    assert {path for path, methods in paths.items() if "get" in methods} <= INFORMATION_PATHS | own
