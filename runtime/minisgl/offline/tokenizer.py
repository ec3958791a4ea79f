"""The tokenizer of `LLM`, in the same process."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from minisgl.engine.interface import EngineLimits
from minisgl.offline.batch_outputs import BatchOutputs
from minisgl.offline.outputs import OfflineError, Output
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.tokenizer.model_files import ModelFiles
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import Abort, Failed, ModelCard, Pool, Submit, Tokens
from minisgl.wire.text import Finished, Generate, TextFailed, Texts


class OfflineTokenizer:
    """Encodes the prompts of a call and decodes its answers; finds stop strings."""

    def __init__(self, files: ModelFiles, limits: EngineLimits) -> None:
        self._encoder = PromptEncoder(files)
        self._session = Session(TokenBytes(files.tokenizer))
        self._session.open(
            ModelCard(
                name="",
                revision="",
                max_model_len=limits.max_model_len,
                vocab_size=limits.vocab_size,
                eos_token_ids=limits.eos_token_ids,
                tokenizer_hashes=files.hashes,
                task=limits.task,
                output_size=0 if limits.pooling is None else limits.pooling.size,
            )
        )
        self._texts: dict[bytes, list[str]] = {}
        self._ended: dict[bytes, Finished] = {}

    def pools(self, requests: Sequence[Generate]) -> list[Pool]:
        """Messages for the scheduler, whose outputs are numbers: nothing has to be decoded. Raises as `submits`."""
        pools = [message for message in self._encoded(requests) if isinstance(message, Pool)]
        self.abort_all()
        return pools

    def submits(self, requests: Sequence[Generate]) -> list[Submit]:
        """Messages for the scheduler. Raises OfflineError for the first prompt that cannot be served."""
        self._texts = {request.id: [] for request in requests}
        self._ended = {}
        submits = [message for message in self._encoded(requests) if isinstance(message, Submit)]
        wanted = [request.params.prompt_logprobs for request in requests]
        return [
            submit if count is None else replace(submit, params=replace(submit.params, prompt_logprobs=count))
            for submit, count in zip(submits, wanted, strict=True)
        ]

    def _encoded(self, requests: Sequence[Generate]) -> Sequence[Submit | Pool | Abort]:
        """What the session sends for new requests. Raises OfflineError."""
        for request, prompt in zip(requests, self._encoder.encode(requests, self._session.max_model_len), strict=True):
            if self._session.begin(_without_prompt_logprobs(request)):
                self._session.encoded(request.id, prompt)
        rejected = [message for message in self._session.take_to_frontend() if isinstance(message, TextFailed)]
        if rejected:
            number = next(i for i, request in enumerate(requests) if request.id == rejected[0].id)
            self.abort_all()
            raise OfflineError(rejected[0].code, f"prompt {number}: {rejected[0].message}")
        return self._session.take_to_scheduler()

    def take(self, output: StepOutput, scheduler: Scheduler) -> int:
        """Decode the tokens of a step and abort requests that met a stop string; returns the number of those."""
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

    def outputs(self, submits: Sequence[Submit], outputs: BatchOutputs) -> list[Output]:
        """Outputs of a call in the order of its requests, all of which have finished."""
        return [
            outputs.output(number, "".join(self._texts[submit.id]), self._ended.get(submit.id))
            for number, submit in enumerate(submits)
        ]

    def abort_all(self) -> None:
        """Forget all requests."""
        self._session.abort_all()
        self._session.take_to_scheduler()


def _without_prompt_logprobs(request: Generate) -> Generate:
    """Return the request as the session gets it: log-probabilities of prompts reach the caller as arrays, not as texts.
    """
    if request.params.prompt_logprobs is None:
        return request
    return replace(request, params=replace(request.params, prompt_logprobs=None))
