"""`LLM`: the scheduler and the engine of `serve` in the caller's process, without a server."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Literal, Self, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.config import CacheKind, ConfigError, Device, DType, EngineConfig, SchedulerConfig, checked
from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.launcher.devices import choose_device, default_page_size
from minisgl.launcher.followers import Followers
from minisgl.launcher.model_files import resolve
from minisgl.launcher.ranks import FollowerConfig, follower_configs, follower_spec, rank0_config, start_rank0
from minisgl.launcher.run_directory import run_directory
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.outcome import Counters, RequestError, StepOutput
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.model_files import ModelFiles, load_model_files
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.tokenizer.session import Session, submit_message
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import (
    FINISH_REASONS,
    REQUEST_ID_BYTES,
    Failed,
    ModelCard,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Tokens,
)
from minisgl.wire.text import ChatMessage, Finished, Generate, TextFailed, Texts

Prompt = str | Sequence[int]
Message = Mapping[str, str]
"""`{"role": "user", "content": "…"}`"""

_PROGRESS_FROM: Final = 8
"""Requests from which on a progress bar is worth its line."""

_DEATH_SECONDS: Final = 2.0
"""After an engine's error, how long the death of another rank may take to be known: it is the better explanation."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    completion_tokens: int


class Logprob(msgspec.Struct, frozen=True):
    """Of one token, given those before it: in the raw distribution, before temperature, penalties and biases."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The likeliest tokens by id, best first; as many as were asked for."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt."""

    text: str
    token_ids: list[int]
    """Sampled tokens, with the one that ended the answer."""
    finish_reason: Literal["stop", "length", "error"]
    usage: Usage
    error: str = ""
    """Why the answer is not complete, when `finish_reason` is `error`."""
    logprobs: list[Logprob] | None = None
    """Of each of `token_ids`; None: not asked for."""
    prompt_logprobs: list[Logprob] | None = None
    """Of the prompt's tokens but the first, which has none; None: not asked for."""


class OfflineError(Exception):
    """A prompt or parameter that cannot be served. `code` is stable; the message names the prompt by its index."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LLM:
    """A model in this process. Not for use by several threads at once; close it, or use it in a `with` statement.

    `model` is a checkpoint directory or a Hub id; the options are those of `minisgl serve`. With `detokenize=False`
    no tokenizer files are needed: prompts are token ids, answers have no text, stop strings cannot be used.

    Raises what is wrong with model, device or options: errors with a stable `code` and a message for people.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tp: int = 1,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: DType = "auto",
        max_running: int = 256,
        max_model_len: int | None = None,
        max_step_tokens: int = 8192,
        page_size: int | None = None,
        num_pages: int | None = None,
        memory_fraction: float = 0.9,
        cache: CacheKind = "radix",
        overlap: bool = True,
        attention_backend: str = "auto",
        cuda_graph_max_batch: int | None = None,
        dummy_weights: bool = False,
        audit: bool = False,
        detokenize: bool = True,
    ) -> None:
        directory = resolve(os.fspath(model), revision, with_weights=not dummy_weights)
        _check_choice("device", device, ("auto", "cpu", "cuda"))
        _check_choice("cache", cache, get_args(CacheKind))
        given = checked(
            EngineConfig(
                model=str(directory),
                dtype=dtype,
                tensor_parallel=tp,
                page_size=1 if page_size is None else page_size,
                num_pages=num_pages,
                memory_fraction=memory_fraction,
                max_running=max_running,
                max_model_len=max_model_len,
                max_step_tokens=max_step_tokens,
                attention_backend=attention_backend,
                cuda_graph_max_batch=cuda_graph_max_batch,
                dummy_weights=dummy_weights,
                audit=audit,
            )
        )
        chosen = choose_device(device, tp)
        config = msgspec.structs.replace(
            given, device=chosen, page_size=default_page_size(chosen) if page_size is None else page_size
        )
        self._closed = False
        self.device: Device = chosen
        self.tensor_parallel = tp
        files = load_model_files(directory) if detokenize else None
        self._recommended = SamplingParams()
        if files is not None:
            self._recommended = msgspec.structs.replace(self._recommended, **msgspec.structs.asdict(files.defaults))
        self._followers: Followers | None = None
        with ExitStack() as stack:
            self._engine = self._start_engine(config, stack)
            self._scheduler = Scheduler(_scheduler_config(config, self._engine.limits, cache, overlap))
            self._loop = StepLoop(self._scheduler, self._engine)
            self._text = None if files is None else _TextRoom(files, self._engine.limits)
            self._resources = stack.pop_all()

    def _start_engine(self, config: EngineConfig, stack: ExitStack) -> Engine:
        followers: list[FollowerConfig] = []
        if config.tensor_parallel > 1:
            directory = stack.enter_context(run_directory())
            config = rank0_config(config, directory)
            followers = follower_configs(config, directory)
            self._followers = Followers([follower_spec(follower) for follower in followers])
            stack.callback(self._followers.close)
        try:
            engine = start_rank0(config, [follower.plans for follower in followers])
        except Exception:
            self._check_followers(_DEATH_SECONDS)
            raise
        stack.callback(engine.close)
        return engine

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        """Counters of rank 0's engine."""
        return self._engine.stats

    @property
    def counters(self) -> Counters:
        """Counters of the scheduler."""
        return self._scheduler.counters

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue one text, or several texts or lists of token ids; answers come in the order of the prompts.

        `params`: for all of them, or one each; None: what the checkpoint recommends. `progress` shows a bar; None:
        for long batches on a terminal. Raises OfflineError before anything runs when a prompt cannot be served.
        """
        given = [prompts] if isinstance(prompts, str) else _checked_prompts(prompts)
        wanted = self._params(params, len(given))
        return self._run([_generate(*each) for each in zip(range(len(given)), given, wanted, strict=True)], progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer one conversation, or several; otherwise as `generate`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        wanted = self._params(params, len(conversations))
        numbers = range(len(conversations))
        return self._run([_generate_chat(*each) for each in zip(numbers, conversations, wanted, strict=True)], progress)

    def close(self) -> None:
        """Free the device and end the other ranks."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None:
            params = self._recommended
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each) != count:
            raise OfflineError("invalid_request", f"there are {count} prompts, but {len(each)} sampling parameters")
        for number, one in enumerate(each):
            if not isinstance(one, SamplingParams):
                raise OfflineError(
                    "invalid_request", f"prompt {number}: its parameters are no SamplingParams, but {one!r:.80}"
                )
            try:
                checked(one)
            except ConfigError as error:
                raise OfflineError("invalid_request", f"prompt {number}: {error}") from error
            if one.max_tokens is not None and one.max_tokens < 1:
                raise OfflineError("invalid_request", f"prompt {number}: max_tokens: expected 1 or more")
        return each

    def _run(self, generates: list[Generate], progress: bool | None) -> list[Output]:
        if self._closed:
            raise OfflineError("closed", "this LLM is closed: make a new one")
        submits = self._text.submits(generates) if self._text else [_submit(g, self.limits) for g in generates]
        answers = _Answers(submits)
        try:
            for number in _order(submits):
                try:
                    self._scheduler.submit(submits[number], number)
                except RequestError as error:
                    raise OfflineError(error.code, f"prompt {number}: {error}") from error
            with _progress_bar(len(submits), progress) as bar, _interrupted_between_steps() as check_interrupt:
                while self._scheduler.has_work:
                    check_interrupt()
                    self._check_followers()
                    output = self._loop.step()
                    if output is not None:
                        answers.take(output)
                        stopped = self._text.take(output, self._scheduler) if self._text else 0
                        bar.update(int(np.count_nonzero(output.finish)) + len(output.failures) + stopped)
        except (OfflineError, KeyboardInterrupt):
            self._abandon(submits)
            raise
        except Exception:
            self._check_followers(_DEATH_SECONDS)
            raise
        if self._text:
            return self._text.outputs(submits, answers)
        return [answers.output(number) for number in range(len(submits))]

    def _abandon(self, submits: Sequence[Submit]) -> None:
        """Nothing of an interrupted call stays in the batch, so the next call is as the first."""
        if self._text:
            self._text.abandon()
        for submit in submits:
            self._scheduler.abort(submit.id)
        while self._scheduler.has_work:
            self._loop.step()

    def _check_followers(self, patience: float = 0.0) -> None:
        if self._followers is not None:
            self._followers.check(patience)


def _order(submits: Sequence[Submit]) -> list[int]:
    """Numbers of the requests in the order in which they are to run.

    Where all lengths are known the longest answers go first: a batch that ends with its longest answer alone leaves the
    device to a single row. Otherwise as they were given.
    """
    numbers = list(range(len(submits)))
    if all(submit.ignore_eos for submit in submits):
        numbers.sort(key=lambda number: -submits[number].max_tokens)
    return numbers


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _checked_prompts(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Raises OfflineError for what is neither a text nor a list of token ids."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise OfflineError("invalid_request", f"prompts: expected a text or a list of prompts, got {prompts!r:.80}")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        if isinstance(prompt, int):
            raise OfflineError("invalid_request", "prompts: token ids of one prompt are a list in the list: [[1, 2]]")
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence | np.ndarray):
            raise OfflineError(
                "invalid_request", f"prompt {number}: expected a text or a list of token ids, got {prompt!r:.80}"
            )
        if not len(prompt):
            raise OfflineError("empty_prompt", f"prompt {number}: a list of no token ids")
    return prompts


class _Answers:
    """The sampled tokens of all requests of a call in one array: a step is taken in without a loop over its rows.

    A request's number is its index in the call; the scheduler carries it as the request's client.
    """

    def __init__(self, submits: Sequence[Submit]) -> None:
        room = np.array([submit.max_tokens for submit in submits], np.int64)
        self._prompts = [np.frombuffer(submit.prompt, "<i4") for submit in submits]
        self._logprobs: dict[int, list[Logprob]] = {i: [] for i, each in enumerate(submits) if each.logprobs >= 0}
        self._of_prompts: dict[int, list[Logprob]] = {
            i: [] for i, each in enumerate(submits) if each.prompt_logprobs >= 0
        }
        self._start = np.cumsum(room) - room
        self._tokens = np.empty(int(room.sum()), np.int32)
        self._count = np.zeros(len(submits), np.int64)
        self._cached = np.zeros(len(submits), np.int64)
        self._finish = np.zeros(len(submits), np.uint8)
        self._errors: dict[int, str] = {}

    def take(self, output: StepOutput) -> None:
        rows = output.client
        self._tokens[self._start[rows] + output.index] = output.tokens
        self._count[rows] = output.index + 1
        self._cached[rows] = output.cached
        self._finish[rows] = output.finish
        self._errors.update((failure.client, failure.message) for failure in output.failures)
        for row, logprobs in output.logprobs.items():
            self._logprobs[int(rows[row])] += _logprobs(output.tokens[row : row + 1], logprobs)
        for number, prompt in output.prompt_logprobs:
            tokens = self._prompts[number][prompt.start :]
            self._of_prompts[number] += _logprobs(tokens[: len(prompt.logprobs.chosen) // 4], prompt.logprobs)

    def output(self, number: int, text: str = "", ended: Finished | None = None) -> Output:
        """`ended`: what the text says of the end, which a stop string brings about earlier than the scheduler."""
        count = int(self._count[number]) if ended is None else ended.completion_tokens
        start = int(self._start[number])
        error = self._errors.get(number, "")
        reason = "error" if error else FINISH_REASONS[self._finish[number]] if ended is None else ended.reason
        assert reason in ("stop", "length", "error"), "every request of a call has ended"
        return Output(
            text=text,
            token_ids=self._tokens[start : start + count].tolist(),
            finish_reason=cast(Literal["stop", "length", "error"], reason),
            usage=Usage(
                prompt_tokens=len(self._prompts[number]),
                cached_tokens=int(self._cached[number]),
                completion_tokens=count,
            ),
            error=error,
            logprobs=self._logprobs[number][:count] if number in self._logprobs else None,
            prompt_logprobs=self._of_prompts.get(number),
        )


def _logprobs(tokens: NDArray[np.int32], columns: TokenLogprobs) -> list[Logprob]:
    count = len(tokens)
    chosen = np.frombuffer(columns.chosen, "<f4").tolist()
    ids = np.frombuffer(columns.top_ids, "<i4").reshape(count, -1).tolist()
    values = np.frombuffer(columns.top, "<f4").reshape(count, -1).tolist()
    tops = [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    return [Logprob(*each) for each in zip(tokens.tolist(), chosen, tops, strict=True)]


class _TextRoom:
    """The tokenizer room without its process: prompts in, texts out, stop strings in between."""

    def __init__(self, files: ModelFiles, limits: EngineLimits) -> None:
        self._encoder = PromptEncoder(files)
        self._session = Session(TokenBytes(files.tokenizer))
        self._session.welcome(
            ModelCard(
                name="",
                revision="",
                max_model_len=limits.max_model_len,
                vocab_size=limits.vocab_size,
                eos_token_ids=limits.eos_token_ids,
                tokenizer_hashes=files.hashes,
            )
        )
        self._texts: dict[bytes, list[str]] = {}
        self._ended: dict[bytes, Finished] = {}

    def submits(self, generates: Sequence[Generate]) -> list[Submit]:
        """Raises OfflineError for the first prompt that cannot be served."""
        self._texts = {generate.id: [] for generate in generates}
        self._ended = {}
        for generate, prompt in zip(generates, self._encoder.encode(generates), strict=True):
            self._session.begin(generate)
            self._session.encoded(generate.id, prompt)
        refused = [message for message in self._session.take_to_frontend() if isinstance(message, TextFailed)]
        if refused:
            number = next(i for i, generate in enumerate(generates) if generate.id == refused[0].id)
            self.abandon()
            raise OfflineError(refused[0].code, f"prompt {number}: {refused[0].message}")
        return [message for message in self._session.take_to_scheduler() if isinstance(message, Submit)]

    def take(self, output: StepOutput, scheduler: Scheduler) -> int:
        """The texts of a step; requests that met a stop string are aborted: how many."""
        for failure in output.failures:
            self._session.failed(Failed(failure.id, failure.code, failure.message))
        if len(output.client):
            self._session.tokens(
                Tokens(
                    ids=output.ids.tobytes(),
                    index=output.index.tobytes(),
                    token=output.tokens.tobytes(),
                    finish=output.finish.tobytes(),
                    cached=output.cached.tobytes(),
                    logprobs=output.logprobs,
                )
            )
        for message in self._session.take_to_frontend():
            if isinstance(message, Texts):
                for request_id, text in message.rows():
                    self._texts[request_id].append(text)
                self._ended.update((finished.id, finished) for finished in message.finished)
        return sum(scheduler.abort(message.id) for message in self._session.take_to_scheduler())

    def outputs(self, submits: Sequence[Submit], answers: _Answers) -> list[Output]:
        return [
            answers.output(number, "".join(self._texts[submit.id]), self._ended.get(submit.id))
            for number, submit in enumerate(submits)
        ]

    def abandon(self) -> None:
        self._session.abandoned()
        self._session.take_to_scheduler()


def _scheduler_config(config: EngineConfig, limits: EngineLimits, cache: CacheKind, overlap: bool) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_running=limits.max_running,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_step_tokens=config.max_step_tokens,
        overlap=overlap,
        cache=cache,
        eos_token_ids=limits.eos_token_ids,
        audit=config.audit,
    )


def _generate(number: int, prompt: Prompt, params: SamplingParams) -> Generate:
    _check_stop(params)
    if isinstance(prompt, str):
        return Generate(id=os.urandom(REQUEST_ID_BYTES), prompt=prompt, params=params)
    try:
        tokens = array("i", prompt).tobytes()
    except (TypeError, OverflowError) as error:
        raise OfflineError("invalid_prompt", f"prompt {number} is neither a text nor token ids: {error}") from error
    return Generate(id=os.urandom(REQUEST_ID_BYTES), tokens=tokens, params=params)


def _generate_chat(number: int, messages: Sequence[Message], params: SamplingParams) -> Generate:
    _check_stop(params)
    try:
        turns = msgspec.convert(list(messages), tuple[ChatMessage, ...])
    except msgspec.ValidationError as error:
        raise OfflineError("invalid_prompt", f"conversation {number}: {error}") from error
    return Generate(id=os.urandom(REQUEST_ID_BYTES), messages=turns, params=params)


def _check_stop(params: SamplingParams) -> None:
    if isinstance(params.stop, str) or not all(isinstance(stop, str) and stop for stop in params.stop):
        raise OfflineError("invalid_request", f"stop is a tuple of texts that are not empty, not {params.stop!r}")


def _submit(generate: Generate, limits: EngineLimits) -> Submit:
    """A prompt of token ids on its own, without the tokenizer room."""
    params = generate.params
    if generate.tokens is None or params.stop:
        raise OfflineError("no_tokenizer", "with detokenize=False prompts are token ids, and there are no stop strings")
    return submit_message(
        generate,
        generate.tokens,
        max_tokens=params.max_tokens or limits.max_model_len - len(generate.tokens) // 4,
        seed=random.getrandbits(63) if params.seed is None else params.seed,
    )


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect where the yielded function is called: in the middle of a step it would leave scheduler and
    engine apart. A second Ctrl-C does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    arrived = False

    def on_signal(*_: object) -> None:
        nonlocal arrived
        arrived = True
        signal.signal(signal.SIGINT, previous)

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


def _progress_bar(requests: int, wanted: bool | None) -> Any:
    from tqdm import tqdm

    show = sys.stderr.isatty() and requests >= _PROGRESS_FROM if wanted is None else wanted
    return tqdm(total=requests, unit="request", disable=not show)
