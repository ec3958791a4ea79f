"""Texts of a response stream: on the fast path, or through the handler of the request."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.response_stream import Delta, ResponseStream
from minisgl.wire.text import Finished, ToolCallDelta

END = Finished(id=b"", reason="length", prompt_tokens=1, cached_tokens=0, completion_tokens=9)


class Handler:
    """Waits for deltas, with a fast path that takes texts meanwhile."""

    def __init__(self, stream: ResponseStream) -> None:
        self._exchange = stream
        self.taken: list[str] = []
        self.takes = True
        self.task: asyncio.Task[list[Delta]]

    async def wait(self) -> None:
        self.task = asyncio.create_task(self._exchange.deltas(self._take))
        await asyncio.sleep(0)

    def _take(self, text: str) -> bool:
        if self.takes:
            self.taken.append(text)
        return self.takes


def push(stream: ResponseStream, text: str, tokens: int) -> None:
    """Push a text of choice 0, which has `tokens` tokens now."""
    stream.choices[0].tokens = tokens
    stream.push(stream.choices[0], text, ())


@pytest.fixture
def stream() -> ResponseStream:
    return ResponseStream(0.0, [(b"r" * 16, 1)])


@pytest.fixture
async def handler(stream: ResponseStream) -> Handler:
    handler = Handler(stream)
    await handler.wait()
    return handler


async def test_texts_take_the_fast_path_while_the_handler_waits(stream: ResponseStream, handler: Handler) -> None:
    push(stream, "a", 1)
    push(stream, "b", 2)
    await asyncio.sleep(0)
    assert (handler.taken, handler.task.done()) == (["a", "b"], False)
    stream.finish(stream.choices[0], END)
    assert await handler.task == [Delta(0, "", 9, [], END)]


async def test_texts_stay_in_order_after_the_fast_path_declined_one(stream: ResponseStream, handler: Handler) -> None:
    handler.takes = False
    push(stream, "a", 1)
    handler.takes = True
    push(stream, "b", 2)
    assert await handler.task == [Delta(0, "ab", 2, [], None)]
    push(stream, "c", 3)
    assert handler.taken == [], "it does not wait"
    await handler.wait()
    assert await handler.task == [Delta(0, "c", 3, [], None)]
    await handler.wait()
    push(stream, "d", 4)
    assert handler.taken == ["d"]
    handler.task.cancel()


async def test_texts_do_not_overtake_what_wakes_the_handler(stream: ResponseStream, handler: Handler) -> None:
    stream.interrupt_silence(asyncio.get_running_loop().time())
    push(stream, "a", 1)
    assert await handler.task == [Delta(0, "a", 1, [], None)]
    await handler.wait()
    stream.fail(ApiError.from_code("engine_error", "it broke"))
    push(stream, "b", 2)
    with pytest.raises(ApiError, match="it broke"):
        await handler.task
    assert handler.taken == []


async def test_the_fast_path_ends_with_its_handler(stream: ResponseStream, handler: Handler) -> None:
    handler.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler.task
    push(stream, "a", 1)
    assert handler.taken == []


async def test_output_besides_text_waits_for_the_handler(stream: ResponseStream, handler: Handler) -> None:
    choice = stream.choices[0]
    push(stream, "a", 1)
    stream.push_step(choice, "", (), "th", [], [7])
    stream.push_step(choice, "", (), "ink", [ToolCallDelta(0, "call_1", "f", "")], [8, 9])
    push(stream, "b", 4)
    calls = [ToolCallDelta(0, "call_1", "f", "")]
    assert handler.taken == ["a"]
    first = Delta(0, "", 4, [], None, "think", tuple(calls), (7, 8, 9))
    assert await handler.task == [first, Delta(0, "b", 4, [], None)]
    stream.push_step(choice, "", (), "", [ToolCallDelta(0, "", "", "{}")], [])
    stream.finish(choice, END)
    assert (await stream.deltas())[0].tool_calls == (ToolCallDelta(0, "", "", "{}"),)


async def test_joined_output_keeps_its_order(stream: ResponseStream) -> None:
    choice = stream.choices[0]
    call = ToolCallDelta(0, "call_1", "f", "{}")
    stream.push_step(choice, "a", (), "why", [], [])
    stream.push_step(choice, "", (), "", [call], [7])
    push(stream, "b", 3)
    push(stream, "c", 4)
    stream.push_step(choice, "", (), "because", [], [])
    stream.push_step(choice, "d", (), "", [], [8])
    stream.finish(choice, END)
    expected = [("why", "a", (call,)), ("", "bc", ()), ("because", "d", ())]
    (whole,) = await stream.complete()
    assert [(delta.reasoning, delta.text, delta.tool_calls) for delta in whole.joined] == expected
    assert (whole.reasoning, whole.text, whole.tool_calls, whole.token_ids) == ("whybecause", "abcd", (call,), (7, 8))
    assert whole.finished == END
    push(stream, "e", 5)
    push(stream, "f", 6)
    assert [(delta.text, delta.finished) for delta in await stream.deltas()] == [("ef", END)]


async def test_output_besides_text_has_a_fast_path_of_its_own(stream: ResponseStream) -> None:
    taken: list[str | Delta] = []
    takes = True

    def take(output: str | Delta) -> bool:
        if takes:
            taken.append(output)
        return takes

    task = asyncio.create_task(stream.deltas(take, take))
    await asyncio.sleep(0)
    choice = stream.choices[0]
    calls = [ToolCallDelta(0, "call_1", "f", "{}")]
    choice.tokens = 3
    stream.push_step(choice, "", (), "why", (), ())
    push(stream, "a", 4)
    stream.push_step(choice, "", (), "", calls, [7])
    assert taken == [Delta(0, "", 3, (), None, "why"), "a", Delta(0, "", 4, (), None, "", calls, [7])]
    assert stream.unsent_characters == len("why" + "a" + "{}")
    takes = False
    stream.push_step(choice, "", (), "hm", (), ())
    takes = True
    push(stream, "b", 5)
    assert await task == [Delta(0, "b", 5, [], None, "hm")], "what follows declined output waits behind it"
    assert len(taken) == 3


async def test_scores_and_ids_of_a_prompt_go_through_the_handler(stream: ResponseStream) -> None:
    taken: list[Delta] = []
    choice = stream.choices[0]
    choice.unread.prompt_token_ids = (1, 2)
    task = asyncio.create_task(stream.deltas(None, lambda delta: taken.append(delta) is None))
    await asyncio.sleep(0)
    stream.push_step(choice, "a", (), "", (), (7,))
    (delta,) = await task
    assert (delta.prompt_token_ids, delta.token_ids, taken) == ((1, 2), (7,), [])


@pytest.mark.parametrize("more", [False, True])
async def test_output_that_cannot_be_rendered_fails_its_response_alone(stream: ResponseStream, more: bool) -> None:
    task = asyncio.create_task(stream.deltas(lambda _: bool(1 / 0), lambda _: bool(1 / 0)))
    await asyncio.sleep(0)
    if more:
        stream.push_step(stream.choices[0], "", (), "why", (), ())
    else:
        push(stream, "a", 1)
    with pytest.raises(ApiError) as raised:
        await task
    assert raised.value.code == "internal_error"
