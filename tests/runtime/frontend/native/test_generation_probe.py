"""GET /health_generate: healthy while tokens are generated, for itself or for others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.native import generation_probe
from minisgl.wire.messages import Abort, Ack, Failed, Submit
from support.frontend.fake_scheduler import STATUS, answer_with
from support.frontend.stack import FrontendStack, ids
from support.messages import status_of

MakeStack = Callable[..., FrontendStack]


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_probe, "_CHECK_SECONDS", 0.05)


def test_a_probe_generates_one_token_before_other_requests(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("ok"))
    response = stack.http.get("/health_generate")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    (submit,) = stack.scheduler.received(Submit)
    assert (submit.params.max_tokens, submit.priority, submit.params.temperature) == (1, 2**31 - 1, 0.0)
    assert stack.http.post("/health_generate").status_code == 405
    assert "x-minisgl-usage" not in response.headers
    response = stack.http.get("/health_generate", headers={"x-minisgl-report-usage": "1"})
    assert json.loads(response.headers["x-minisgl-usage"]) == {"prompt_tokens": 1, "completion_tokens": 1}


def test_a_probe_fails_when_nothing_is_generated(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_probe, "PROBE_SECONDS", 0.2)
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    response = stack.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stalled")
    (submit,) = stack.scheduler.received(Submit)
    assert stack.scheduler.wait_for(Abort)[0].id == submit.id, "nothing is left behind"
    assert stack.http.get("/load").json()["server_load"] == 0


def test_a_probe_reports_the_error_of_the_engine(stack: FrontendStack) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id), Failed(submit.id, "engine_error", "logits")]
    response = stack.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


@pytest.mark.parametrize("full", [False, True], ids=["queued", "full queue"])
def test_steps_for_other_requests_are_enough(make_stack: MakeStack, full: bool) -> None:
    stack = make_stack()
    steps = itertools.count(10, 5)

    def answer(submit: Submit) -> list[Ack | Failed]:
        # The engine continues with other requests while this one waits, or is refused.
        stack.scheduler.status = status_of(STATUS, running=1, steps=next(steps))
        return [Failed(submit.id, "queue_full", "full; retry later") if full else Ack(submit.id)]

    stack.scheduler.answer = answer
    response = stack.http.get("/health_generate", headers={"x-minisgl-report-usage": "1"})
    assert response.status_code == 200
    assert json.loads(response.headers["x-minisgl-usage"]) == {"prompt_tokens": 0, "completion_tokens": 0}


def test_a_probe_without_an_engine_fails_at_once(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(waiting=1))
    stack.scheduler.close()
    stack.wait_until_served(False)
    response = stack.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
