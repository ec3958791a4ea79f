"""Access tokens of an identity provider: which are accepted, what a refusal says, and what stays when the provider is
lost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.errors import ApiError
from minisgl.gateway import identities, provider
from minisgl.gateway.config import GatewayOptions, OidcOptions
from minisgl.gateway.identities import Identities
from minisgl.gateway.jwks import KeySetError, read_keys
from minisgl.gateway.process import GatewayServer
from minisgl.gateway.provider import Provider, ProviderError
from minisgl.gateway.tokens import MAX_TOKEN, TokenRules, is_token, read_header, verified
from support.gateway.identity_provider import AUDIENCE, IdentityProvider, bearer, identity_provider, published
from support.gateway.running import Answer, RunningGateway, gateway_of, until
from support.gateway.stub_frontend import StubFrontend, stub_frontend

CHAT = "/v1/chat/completions"
TENANTS = """
tenants:
- {name: search, models: [a], requestsPerMinute: 3, priority: 4}
- {name: all, keys: [sk-all, eyJrZXk.with.dots]}
- {name: 'auth0|7', keys: []}
"""


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    file = tmp_path / "tenants.yaml"
    file.write_text(TENANTS)
    return file


@contextlib.asynccontextmanager
async def gateway_with(
    issuer: IdentityProvider, tenants: Path, *, model: StubFrontend, **options: Any
) -> AsyncIterator[RunningGateway]:
    oidc = OidcOptions(issuer=issuer.issuer, audiences=("other", AUDIENCE), **options)
    async with gateway_of(model, keys=str(tenants), oidc=oidc) as gateway:
        yield gateway


async def post(gateway: RunningGateway, token: str) -> Answer:
    return await gateway.post(CHAT, {"model": "a"}, bearer(token))


async def test_a_token_names_a_tenant_beside_keys(tenants: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with identity_provider() as issuer, stub_frontend("a") as stub:
        async with gateway_with(issuer, tenants, model=stub) as gateway:
            token = issuer.token()
            answer = await post(gateway, token)
            assert answer.status == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == "2", "the limits are those of the tenant"
            headers = stub.received[-1].headers
            assert "authorization" not in headers, "the token ends at the gateway"
            assert (headers["x-minisgl-tenant"], headers["x-minisgl-priority"]) == ("key search", "4")
            assert (await gateway.post(CHAT, {"model": "b"}, bearer(token))).status == 404
            for _ in range(2):
                await post(gateway, issuer.token(jti="another token of the same tenant"))
            assert (await post(gateway, token)).code == "rate_limit_exceeded"
            for key in ("sk-all", "eyJrZXk.with.dots"):
                assert (await post(gateway, key)).status == 200
            assert (await gateway.post(CHAT, {"model": "a"}, "x-api-key: sk-all\r\n")).status == 200
            assert (await post(gateway, issuer.token(sub="auth0|7", aud=["x", AUDIENCE]))).status == 200
            for wrong in ("sk-other", "a.b.c"):
                assert (await post(gateway, wrong)).code == "invalid_api_key"
            assert (await gateway.post(CHAT, {"model": "a"})).code == "missing_api_key"
            page = await gateway.metrics()
        assert issuer.fetches == 1
    assert 'minisgl:gateway_identity_keys{component="gateway"} 1' in page
    assert token.partition(".")[2] not in page + caplog.text


async def test_a_tenant_that_is_not_defined_gets_nothing(tenants: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        issuer = await stack.enter_async_context(identity_provider())
        stub = await stack.enter_async_context(stub_frontend("a"))
        async with gateway_with(issuer, tenants, model=stub, tenant_claim="team") as gateway:
            refused = await post(gateway, issuer.token(team="other"))
            assert (refused.status, refused.code) == (403, "unknown_tenant")
            assert "claim 'team' names the tenant 'other'" in refused.json["error"]["message"]
            assert (await post(gateway, issuer.token(team="x" * 5000))).code == "unknown_tenant"
            for missing in (None, "", ["search"], 7):
                refused = await post(gateway, issuer.token(team=missing))
                assert (refused.status, refused.code) == (401, "invalid_access_token")
                assert "no text in the claim" in refused.json["error"]["message"]
            assert not stub.received
            tenants.write_text(TENANTS + "- {name: other}\n")

            async def is_accepted() -> bool:
                return (await post(gateway, issuer.token(team="other"))).status == 200

            await until(is_accepted)
            assert 'tenant="x' not in await gateway.metrics(), "only tenants that are defined have series"


async def test_refusals_say_why(tenants: Path) -> None:
    async with identity_provider() as issuer, stub_frontend("a") as stub:
        now = int(time.time())
        cases = {
            issuer.token(exp=now - 3600): "it has expired",
            issuer.token(exp=now - 40): "it has expired",
            issuer.token(nbf=now + 3600): "it is not valid yet",
            issuer.token(iat=now + 3600): "it is not valid yet",
            issuer.token(aud="others"): "it is for another audience",
            issuer.token(aud=[]): "it has no claim `aud`",
            issuer.token(iss="https://other.example"): "it is from another issuer",
            issuer.token(iss=issuer.issuer + "/"): "it is from another issuer",
            issuer.token(key=ec.generate_private_key(ec.SECP256R1())): "its signature is not",
            issuer.token(kid="two"): "the identity provider has no key with its `kid`",
            issuer.token(kid=None): "its header is not",
            **{issuer.token(**{claim: None}): f"it has no claim `{claim}`" for claim in ("exp", "iss", "aud")},
        }
        async with gateway_with(issuer, tenants, model=stub) as gateway:
            for token, reason in cases.items():
                refused = await post(gateway, token)
                assert refused.status == 401, reason
                assert refused.code == ("expired_token" if "expired" in reason else "invalid_access_token")
                assert reason in refused.json["error"]["message"]
                challenge = refused.headers["www-authenticate"]
                assert challenge.startswith('Bearer error="invalid_token", error_description="')
                assert reason in challenge
            assert not stub.received
            assert (await post(gateway, issuer.token(exp=now - 1))).status == 200, "clocks differ a little"


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


RSA_KEY = rsa.generate_private_key(65537, 2048)
RULES = TokenRules("https://id.example", (AUDIENCE,), "sub")


def signed(key: Any, alg: str, headers: dict[str, Any] | None = None, **claims: Any) -> str:
    given = {"iss": RULES.issuer, "aud": AUDIENCE, "exp": int(time.time()) + 600, "sub": "search", **claims}
    return jwt.encode(given, key, alg, headers={"kid": "k", **(headers or {})})


def name_in(token: str, *keys: dict[str, Any]) -> str:
    """Return the tenant that a token names, where the provider has these keys. Raises ApiError."""
    header = read_header(token)
    return verified(token, header, read_keys(json.dumps({"keys": keys}).encode())[header.kid], RULES).tenant


def test_each_kind_of_key_verifies_its_own_algorithms_alone() -> None:
    kinds: list[tuple[Any, set[str]]] = [
        (RSA_KEY, {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
        (ec.generate_private_key(ec.SECP256R1()), {"ES256"}),
        (ec.generate_private_key(ec.SECP384R1()), {"ES384"}),
        (ec.generate_private_key(ec.SECP521R1()), {"ES512"}),
        (ed25519.Ed25519PrivateKey.generate(), {"EdDSA"}),
    ]
    for key, algorithms in kinds:
        public = published(key, "k")
        for algorithm in algorithms:
            assert name_in(signed(key, algorithm), public) == "search"
        for other, others in kinds:
            if other is not key:
                with pytest.raises(ApiError, match="its key is not used with its algorithm"):
                    name_in(signed(other, min(others)), public)
    with pytest.raises(ApiError, match="its key is not used with its algorithm"):
        name_in(signed(RSA_KEY, "RS256"), published(RSA_KEY, "k", alg="PS256"))
    both = published(RSA_KEY, "k"), published(kinds[1][0], "k")
    assert name_in(signed(RSA_KEY, "PS512"), *both) == name_in(signed(kinds[1][0], "ES256"), *both) == "search"


def test_no_token_is_accepted_without_a_signature_or_with_one_that_everybody_can_make() -> None:
    public = published(RSA_KEY, "k")
    pem = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    header, payload, signature = signed(RSA_KEY, "RS256").split(".")
    forged = [f"{encoded({'alg': alg, 'kid': 'k'})}.{payload}." for alg in ("none", "None", "", "RS256", "HS256")]
    for secret in (pem, json.dumps(public).encode(), b""):
        head = encoded({"alg": "HS256", "kid": "k"})
        mac = hmac.digest(secret, f"{head}.{payload}".encode(), "sha256")
        forged.append(f"{head}.{payload}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}")
    other = published(rsa.generate_private_key(65537, 2048), "k")
    forged += [
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature[:-8]}",
        f"{header}.{encoded({'sub': 'all'})}.{signature}",
        f"{encoded({'alg': 'RS256', 'kid': 'k', 'jwk': other})}.{payload}.{signature}",
    ]
    for token in forged:
        assert is_token(token)
        with pytest.raises(ApiError) as caught:
            name_in(token, public)
        assert (caught.value.status, caught.value.code) == (401, "invalid_access_token")


@pytest.mark.parametrize(
    "head",
    [
        "e" * 9,
        encoded([]),
        encoded({"alg": "RS256"}),
        encoded({"kid": "k"}),
        encoded({"alg": 1, "kid": "k"}),
        encoded({"alg": "RS256", "kid": ["k"]}),
        base64.urlsafe_b64encode(b'{"alg":' + b"[" * 9000).decode(),
        "eyJ" + "A" * MAX_TOKEN,
        encoded({"alg": "RS256", "kid": "k", "crit": ["b64"], "b64": False}),
        encoded({"alg": "RS256", "kid": "k", "crit": []}),
    ],
)
def test_a_header_that_is_none_is_refused(head: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_header(f"{head}.e30.")
    assert caught.value.status == 401


@pytest.mark.parametrize("exp", [1e999, float("nan"), "soon", None, [], {}, -1, 10**400])
def test_an_end_that_is_no_time_is_refused(exp: object) -> None:
    payload = json.dumps({"iss": RULES.issuer, "aud": AUDIENCE, "exp": exp, "sub": "search"}).encode()
    token = jwt.api_jws.encode(payload, RSA_KEY, "RS256", headers={"kid": "k"})
    with pytest.raises(ApiError) as caught:
        name_in(token, published(RSA_KEY, "k"))
    assert caught.value.status == 401


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"\xff", b"[" * 9000, b'{"exp": 1'])
def test_signed_text_that_has_no_claims_is_refused(payload: bytes) -> None:
    token = jwt.api_jws.encode(payload, RSA_KEY, "RS256", headers={"kid": "k"})
    with pytest.raises(ApiError) as caught:
        name_in(token, published(RSA_KEY, "k"))
    assert caught.value.code == "invalid_access_token"


_PART = st.one_of(
    st.binary(max_size=60).map(lambda data: base64.urlsafe_b64encode(data).rstrip(b"=").decode()),
    st.dictionaries(
        st.sampled_from(["alg", "kid", "typ", "exp", "aud", "iss", "sub", "b64"]),
        st.sampled_from(["RS256", "none", "HS256", "k", 1, None, [], {}, "search", 10**30, AUDIENCE]),
    ).map(encoded),
)


@given(_PART, _PART, _PART)
def test_no_text_but_a_signed_token_names_a_tenant(head: str, payload: str, signature: str) -> None:
    keys = read_keys(json.dumps({"keys": [published(RSA_KEY, "k")]}).encode())
    token = f"{head}.{payload}.{signature}"
    with pytest.raises(ApiError) as caught:
        verified(token, read_header(token), keys["k"], RULES)
    assert caught.value.status == 401
    assert json.dumps(caught.value.headers).isascii()


def test_keys_that_may_not_sign_are_left_out() -> None:
    good = published(RSA_KEY, "good")
    private = jwt.algorithms.RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True)
    others: list[Any] = [
        {**good, "kid": "encrypts", "use": "enc"},
        {**good, "kid": "wraps", "key_ops": ["wrapKey"]},
        {**good, "kid": "symmetric", "alg": "HS256"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"},
        {**private, "kid": "private"},
        {**good, "kid": "number", "n": 7},
        {**good, "kid": ""},
        {**good, "kid": 7},
        {name: value for name, value in good.items() if name != "kid"},
        {**published(rsa.generate_private_key(65537, 1024), "short")},
        {**published(ec.generate_private_key(ec.SECP256K1()), "curve")},
        {**good, "kid": "kind", "kty": ["RSA"]},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "point"},
        7,
        [],
    ]
    assert set(read_keys(json.dumps({"keys": [*others, good]}).encode())) == {"good"}
    for document in (json.dumps({"keys": others}).encode(), b"{}", b'{"keys": {}}', b"\xff", b"[" * 5000, b""):
        with pytest.raises(KeySetError):
            read_keys(document)


def test_a_key_that_the_library_refuses_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only approved algorithms work."""

    def refuse(_: bytes) -> Any:
        raise UnsupportedAlgorithm("ed25519 is not supported")

    keys = [published(ed25519.Ed25519PrivateKey.generate(), "new"), published(RSA_KEY, "old")]
    monkeypatch.setattr(ed25519.Ed25519PublicKey, "from_public_bytes", refuse)
    assert set(read_keys(json.dumps({"keys": keys}).encode())) == {"old"}


@contextlib.asynccontextmanager
async def known_by(issuer: IdentityProvider, **options: Any) -> AsyncIterator[Identities]:
    """Identities of a provider whose keys are fetched when they are needed."""
    oidc = OidcOptions(issuer=issuer.issuer, audiences=(AUDIENCE,), **options)
    yield Identities(Provider(oidc), TokenRules(issuer.issuer, oidc.audiences, "sub"))


async def status_of(found: Identities, token: str) -> int:
    """Return 200, or the status of the error."""
    try:
        assert await found.tenant_name(token) == "search"
    except ApiError as error:
        return error.status
    return 200


async def test_unknown_keys_are_fetched_but_not_at_will(monkeypatch: pytest.MonkeyPatch) -> None:
    async with identity_provider() as issuer, known_by(issuer) as found:
        assert await status_of(found, issuer.token()) == 200
        for number in range(20):
            assert await status_of(found, issuer.token(kid=f"junk-{number}")) == 401
        assert issuer.fetches == 1, "the last fetch was a moment ago"
        new = ec.generate_private_key(ec.SECP256R1())
        issuer.keys = [published(new, "two")]
        old, fresh = issuer.token(), issuer.token(key=new, kid="two")
        assert await status_of(found, fresh) == 401
        monkeypatch.setattr(provider, "_LEAST_SECONDS", 0.0)
        assert await status_of(found, old) == 200
        statuses = await asyncio.gather(*(status_of(found, token) for token in [fresh] * 20))
        assert set(statuses) == {200}
        assert issuer.fetches == 2, "those who wait share a fetch"
        assert await status_of(found, old) == 401, "a token of a key that was withdrawn is not remembered"


async def test_the_last_keys_stay_while_the_provider_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provider, "_LEAST_SECONDS", 0.0)
    async with identity_provider() as issuer, known_by(issuer) as found:
        await issuer.stub.stop()
        assert await status_of(found, issuer.token()) == 503
        await issuer.stub.start()
        assert await status_of(found, issuer.token()) == 200
        lost: list[tuple[int, Any, dict[str, Any]]] = [
            (500, issuer.keys, {}),
            (302, issuer.keys, {}),
            (200, b"<html>", {}),
            (200, [], {}),
            (200, b" " * (600 << 10), {}),
            (200, issuer.keys, {"issuer": "https://other.example"}),
            (200, issuer.keys, {"jwks_uri": "http://other.example/keys"}),
            (200, issuer.keys, {"jwks_uri": 7}),
        ]
        good = issuer.keys
        for issuer.status, issuer.keys, issuer.discovery in lost:
            unknown = await status_of(found, issuer.token(kid="two"))
            assert unknown == 503, "the provider may have it by now"
            assert await status_of(found, issuer.token(jti="not seen before")) == 200
        await issuer.stub.stop()
        assert await status_of(found, issuer.token(jti="another one")) == 200
        await issuer.stub.start()
        issuer.status, issuer.keys, issuer.discovery = 200, good, {}
        assert await status_of(found, issuer.token(kid="two")) == 401
        assert found.provider.failures == len(lost) + 1
    assert "keeping its 1 keys" in caplog.text


async def test_no_document_of_the_provider_ends_the_gateway(tenants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes) -> Any:
        raise RuntimeError("a fault of a library")

    monkeypatch.setattr(provider, "read_keys", fail)
    async with (
        identity_provider() as issuer,
        stub_frontend("a") as stub,
        gateway_with(issuer, tenants, model=stub) as gateway,
    ):
        assert (await post(gateway, issuer.token())).code == "provider_unavailable"
        assert (await post(gateway, "sk-all")).status == 200
        assert issuer.fetches
        assert (await gateway.get("/ready")).status == 200


async def test_a_provider_that_is_lost_keeps_no_key_out(tenants: Path) -> None:
    async with identity_provider() as issuer, stub_frontend("a") as stub:
        await issuer.stub.stop()
        async with gateway_with(issuer, tenants, model=stub) as gateway:
            refused = await post(gateway, issuer.token())
            assert (refused.status, refused.code) == (503, "provider_unavailable")
            assert int(refused.headers["retry-after"]) > 0
            assert (await post(gateway, "sk-all")).status == 200
            await issuer.stub.start()

            async def is_accepted() -> bool:
                return (await post(gateway, issuer.token())).status == 200

            await until(is_accepted)
            assert "minisgl:gateway_identity_fetch_failures_total" in await gateway.metrics()


async def test_keys_may_be_at_a_url_that_is_given(tenants: Path) -> None:
    async with identity_provider() as issuer, known_by(issuer, jwks_url=f"{issuer.issuer}/keys") as found:
        assert await status_of(found, issuer.token()) == 200
        assert [request.path for request in issuer.stub.received] == ["/keys"]


async def test_tokens_are_remembered_up_to_a_number_and_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "_MAX_REMEMBERED", 3)
    calls: list[str] = []

    def counted(token: str, *rest: Any) -> Any:
        calls.append(token)
        return verified(token, *rest)

    monkeypatch.setattr(identities, "verified", counted)
    async with identity_provider() as issuer, known_by(issuer) as found:
        tokens = [issuer.token(jti=str(number)) for number in range(4)]
        for token in [*tokens[:3], *tokens[:3], tokens[0], tokens[3], tokens[0]]:
            assert await status_of(found, token) == 200
        assert calls == tokens, "each is verified once"
        assert len(found._remembered) == 3
        assert await status_of(found, tokens[1]) == 200
        assert calls[4:] == [tokens[1]], "it was the one that was not used for longest"
        late = issuer.token(exp=int(time.time()) - 1)
        for _ in range(2):
            assert await status_of(found, late) == 200
        assert calls[5:] == [late, late], "one that has ended is not remembered"


@pytest.mark.parametrize(
    ("oidc", "problem"),
    [
        ({"issuer": "https://id.example"}, "needs --oidc-audience"),
        ({"audiences": ("a",)}, "need --oidc-issuer"),
        ({"jwks_url": "https://id.example"}, "need --oidc-issuer"),
        *(
            ({"issuer": url, "audiences": ("a",)}, f"--oidc-issuer {url}")
            for url in (
                "http://id.example",
                "http://10.0.0.1",
                "http://localhost.example",
                "https://me@id.example",
                "https://id.example/#a",
                "https://id example",
                "https://[id",
                "https://id.example:99999",
                "file:///etc",
                "id.example",
            )
        ),
        ({"issuer": "https://id.example", "audiences": ("a",), "jwks_url": "http://id.example"}, "--oidc-jwks-url"),
    ],
)
def test_options_that_would_not_be_safe_are_refused(tenants: Path, oidc: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProviderError) as caught:
        GatewayServer(GatewayOptions(port=0, backends=("http://a",), keys=str(tenants), oidc=OidcOptions(**oidc)))
    assert problem in caught.value.message


def test_tokens_need_tenants() -> None:
    oidc = OidcOptions(issuer="https://id.example", audiences=("a",))
    with pytest.raises(ProviderError, match="--keys or --key-secrets"):
        GatewayServer(GatewayOptions(port=0, backends=("http://a",), oidc=oidc))
