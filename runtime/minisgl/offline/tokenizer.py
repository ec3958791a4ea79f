"""The tokenizer without its process."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.engine.interface import EngineLimits
from minisgl.offline.answers import Answers
from minisgl.offline.outputs import OfflineError, Output
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.tokenizer.model_files import ModelFiles
from minisgl.tokenizer.prompt_encoder import PromptEncoder
from minisgl.tokenizer.session import Session
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import Failed, ModelCard, Submit, Tokens
from minisgl.wire.text import Finished, Generate, TextFailed, Texts


class OfflineTokenizer:
    """Prompts in, texts out, stop strings in between."""

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

    def outputs(self, submits: Sequence[Submit], answers: Answers) -> list[Output]:
        return [
            answers.output(number, "".join(self._texts[submit.id]), self._ended.get(submit.id))
            for number, submit in enumerate(submits)
        ]

    def abandon(self) -> None:
        self._session.abort_all()
        self._session.take_to_scheduler()
