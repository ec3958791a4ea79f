"""`LLM`: scheduler and engine of `serve` in the caller's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import msgspec
import numpy as np

from minisgl.config import Device, DeviceChoice, EngineArgs, EngineConfig, Task, engine_config
from minisgl.engine.interface import Engine, EngineLimits, EngineStats
from minisgl.hub.resolve import resolve
from minisgl.launcher.devices import choose_device
from minisgl.launcher.rank_specs import file_rendezvous, ipc_plans, rank_specs
from minisgl.launcher.ranks import constraint_compiler, start_rank0
from minisgl.launcher.run_directory import run_directory
from minisgl.launcher.worker_ranks import WorkerRanks
from minisgl.offline.batch_outputs import BatchOutputs
from minisgl.offline.interrupt import defer_interrupts
from minisgl.offline.outputs import OfflineError, Output
from minisgl.offline.pooled_outputs import Outputs, PooledOutputs, cut_embeddings
from minisgl.offline.prompts import (
    Constraints,
    Message,
    Params,
    Prompt,
    pair_requests,
    pooling_requests,
    pools_from_tokens,
    requests_from_chats,
    requests_from_prompts,
    submits_from_tokens,
)
from minisgl.offline.tokenizer import OfflineTokenizer
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import RequestError
from minisgl.tokenizer.model_files import load_model_files
from minisgl.wire.messages import Counters, Pool, SamplingParams, Submit
from minisgl.wire.text import Generate, Pooling

AnyOutputs = TypeVar("AnyOutputs", BatchOutputs, PooledOutputs)

_PROGRESS_FROM: Final = 8
"""Number of requests from which a progress bar is shown by default."""

_DEATH_SECONDS: Final = 2.0
"""Time after an engine's error in which the death of another rank is looked for: it is the likely cause."""


class LLM:
    """A model in this process. Not thread-safe. Close it, or use it in a `with` statement.

    `model` is a checkpoint directory or a Hub id. `options` are the engine options of `minisgl serve`: `tp=2` is
    `--tp 2`, `overlap=False` is `--no-overlap`. With `detokenize=False` no tokenizer files are needed: prompts are
    token ids, outputs have no text, and stop strings cannot be used.

    Raises a CodedError when model, device or options are invalid: ConfigError names the option.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: DeviceChoice = "auto",
        detokenize: bool = True,
        **options: Unpack[EngineArgs],
    ) -> None:
        directory = resolve(os.fspath(model), revision, with_weights=not options.get("dummy_weights"))
        config = engine_config(str(directory), options)
        self.device: Device = choose_device(device, config.tensor_parallel)
        self.tensor_parallel = config.tensor_parallel
        config = msgspec.structs.replace(config, device=self.device)
        self._closed = False
        self._broken = ""
        files = load_model_files(directory) if detokenize else None
        self._recommended = SamplingParams()
        if files is not None:
            self._recommended = msgspec.structs.replace(self._recommended, **msgspec.structs.asdict(files.defaults))
        self._worker_ranks: WorkerRanks | None = None
        with ExitStack() as stack:
            self._engine = self._start_engine(config, stack)
            # Within calls there is none.
            while self._engine.use_idle_time():
                pass
            compiler = constraint_compiler(config)
            if compiler is not None:
                stack.callback(compiler.close)
            self._scheduler = Scheduler(scheduler_config(config, self._engine.limits), compiler=compiler)
            self._loop = StepLoop(self._scheduler, self._engine)
            self._text = None if files is None else OfflineTokenizer(files, self._engine.limits)
            self._resources = stack.pop_all()

    def _start_engine(self, config: EngineConfig, stack: ExitStack) -> Engine:
        plans: dict[int, str] = {}
        if config.tensor_parallel > 1:
            directory = stack.enter_context(run_directory())
            config = msgspec.structs.replace(config, rendezvous=file_rendezvous(directory))
            ranks = range(config.tensor_parallel)
            plans = ipc_plans(directory, ranks)
            self._worker_ranks = WorkerRanks(rank_specs(config, ranks, plans))
            stack.callback(self._worker_ranks.close)
        try:
            engine = start_rank0(config, tuple(plans.values()))
        except Exception:
            self._check_worker_ranks(_DEATH_SECONDS)
            raise
        stack.callback(engine.close)
        return engine

    @property
    def limits(self) -> EngineLimits:
        """Sizes of pool, tables and vocabulary."""
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
        params: Params | None = None,
        *,
        structured_output: Constraints = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue one text, or several texts or lists of token ids; returns one output per prompt, in their order.

        `params`: parameters of all prompts, or one entry per prompt; None: those that the checkpoint recommends.
        `structured_output`: constraint of all answers, or one entry per prompt, such as
        `StructuredOutput("json", schema)`; it needs the checkpoint's tokenizer.
        `progress`: show a progress bar; None: only for long batches on a terminal. Raises OfflineError before the
        first step when a prompt cannot be served.
        """
        params = self._recommended if params is None else params
        return self._run(requests_from_prompts(prompts, params, structured_output), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        structured_output: Constraints = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer one conversation or several; otherwise as `generate`."""
        params = self._recommended if params is None else params
        return self._run(requests_from_chats(messages, params, structured_output), progress)

    def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        prompt_name: str = "",
        dimensions: int | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> Outputs:
        """Embed one text, or several texts or lists of token ids. Returns float32 [texts, dimensions], in their order.

        `prompt_name`: name of a prompt of the checkpoint that precedes each text, such as that of queries.
        `dimensions`: keep the first ones only, and normalize again. `truncate`: cut texts that are too long. Raises
        OfflineError before the first step when a text cannot be served, or the model has another task.
        """
        self._check_task("embed")
        outputs = self._pool(pooling_requests(texts, Pooling(prompt_name=prompt_name), truncate), progress)
        return outputs if dimensions is None else cut_embeddings(outputs, dimensions)

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> Outputs:
        """Score each document for a query. Returns float32 [documents]. `instruction`: what makes a document relevant,
        for models that take one. `truncate`: cut documents where a pair is too long. Raises as `embed`."""
        self._check_task("rerank")
        return self._pool(pair_requests(query, documents, instruction, truncate), progress)[:, 0]

    def classify(
        self, texts: str | Sequence[Prompt], *, truncate: bool = False, progress: bool | None = None
    ) -> Outputs:
        """Probabilities of the model's classes (`limits.pooling.labels`). Returns float32 [texts, classes]. `truncate`
        and errors as `embed`."""
        self._check_task("classify")
        return self._pool(pooling_requests(texts, Pooling(), truncate), progress)

    def close(self) -> None:
        """Free the device and stop the other ranks."""
        self._closed = True
        with self._waiting_for_worker_ranks():
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: list[Generate], progress: bool | None) -> list[Output]:
        self._check_open()
        submits = self._text.submits(requests) if self._text else submits_from_tokens(requests, self.limits)
        outputs = self._served(submits, lambda: BatchOutputs(submits), progress)
        if self._text:
            return self._text.outputs(submits, outputs)
        return [outputs.output(number) for number in range(len(submits))]

    def _pool(self, requests: list[Generate], progress: bool | None) -> Outputs:
        self._check_open()
        assert self.limits.pooling is not None, "the task was checked"
        pools = self._text.pools(requests) if self._text else pools_from_tokens(requests)
        size = self.limits.pooling.size
        return self._served(pools, lambda: PooledOutputs(len(pools), size), progress).values()

    def _check_open(self) -> None:
        """Raises OfflineError."""
        if self._closed:
            raise OfflineError("closed", "this LLM is closed; create a new one")
        if self._broken:
            raise OfflineError(
                "broken", f"an earlier call failed in the middle of a step ({self._broken}); create a new LLM"
            )

    def _check_task(self, task: Task) -> None:
        """Raises OfflineError."""
        served = self.limits.task
        if served != task:
            raise OfflineError("wrong_task", f"the model was loaded for the task {served}; use LLM(..., task={task!r})")

    def _served(
        self, submits: Sequence[Submit | Pool], new: Callable[[], AnyOutputs], progress: bool | None
    ) -> AnyOutputs:
        """Serve all requests of a call. `new` makes what takes their outputs."""
        try:
            # First: the scheduler refuses lengths that no memory could hold.
            self._queue(submits)
            outputs = new()
            self._answer(outputs, progress, len(submits))
            return outputs
        except (OfflineError, KeyboardInterrupt):
            self._abort_all(submits)
            raise
        except BaseException as error:
            self._broken = repr(error)
            if isinstance(error, Exception):
                self._check_worker_ranks(_DEATH_SECONDS)
            raise

    def _queue(self, submits: Sequence[Submit | Pool]) -> None:
        """Queue all requests in the order given. Raises OfflineError for one that cannot be served."""
        for number, submit in enumerate(submits):
            try:
                self._scheduler.submit(submit, number)
            except RequestError as error:
                raise OfflineError(error.code, f"prompt {number}: {error}") from error

    def _answer(self, outputs: BatchOutputs | PooledOutputs, progress: bool | None, requests: int) -> None:
        """Run until each request has finished."""
        with (
            _progress_bar(requests, progress) as bar,
            defer_interrupts() as check_interrupt,
            self._waiting_for_worker_ranks(),
        ):
            while self._scheduler.has_work:
                check_interrupt()
                self._check_worker_ranks()
                output = self._loop.step()
                if output is not None:
                    outputs.take(output)
                    decodes = self._text is not None and output.pooled is None
                    stopped = self._text.take(output, self._scheduler) if self._text and decodes else 0
                    bar.update(int(np.count_nonzero(output.finish)) + len(output.failures) + stopped)
            check_interrupt()

    def _abort_all(self, submits: Sequence[Submit | Pool]) -> None:
        """Remove all requests of an interrupted call, so that the next call starts with an empty batch."""
        if self._text:
            self._text.abort_all()
        for submit in submits:
            self._scheduler.abort(submit.id)
        with self._waiting_for_worker_ranks():
            while self._scheduler.has_work:
                self._loop.step()

    def _waiting_for_worker_ranks(self) -> AbstractContextManager[None]:
        return nullcontext() if self._worker_ranks is None else self._worker_ranks.waiting_for_ranks()

    def _check_worker_ranks(self, patience: float = 0.0) -> None:
        if self._worker_ranks is not None:
            self._worker_ranks.check(patience)


def _progress_bar(requests: int, wanted: bool | None) -> Any:
    from tqdm import tqdm

    show = sys.stderr.isatty() and requests >= _PROGRESS_FROM if wanted is None else wanted
    return tqdm(total=requests, unit="request", disable=not show)
