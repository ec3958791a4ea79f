"""Greedy answers of a checkpoint that Transformers computes, for comparison with served ones: what a model has learned
is no matter of the runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from support.numerics.reference import TOLERANCE

_AT_ONCE: Final = 128
MAX_TOKENS: Final = 200


class Chat(NamedTuple):
    """A request for an answer; messages and definitions of tools are those of the endpoint."""

    messages: Sequence[Any]
    tools: Sequence[Any] = ()
    thinks: bool = True


class Written(NamedTuple):
    text: str
    """Text up to the end of the turn, with markers and without its last token."""
    is_decided: bool
    """False: two tokens had logits within the tolerance somewhere. Each of them is as good, and rounding decides."""


class Offline:
    """A checkpoint in Transformers, in float32 and without a server. Each chat is computed once."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._written: dict[str, Written] = {}

    def written(self, chats: Sequence[Chat]) -> list[Written]:
        """Return what the model writes."""
        prompts = [self._prompt(chat) for chat in chats]
        missing = sorted({prompt for prompt in prompts if prompt not in self._written}, key=len)
        for begin in range(0, len(missing), _AT_ONCE):
            together = missing[begin : begin + _AT_ONCE]
            self._written |= zip(together, self._generate(together), strict=True)
        return [self._written[prompt] for prompt in prompts]

    def _prompt(self, chat: Chat) -> str:
        prompt: str = self._tokenizer.apply_chat_template(
            [_with_objects(message) for message in chat.messages],
            tools=list(chat.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=chat.thinks,
        )
        return prompt

    @torch.inference_mode()
    def _generate(self, prompts: list[str]) -> list[Written]:
        inputs = self._tokenizer(
            prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        made = self._model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        best = torch.stack(made.logits, 1).topk(2).values
        close = (best[..., 0] - best[..., 1] <= 2 * TOLERANCE).tolist()
        return [self._until_end(*row) for row in zip(tokens, close, strict=True)]

    def _until_end(self, tokens: list[int], close: list[bool]) -> Written:
        """Leave out the token that ends the turn, and the padding behind it."""
        ends = self._model.generation_config.eos_token_id
        length = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return Written(self._tokenizer.decode(tokens[:length]), not any(close[: length + 1]))


def _with_objects(message: Any) -> Any:
    """Give a template the arguments of calls as objects, which the endpoint takes as JSON text."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})
