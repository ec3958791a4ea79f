"""Requests to prompt token ids, many at a time; a request that cannot be encoded fails alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
from tokenizers import Tokenizer

from minisgl.errors import PromptError
from minisgl.parsing.answer_format import PLAIN_ANSWERS, AnswerFormat
from minisgl.tokenizer.channel_history import as_channels, with_descriptions, with_known_effort
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.control_tokens import ControlTokens, EscapedChat, RenderedChat
from minisgl.tokenizer.described_tools import with_calls_as_text, with_tools
from minisgl.tokenizer.longest_token import longest_token
from minisgl.tokenizer.model_files import ModelFiles
from minisgl.tokenizer.pooling_prompts import PoolingPrompts
from minisgl.tokenizer.template_features import TemplateFeatures
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import MAX_PREDICTION_TOKENS
from minisgl.wire.text import (
    ChatMessage,
    Decode,
    Decoded,
    Describe,
    Described,
    Encode,
    Encoded,
    Generate,
    Question,
    Rendering,
    ToolOptions,
    fewest_tokens,
    too_long_message,
)

_PREDICTION_CHARACTERS: Final = 8 * MAX_PREDICTION_TOKENS
"""Characters of a prediction that are encoded: text and code have three to five for each token, and encoding megabytes
for a hint would delay the answer."""

BadWords: TypeAlias = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""


def token_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> BadWords:
    """Return the token ids of each word at the beginning of a text, and behind a space: most vocabularies have other
    tokens for it there. A model may still spell a word with other tokens."""
    if not words:
        return ()
    bare = [word.lstrip() or word for word in words]
    encodings = tokenizer.encode_batch_fast([*bare, *(f" {word}" for word in bare)], add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids))


Prompt: TypeAlias = "array[int]"
"""int32 token ids."""


class PromptEncoder:
    """Encodes prompts and answers questions about the tokenizer. Immutable, so thread-safe."""

    def __init__(self, files: ModelFiles, answers: AnswerFormat = PLAIN_ANSWERS) -> None:
        """`answers`: its format of calls is that in which tools are described where the template does not."""
        self._answers = answers
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self._tool_template = ChatTemplate(files.tool_template, files.special_tokens) if files.tool_template else None
        self._control = ControlTokens(files.tokenizer, files.template_text)
        bos = files.special_tokens.get("bos_token")
        self._special_tokens = files.special_tokens
        self._bos_id = None if bos is None else files.tokenizer.token_to_id(bos)
        self._prefix = self._default_prefix(files)
        self._names = TokenBytes(files.tokenizer)
        self.longest_token = longest_token(files.tokenizer)
        """As in `ServedModel`."""
        self._pooling = PoolingPrompts(files, self._control, self.longest_token, self._rendered, self._encode_texts)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def can_switch_thinking(self) -> bool:
        """A request decides whether the model reasons."""
        return self._template is not None and self._template.features.can_switch_thinking

    @property
    def takes_tools(self) -> bool:
        """The template of chats with tools renders them."""
        template = self._tool_template or self._template
        return template is not None and template.features.takes_tools

    def encode(self, requests: Sequence[Generate], max_model_len: int | None = None) -> list[Prompt | PromptError]:
        """Return the prompt of each request, or its error; that of a request with `pooling` is a `PooledPrompt`, which
        is cut already where the request asks for it. A text that certainly has more than `max_model_len` tokens is not
        encoded, unless the request cuts its prompt: that takes time and memory for nothing."""
        results: list[Prompt | PromptError | None] = [None] * len(requests)
        texts: dict[int, str] = {}
        pooled = [i for i, request in enumerate(requests) if request.pooling is not None]
        if pooled:
            prompts = self._pooling.encode([requests[i] for i in pooled], max_model_len, _prompt_error)
            for i, prompt in zip(pooled, prompts, strict=True):
                results[i] = prompt
        # The choices of a request follow each other: their prompt is encoded once.
        repeated = [i for i in range(1, len(requests)) if same_prompt(requests[i - 1], requests[i])]
        for i in sorted(set(range(len(requests))).difference(repeated, pooled)):
            request = requests[i]
            try:
                if request.tokens is not None:
                    results[i] = array("i", request.tokens) or self._finish(request, [])
                    continue
                chat = self._rendered(request)
                if max_model_len is not None and request.options.truncate_prompt_tokens is None:
                    self._check_length(chat.text, max_model_len)
                if chat.marks:
                    results[i] = self._finish(request, self._control.encode(chat))
                else:
                    texts[i] = chat.text
            except BaseException as error:
                results[i] = _prompt_error(error)
        for i, encoded in zip(texts, self._encode_texts([*texts.values()]), strict=True):
            try:
                results[i] = encoded if isinstance(encoded, PromptError) else self._finish(requests[i], encoded)
            except PromptError as error:
                results[i] = error
        for i in repeated:
            results[i] = results[i - 1]
        return [result for result in results if result is not None]

    def bad_words(self, words: Sequence[str]) -> BadWords | PromptError:
        """Return the token ids of texts that an answer must not contain."""
        try:
            return token_sequences(self._tokenizer, words)
        except BaseException as error:
            return _prompt_error(error)

    def prediction(self, text: str) -> Prompt | PromptError:
        """Return the first token ids of a text that is expected in an answer, where control tokens are such tokens."""
        try:
            ids = self._tokenizer.encode(text[:_PREDICTION_CHARACTERS], add_special_tokens=False).ids
        except BaseException as error:
            return _prompt_error(error)
        return array("i", ids[:MAX_PREDICTION_TOKENS])

    def encoded(self, request: Encode) -> Encoded | PromptError:
        """Return the tokens of a text or a conversation."""
        try:
            chat = self._render(request.messages, request.prompt, request.tools, request.rendering)
            ids = self._control.encode(chat)
            if request.rendering.add_special_tokens and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
        except BaseException as error:
            return _prompt_error(error)
        return Encoded(id=request.id, tokens=array("i", ids).tobytes(), names=[self._names.name(i) for i in ids])

    def decoded(self, request: Decode) -> Decoded | PromptError:
        """Return the text of tokens."""
        tokens = array("i", request.tokens)
        if unknown := next((t for t in tokens if t < 0 or self._tokenizer.id_to_token(t) is None), None):
            return PromptError("invalid_token", f"token id {unknown} is not in the tokenizer's vocabulary", "tokens")
        try:
            return Decoded(id=request.id, text=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        except BaseException as error:
            return _prompt_error(error)

    def tokenizer_info(self, request: Describe) -> Described:
        return Described(
            id=request.id,
            special_tokens=self._special_tokens,
            chat_template=None if self._template is None else self._template.source,
            add_bos_token=bool(self._prefix),
        )

    def _check_length(self, text: str, max_model_len: int) -> None:
        if (tokens := fewest_tokens(text, self.longest_token)) > max_model_len:
            raise PromptError("context_length_exceeded", too_long_message(max_model_len, tokens))

    def _rendered(self, request: Generate) -> RenderedChat:
        return self._render(request.messages, request.prompt, request.options.tools, request.options.rendering)

    def _render(
        self, messages: Sequence[ChatMessage] | None, text: str | None, tools: ToolOptions | None, rendering: Rendering
    ) -> RenderedChat:
        if messages is None:
            assert text is not None
            return RenderedChat(text)
        template = self._template
        if tools is not None and self._tool_template is not None:
            template = self._tool_template
        if template is None:
            raise PromptError(
                "no_chat_template",
                "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "use /v1/completions",
                "messages",
            )
        chat = self._control.escape(messages, tools, rendering.documents, rendering.template_variables)
        messages, tools, variables = self._described(chat, template.features), chat.tools, chat.variables
        if self._answers.in_channels:
            messages, tools, variables = as_channels(messages), with_descriptions(tools), with_known_effort(variables)
        rendered = template.render(
            messages,
            variables,
            tools=tools,
            documents=chat.documents,
            thinking=rendering.thinking,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
        )
        return self._control.unescape(rendered, chat.mark)

    def _described(self, chat: EscapedChat, features: TemplateFeatures) -> Sequence[ChatMessage]:
        """Return the messages, with texts in place of what the template leaves out about tools."""
        messages, tools = chat.messages, chat.tools
        if self._answers.tools is None:
            return messages
        if not features.takes_tool_calls:
            messages = with_calls_as_text(messages, self._answers, takes_results=features.takes_role("tool"))
        if tools is not None and tools.choice == "auto" and not features.takes_tools:
            messages = with_tools(messages, tools, self._answers)
        return messages

    def _encode_texts(self, texts: list[str]) -> list[list[int] | PromptError]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if len(texts) == 1:
                return [_prompt_error(error)]
            # One text fails the whole batch; the others must not fail with it.
            return [result for text in texts for result in self._encode_texts([text])]
        return [encoding.ids for encoding in encodings]

    def _finish(self, request: Generate, ids: list[int]) -> Prompt:
        """Return the ids with the BOS that the tokenizer adds by default, once: a template or prompt may contain it."""
        prefix = self._prefix if request.options.rendering.add_special_tokens else []
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if not ids:
            if self._bos_id is None:
                raise PromptError(
                    "empty_prompt", "the prompt is empty, and this model has no BOS token; send some text", "prompt"
                )
            ids = [self._bos_id]
        return array("i", ids)

    def _default_prefix(self, files: ModelFiles) -> list[int]:
        """Return the tokens that the tokenizer adds before a text. A prompt gets none that it adds behind (an EOS)."""
        if files.add_bos_token is not None:
            return [self._bos_id] if files.add_bos_token and self._bos_id is not None else []
        bare = files.tokenizer.encode("a", add_special_tokens=False).ids
        full = files.tokenizer.encode("a", add_special_tokens=True).ids
        starts = (n for n in range(len(full)) if full[n : n + len(bare)] == bare)
        return full[: next(starts, 0)] if bare else []


def same_prompt(one: Generate | Question, other: Generate | Question) -> bool:
    """True if both are requests whose prompts have the same token ids under any tokenizer."""
    if not isinstance(one, Generate) or not isinstance(other, Generate):
        return False
    if one.pooling is not None or other.pooling is not None:
        return False
    if (one.prompt, one.tokens, one.messages) != (other.prompt, other.tokens, other.messages):
        return False
    if one.options.rendering.add_special_tokens != other.options.rendering.add_special_tokens:
        return False
    # Equality is not enough: a template renders 1, 1.0 and True in three ways.
    return one.messages is None or _exactly(one) == _exactly(other)


def _exactly(request: Generate) -> bytes:
    return msgspec.msgpack.encode((request.messages, request.options.tools, request.options.rendering))


def _prompt_error(error: BaseException) -> PromptError:
    """Return the error of a request that cannot be encoded. The tokenizer library raises plain Exception, and a panic
    in it is not even an Exception: none of them may fail other requests. Errors that must end the process are raised.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, PromptError):
        return error
    return PromptError("invalid_prompt", f"the tokenizer cannot encode this text: {str(error)[:200]}")
