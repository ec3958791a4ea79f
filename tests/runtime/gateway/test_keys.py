"""Key files and Secrets: what they allow, and errors that contain no key."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

from minisgl.frontend.server.auth import KeyFileError
from minisgl.gateway.cluster import Secret, SecretKeys
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.keys import Tenant, read_file, read_secret
from minisgl.gateway.models import Address, Key, Metadata, Model
from minisgl.gateway.upstream import Client

FILE = """
tenants:
- name: search
  keys: [sk-search-1, sk-search-2]
  models: [qwen, team-a/*]
  requestsPerMinute: 600
  tokensPerMinute: 200000
  maxConcurrent: 32
  priority: 5
- {name: everyone, keys: [sk-all]}
"""


def model(namespace: str, name: str, *names: str) -> Model:
    return Model(key=Key(namespace, name), names=names or (name,), state="ready", addresses=(Address("host", 1),))


def test_a_file_names_tenants_and_what_they_may_use() -> None:
    table = read_file(FILE, "keys.yaml")
    search = Tenant(
        name="search",
        models=("qwen", "team-a/*"),
        requests_per_minute=600,
        tokens_per_minute=200_000,
        max_concurrent=32,
        priority=5,
    )
    assert table.tenant("sk-search-1") == table.tenant("sk-search-2") == search
    assert table.tenant("sk-all") == Tenant(name="everyone")
    assert table.tenant("sk-search-3") is table.tenant("") is table.tenant("\udcff") is None


@pytest.mark.parametrize("allowed", [(), ("qwen",), ("x", "alias"), ("t/qwen",), ("t/*",), ("*",)], ids=repr)
def test_models_are_allowed_by_any_of_their_names(allowed: tuple[str, ...]) -> None:
    assert Tenant(name="a", models=allowed).allows(model("t", "qwen", "qwen", "alias"))


@pytest.mark.parametrize("allowed", ["q", "u/*", "T/*", "qwen?", ""])
def test_no_other_model_is_allowed(allowed: str) -> None:
    assert not Tenant(name="a", models=(allowed,)).allows(model("t", "qwen", "qwen", "alias"))


@pytest.mark.parametrize("allowed", ["t/qwen", "t/*", "meta/llama"])
def test_a_served_name_is_no_qualified_name_of_another_namespace(allowed: str) -> None:
    assert not Tenant(name="a", models=(allowed,)).allows(model("u", "qwen", "t/qwen", "meta/llama"))


def test_without_a_cluster_served_names_may_have_slashes() -> None:
    assert Tenant(name="a", models=("meta/*",)).allows(model("", "meta/llama"))


SECRET = "sk-very-secret"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"tenants:\n- name: a\n  keys: {SECRET}\n", "Expected `array`"),
        (f"tenants:\n- keys: [{SECRET}]\n", "missing required field `name`"),
        (f"tenants:\n- name: a\n  keys: [{SECRET}]\n  limits: 3\n", "unknown field - at `$.tenants[0]`"),
        (f"{SECRET}: 1", "unknown field"),
        (f"tenants:\n- {{name: a, keys: [b], {SECRET}: 1}}", "unknown field - at `$.tenants[0]`"),
        (f"'` - at `$.{SECRET}': 1", "unknown field"),
        (f"tenants:\n- name: a\n  keys: [{SECRET}]\n  requestsPerMinute: 0\n", ">= 1"),
        (f"tenants:\n- name: a\n  keys: ['{SECRET} ']\n", "blanks at its ends"),
        (f"tenants:\n- {{name: a, keys: [{SECRET}]}}\n- {{name: a, keys: [b]}}\n", "'a' is there twice"),
        (
            f"tenants:\n- {{name: a, keys: [{SECRET}]}}\n- {{name: b, keys: [c, {SECRET}]}}\n",
            "'a', 'b' have the same key",
        ),
        ("tenants:\n- {name: a, keys: []}\n", "'a' has no keys; only with --oidc-issuer"),
        ("tenants:\n- {name: a}\n", "'a' has no keys; only with --oidc-issuer"),
        (f"tenants:\n- name: 'a b'\n  keys: [{SECRET}]\n", "matching regex"),
        (f'tenants:\n- name: "a\\n"\n  keys: [{SECRET}]\n', "matching regex"),
        ("tenants: []", "length >= 1"),
        (f"tenants: [{SECRET}", "not valid YAML in line 1"),
        (f"{SECRET}: &a [*a", "not valid YAML"),
        ("", "Expected `object`"),
    ],
)
def test_errors_of_a_file_say_what_is_wrong_without_a_key(text: str, problem: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        read_file(text, "keys.yaml")
    assert caught.value.code == "invalid_key_file"
    assert "keys.yaml" in caught.value.message
    assert problem in caught.value.message
    assert SECRET not in caught.value.message


def test_a_secret_has_keys_and_may_have_limits() -> None:
    tenant, digests = read_secret("team", {"key": b"one", "keys": b"# mine\ntwo\n\n three \n"})
    assert tenant == Tenant(name="team")
    assert len(digests) == 3
    limits = b'{"name": "search", "models": ["qwen"], "tokensPerMinute": 5}'
    tenant, _ = read_secret("team", {"key": b"one\n", "tenant": limits})
    assert tenant == Tenant(name="search", models=("qwen",), tokens_per_minute=5)


def test_a_tenant_that_comes_by_tokens_needs_no_key() -> None:
    table = read_file("tenants: [{name: 'auth0|7', priority: 1}, {name: b, keys: [sk-b]}]", "f", by_tokens=True)
    assert table.named("auth0|7") == Tenant(name="auth0|7", priority=1)
    assert table.named("b") == table.tenant("sk-b")
    assert table.named("sk-b") is None
    tenant, digests = read_secret("team", {"tenant": b"name: system:serviceaccount:a:b"}, by_tokens=True)
    assert (tenant, digests) == (Tenant(name="system:serviceaccount:a:b"), [])


def test_a_key_in_secrets_of_two_tenants_is_not_accepted(caplog: pytest.LogCaptureFixture) -> None:
    keys = SecretKeys(Client(1.0), ClusterAccess(Address("host", 1), Path("ca"), Path("token"), "system"))

    def secret(name: str, text: str, tenant: str = "") -> Secret:
        data = {"keys": text, "tenant": tenant and f"name: {tenant}"}
        return Secret(Metadata(name=name), {field: b64encode(value.encode()).decode() for field, value in data.items()})

    keys._replace([secret("a", f"{SECRET}\nsk-a"), secret("b", f"sk-b\n{SECRET}"), secret("a-2", "sk-a", "a")])
    assert keys.table().tenant(SECRET) is None
    assert keys.table().tenant("sk-a") == Tenant(name="a")
    assert keys.table().tenant("sk-b") == Tenant(name="b")
    assert "the tenants a, b have the same key" in caplog.text
    assert SECRET not in caplog.text
    keys._remove(Metadata(name="b"))
    assert keys.table().tenant(SECRET) == Tenant(name="a")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"key": b"\n# none\n"},
        {"key": b"\xff"},
        {"key": SECRET.encode(), "tenant": b"models: 3"},
        {"key": SECRET.encode(), "tenant": b"- 1"},
        {"key": SECRET.encode(), "tenant": SECRET.encode() + b": 1"},
        {"key": SECRET.encode(), "tenant": b"keys: [" + SECRET.encode() + b"]"},
        {"key": SECRET.encode(), "tenant": b"a: [" + SECRET.encode()},
    ],
    ids=repr,
)
def test_errors_of_a_secret_say_what_is_wrong_without_a_key(data: dict[str, bytes]) -> None:
    with pytest.raises(KeyFileError) as caught:
        read_secret("team", data)
    assert "Secret team" in caught.value.message
    assert SECRET not in caught.value.message
