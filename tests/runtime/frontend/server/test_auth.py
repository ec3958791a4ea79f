"""API keys: valid ones, errors for others, and files that change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from minisgl.frontend.config import Access
from minisgl.frontend.server import auth
from minisgl.frontend.server.auth import KeyFile, KeyFileError
from minisgl.wire.messages import Submit
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import FrontendStack, ids

MakeStack = Callable[..., FrontendStack]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nsk-first alice\nsk-second\n")
    return path


@pytest.fixture(autouse=True)
def reload_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.0)


def test_a_key_has_the_name_from_the_file_or_its_line(keys: Path) -> None:
    file = KeyFile(keys)
    assert [file.key_name(key) for key in ("sk-first", "sk-second", "sk-third", "", "alice", "# ours")] == [
        "alice",
        "line 4",
        None,
        None,
        None,
        None,
    ]
    assert file.key_name("caf\u00e9\udcff") is None


def test_a_changed_file_is_read_again(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(keys)
    keys.write_text("sk-third carol\n")
    assert (file.key_name("sk-third"), file.key_name("sk-first")) == ("carol", None)
    replaced = keys.with_name("new")
    replaced.write_text("sk-fourth dave\n")
    os.replace(replaced, keys)
    assert (file.key_name("sk-fourth"), file.key_name("sk-third")) == ("dave", None)
    caplog.clear()
    keys.unlink()
    assert file.key_name("sk-fourth") == "dave", "a missing file changes nothing"
    keys.write_text("\n")
    assert file.key_name("sk-fourth") == "dave", "nor does an empty one"
    assert file.key_name("sk-fourth") == "dave"
    logged = [record for record in caplog.records if "keeping the previous keys" in record.message]
    assert 1 <= len(logged) <= 2, "each problem is logged once"


@pytest.mark.parametrize("content", [b"", b"# none\n", b"\xff\xfe"])
def test_a_file_without_keys_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=str(path)):
        KeyFile(path)
    with pytest.raises(KeyFileError, match="No such file"):
        KeyFile(tmp_path / "nowhere")


def test_requests_without_a_valid_key_are_rejected(make_stack: MakeStack, keys: Path) -> None:
    stack = make_stack(access=Access(api_keys=str(keys)))
    stack.scheduler.answer = answer_with(ids("ok"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    missing = stack.http.post("/v1/chat/completions", json=body)
    assert missing.status_code == 401
    assert missing.headers["www-authenticate"] == "Bearer"
    assert missing.headers["x-request-id"]
    error = missing.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "missing_api_key", None)
    for header in ("Bearer sk-other", "Bearer", "Basic sk-first", "sk-first", "Bearer sk-first sk-first"):
        wrong = stack.http.post("/v1/chat/completions", json=body, headers={"authorization": header})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key"), header
        assert "sk-" not in wrong.text, "the given key is not repeated"
    assert not stack.scheduler.received(Submit)
    assert stack.http.get("/v1/models").status_code == 401
    assert stack.http.get("/no/such/path").status_code == 401
    for path in ("/health", "/ping", "/ready", "/metrics"):
        assert stack.http.get(path).status_code == 200, path
    for path in ("/invocations", "/v1/tokenize", "/v1/detokenize", "/v1/responses/compact"):
        assert stack.http.post(path, json=body).status_code == 401, path
    client = openai.OpenAI(base_url=stack.openai_url, api_key="sk-first", max_retries=0)
    answer = client.chat.completions.create(model="org/tiny", messages=body["messages"], max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "ok"
    with pytest.raises(openai.AuthenticationError, match="invalid API key"):
        client.with_options(api_key="sk-other").models.list()
    keys.write_text("sk-other\n")
    assert stack.http.get("/v1/models", headers={"authorization": "bearer sk-other"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_cors_allows_listed_origins_only(make_stack: MakeStack, keys: Path) -> None:
    stack = make_stack(access=Access(api_keys=str(keys), cors_origins=("https://a.example",)))
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = stack.http.options("/v1/chat/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in allowed.headers
    other = stack.http.options("/v1/chat/completions", headers=preflight | {"origin": "https://b.example"})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "cors_refused")
    assert other.headers["x-request-id"] and "Origin" in other.headers["vary"]
    assert "access-control-allow-origin" not in other.headers
    assert re.search(r'request_errors_total{.*code="cors_refused"} 1$', stack.http.get("/metrics").text, re.MULTILINE)
    refused = stack.http.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example", "a page can read why"


def test_cors_allows_no_origin_by_default(make_stack: MakeStack) -> None:
    answer = make_stack().http.get("/health", headers={"origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
