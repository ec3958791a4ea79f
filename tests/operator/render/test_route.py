"""HTTPRoutes: headers and paths that lead to a model, and the parts of a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.types import InvalidSpec
from minisgl_operator.render.network import frontend_policy
from minisgl_operator.render.route import Member, http_route, parents
from support.cluster.inference_models import DEFAULTS, inference_model

PUBLIC = {"name": "public", "namespace": "gateways"}


def rules(spec: dict[str, Any], *group: Member) -> list[dict[str, Any]]:
    model = inference_model(spec)
    return list(http_route(model, DEFAULTS, group or [Member("qwen", model.served_names)])["spec"]["rules"])


def headers(rule: dict[str, Any]) -> set[tuple[str, str]]:
    return {(header["name"], header["value"]) for match in rule["matches"] for header in match.get("headers", ())}


def backends(rule: dict[str, Any]) -> dict[str, int]:
    return {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}


def path(rule: dict[str, Any]) -> set[str]:
    return {match["path"]["value"] for match in rule["matches"]}


def test_requests_name_the_model_in_either_header_or_in_the_path() -> None:
    by_header, by_path = rules({"route": {"parentRefs": [PUBLIC]}, "model": {"servedNames": ["qwen3", "gpt-4"]}})
    names = ("X-Gateway-Model-Name", "X-Gateway-Base-Model-Name")
    assert headers(by_header) == {(name, value) for name in names for value in ("qwen3", "gpt-4")}
    assert path(by_header) == {"/v1"}, "pages and metrics are not published"
    assert path(by_path) == {"/team-a/qwen/v1"}
    [rewrite] = by_path["filters"]
    assert rewrite["urlRewrite"]["path"] == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}
    for rule in (by_header, by_path):
        assert backends(rule) == {"qwen": 1}
        assert rule["timeouts"] == {"request": "0s"}


def test_the_first_model_of_a_group_divides_the_names_that_several_serve() -> None:
    group = (Member("qwen", ("qwen3", "stable"), 9), Member("canary", ("qwen3",), 1))
    shared, alone, of_group, own = rules({"route": {"parentRefs": [PUBLIC], "group": "chat", "weight": 9}}, *group)
    assert {value for _, value in headers(shared)} == {"qwen3"} and backends(shared) == {"qwen": 9, "canary": 1}
    assert {value for _, value in headers(alone)} == {"stable"} and backends(alone) == {"qwen": 9}
    assert (path(of_group), backends(of_group)) == ({"/team-a/chat/v1"}, {"qwen": 9, "canary": 1})
    assert (path(own), backends(own)) == ({"/team-a/qwen/v1"}, {"qwen": 1})


def test_the_others_of_a_group_have_their_paths_alone() -> None:
    group = (Member("first", ("qwen3",)), Member("qwen", ("qwen3",)))
    [own] = rules({"route": {"parentRefs": [PUBLIC], "group": "chat"}}, *group)
    assert path(own) == {"/team-a/qwen/v1"}


def test_a_group_with_the_name_of_a_model_has_its_path() -> None:
    group = (Member("qwen", ("qwen",)), Member("canary", ("qwen",)))
    *_, last = rules({"route": {"parentRefs": [PUBLIC], "group": "qwen"}}, *group)
    assert (path(last), backends(last)) == ({"/team-a/qwen/v1"}, {"qwen": 1, "canary": 1})


@pytest.mark.parametrize(
    ("own", "default", "names"),
    [
        (None, [], []),
        ({"hostnames": ["a.example.com"]}, [], []),
        (None, [PUBLIC], ["public"]),
        ({}, [PUBLIC], ["public"]),
        ({"parentRefs": [{"name": "own"}]}, [PUBLIC], ["own"]),
        ({"enabled": False}, [PUBLIC], []),
        ({"enabled": False, "parentRefs": [{"name": "own"}]}, [], []),
    ],
)
def test_gateways_of_the_model_come_before_those_of_the_cluster(
    own: dict[str, Any] | None, default: list[Any], names: list[str]
) -> None:
    models = ModelDefaults.model_validate({"route": {"parentRefs": default}})
    model = inference_model({} if own is None else {"route": own})
    assert [each.name for each in parents(model, replace(DEFAULTS, models=models))] == names


def test_host_names_and_listeners_are_passed_on() -> None:
    models = ModelDefaults.model_validate({"route": {"hostnames": ["*.example.com"]}})
    defaults = replace(DEFAULTS, models=models)
    listener = PUBLIC | {"sectionName": "https", "port": 443}
    for own, hostnames in (([], ["*.example.com"]), (["a.example.com"], ["a.example.com"])):
        model = inference_model({"route": {"parentRefs": [listener], "hostnames": own}})
        spec = http_route(model, defaults, [Member("qwen", ("qwen",))])["spec"]
        assert (spec["parentRefs"], spec["hostnames"]) == ([listener], hostnames)


def test_frontends_admit_the_namespaces_of_gateways() -> None:
    model = inference_model({"route": {"parentRefs": [PUBLIC, {"name": "near"}]}})
    clients = frontend_policy(model, DEFAULTS)["spec"]["ingress"][0]["from"]
    expression = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["gateways", "team-a"]}
    assert clients == [{"podSelector": {}}, {"namespaceSelector": {"matchExpressions": [expression]}}]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ({"weight": 2}, "spec.route.weight"),
        ({"hostnames": ["UPPER"]}, "spec.route.hostnames"),
        ({"parentRefs": [{}]}, "spec.route.parentRefs[0].name"),
        ({"group": "a", "weight": -1}, "spec.route.weight"),
    ],
)
def test_a_wrong_field_is_named(route: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec, match=field.replace("[", r"\[")):
        inference_model({"route": route})
