"""Prompts of texts that are pooled: embedded, classified, or scored in pairs.

A prompt is that of the tokenizer itself: its special tokens around one text (`[CLS]` … `[SEP]`, or `<|endoftext|>`
behind it), or around and between the texts of a pair. Decoders that score pairs by the logits of "yes" and "no" were
trained with one fixed chat instead, see `_JUDGE`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from minisgl.errors import PromptError
from minisgl.tokenizer.control_tokens import ControlTokens, RenderedChat
from minisgl.tokenizer.model_files import ModelFiles, TextPrompts
from minisgl.wire.text import ChatMessage, Generate, fewest_tokens, too_long_message

_JUDGE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""What stands before and behind instruction, query and document in the prompts of Qwen3-Reranker."""
_JUDGE_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""A tokenizer that has them is that of such a model, if pairs are sent to it."""
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"

INPUT_TYPES: Final = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
"""Kinds of text as Cohere's API names them, each with the names of prompts that checkpoints have for it. Unlike other
names they are fine where the checkpoint has no prompts, and a document needs none in any case."""


class PooledPrompt(array):  # type: ignore[type-arg]  # array[int] does not exist at run time
    """Prompt of a text that is pooled: int32 token ids."""

    second_text: int = 0
    """Index of the first token of a pair's second text, for models with token types; 0: the tokenizer has none."""


class _Around(NamedTuple):
    """Token ids around one text, or around and between two."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool = False
    """Tokens of the second text have a type of their own."""


class _Parts(NamedTuple):
    """A prompt before it is encoded: one text or two, with token ids around them."""

    texts: tuple[RenderedChat, ...]
    around: _Around


class PoolingPrompts:
    """Encodes requests with `Generate.pooling`. Immutable, so thread-safe."""

    def __init__(
        self,
        files: ModelFiles,
        control: ControlTokens,
        longest_token: int,
        render: Callable[[Generate], RenderedChat],
        encode_texts: Callable[[list[str]], list[list[int] | PromptError]],
    ) -> None:
        """`longest_token`: as in `ServedModel`. `render` renders the messages of a request. `encode_texts` returns the
        ids of each text without special tokens, or its error."""
        self._control = control
        self._longest_token = longest_token
        self._render = render
        self._encode_texts = encode_texts
        self._has_template = files.chat_template is not None
        self._prompts = files.text_prompts
        self._one = _around_one(files)
        self._pair = _around_pair(files.tokenizer)
        self._judge = _around_judged_pair(files.tokenizer)
        self._judge_control = ControlTokens(files.tokenizer, "".join(_JUDGE))

    def encode(
        self, requests: Sequence[Generate], max_model_len: int | None, error_of: Callable[[BaseException], PromptError]
    ) -> list[PooledPrompt | PromptError]:
        """Return the prompt of each request, or its error; `error_of` makes it from what was raised. A prompt that is
        longer than `max_model_len`, if that is known, is an error unless the request has it cut."""
        results: list[PooledPrompt | PromptError] = []
        parts: list[_Parts | None] = []
        texts: dict[str, None] = {}
        for request in requests:
            results.append(PooledPrompt("i"))
            parts.append(None)
            try:
                if request.tokens is not None:
                    results[-1] = _cut_ids(request, array("i", request.tokens), max_model_len)
                    continue
                made = self._parts(request)
                if max_model_len is not None and request.options.truncate_prompt_tokens is None:
                    self._check_length(request, made, max_model_len)
                parts[-1] = made
                # Texts are encoded once, such as the query of a hundred documents.
                texts |= dict.fromkeys(text.text for text in made.texts if not text.marks)
            except BaseException as error:
                results[-1] = error_of(error)
        known = dict(zip(texts, self._encode_texts([*texts]), strict=True)) if texts else {}
        for i, (request, of_request) in enumerate(zip(requests, parts, strict=True)):
            if of_request is None:
                continue
            try:
                ids = [self._ids(request, text, known) for text in of_request.texts]
                results[i] = _joined(request, ids, of_request.around, max_model_len)
            except BaseException as error:
                results[i] = error_of(error)
        return results

    def _ids(self, request: Generate, text: RenderedChat, known: dict[str, list[int] | PromptError]) -> list[int]:
        if text.marks:
            control = self._control if request.messages is not None else self._judge_control
            return control.encode(text)
        ids = known[text.text]
        if isinstance(ids, PromptError):
            raise ids
        return ids

    def _check_length(self, request: Generate, parts: _Parts, max_model_len: int) -> None:
        """Refuse texts that certainly have too many tokens, before they are encoded. Raises PromptError."""
        assert request.pooling is not None
        texts = parts.texts[:1] if request.pooling.second_text_tokens else parts.texts
        if (tokens := sum(fewest_tokens(text.text, self._longest_token) for text in texts)) > max_model_len:
            raise _too_long(max_model_len, tokens)

    def _parts(self, request: Generate) -> _Parts:
        """Raises PromptError."""
        pooling = request.pooling
        assert pooling is not None
        bare = not request.options.rendering.add_special_tokens
        if request.messages is not None:
            if not self._has_template:
                raise PromptError("no_chat_template", "this model has no chat template: send `input`", "messages")
            return _Parts((self._render(request),), _NOTHING if bare else self._one)
        assert request.prompt is not None
        if pooling.second_text is None:
            if pooling.instruction is not None:
                raise PromptError("unsupported_parameter", "only pairs of texts take an instruction", "instruction")
            text = self._cased(named_prompt(self._prompts, pooling.prompt_name) + request.prompt)
            return _Parts((RenderedChat(text),), _NOTHING if bare else self._one)
        if self._judge is not None:
            instruction = pooling.instruction
            if instruction is None:
                instruction = named_prompt(self._prompts, pooling.prompt_name) or _INSTRUCTION
            return _Parts(self._judged(instruction, request.prompt, pooling.second_text), self._judge)
        if pooling.instruction is not None or pooling.prompt_name:
            param = "prompt_name" if pooling.instruction is None else "instruction"
            raise PromptError("unsupported_parameter", "this model takes pairs of texts without an instruction", param)
        if self._pair is None:
            raise PromptError(
                "invalid_request",
                "this model's tokenizer has no template for pairs of texts, and no prompt for them is known: send one "
                "text",
            )
        texts = (RenderedChat(self._cased(request.prompt)), RenderedChat(self._cased(pooling.second_text)))
        return _Parts(texts, self._pair)

    def _judged(self, instruction: str, query: str, document: str) -> tuple[RenderedChat, RenderedChat]:
        """Return the turn of the user in two parts, which are cut where every tokenizer of this family cuts anyway."""
        control = self._judge_control
        escaped = control.escape([ChatMessage("user", text) for text in (instruction, query, document)])
        instruction, query, document = (message.content or "" for message in escaped.messages)
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
        first, second = (control.unescape(text, escaped.mark) for text in (question, f" {document}"))
        return first, second

    def _cased(self, text: str) -> str:
        return text.lower() if self._prompts.lower_case else text


_NOTHING: Final = _Around([], [], [])


def named_prompt(prompts: TextPrompts, name: str) -> str:
    """Return the prompt of a name; empty: the default one, if there is any. Raises PromptError for an unknown name."""
    name = name or prompts.default
    if not name:
        return ""
    kinds = INPUT_TYPES.get(name, ())
    for alias in (name, *kinds):
        if (found := prompts.by_name.get(alias)) is not None:
            return found
    if kinds and (not prompts.by_name or name == "search_document"):
        return ""
    known = ", ".join(map(repr, sorted(prompts.by_name)))
    problem = f"the model has the prompts {known}" if known else "the model has no prompts; leave the field out"
    raise PromptError("invalid_value", f"prompt_name: {name[:64]!r} is unknown; {problem}", "prompt_name")


def _around_one(files: ModelFiles) -> _Around:
    """Return what the tokenizer adds to a text. Explicit settings of tokenizer_config.json go first, as for chats."""
    bare = files.tokenizer.encode("a", add_special_tokens=False).ids
    full = files.tokenizer.encode("a", add_special_tokens=True).ids
    start = _find(bare, full, 0)
    before, after = full[:start], full[start + len(bare) :]
    bos, eos = (_token_id(files, name) for name in ("bos_token", "eos_token"))
    if files.add_bos_token and bos is not None and bos not in before:
        before = [bos, *before]
    if files.add_bos_token is False and before == [bos]:
        before = []
    if files.add_eos_token and eos is not None and after[-1:] != [eos]:
        after = [*after, eos]
    return _Around(before, [], after)


def _around_pair(tokenizer: Tokenizer) -> _Around | None:
    """Return what the tokenizer adds to a pair; None if nothing would separate the two texts."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    pair = tokenizer.encode("a", "a", add_special_tokens=True)
    first = _find(bare, pair.ids, 0)
    second = _find(bare, pair.ids, first + len(bare))
    before, between = pair.ids[:first], pair.ids[first + len(bare) : second]
    if not between:
        return None
    has_types = pair.type_ids[first] != pair.type_ids[second]
    return _Around(before, between, pair.ids[second + len(bare) :], has_types)


def _around_judged_pair(tokenizer: Tokenizer) -> _Around | None:
    """Return what stands around the user's turn of `_JUDGE`; None for tokenizers of other models."""
    if any(tokenizer.token_to_id(token) is None for token in _JUDGE_TOKENS):
        return None
    before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in _JUDGE)
    return _Around(before, [], after)


def _find(part: list[int], whole: list[int], begin: int) -> int:
    """Return where `part` begins in `whole`; where it is nowhere, as in tokenizers that make nothing of a letter, the
    end of `whole`."""
    return next((n for n in range(begin, len(whole)) if whole[n : n + len(part)] == part), len(whole))


def _token_id(files: ModelFiles, name: str) -> int | None:
    token = files.special_tokens.get(name)
    return None if token is None else files.tokenizer.token_to_id(token)


def _joined(request: Generate, ids: list[list[int]], around: _Around, max_model_len: int | None) -> PooledPrompt:
    """Return the prompt; its last text is cut where the request allows it. Raises PromptError."""
    pooling = request.pooling
    assert pooling is not None
    first, last = ids[:-1], ids[-1]
    if first and pooling.second_text_tokens:
        last = _cut(last, pooling.second_text_tokens, request)
    added = len(around.before) + len(around.between) + len(around.after)
    others = added + sum(map(len, first))
    limit = _limit(request, max_model_len)
    if limit is not None and others + len(last) > limit:
        if others >= limit:
            field = "truncate_prompt_tokens"
            problem = f"{limit} tokens have no room for the text: {added} special tokens"
            beside = f" and {others - added} tokens of the first text stand beside it" if first else " stand around it"
            raise PromptError("invalid_value", f"{field}: {problem}{beside}", field)
        last = _cut(last, limit - others, request)
    prompt = PooledPrompt("i", around.before)
    for one in first:
        prompt.extend(one)
        prompt.extend(around.between)
    if around.has_types:
        prompt.second_text = len(prompt)
    prompt.extend(last)
    prompt.extend(around.after)
    return _checked(prompt, max_model_len)


def _cut_ids(request: Generate, tokens: array[int], max_model_len: int | None) -> PooledPrompt:
    """Return token ids of the client, which has added the special ones. Raises PromptError."""
    limit = _limit(request, max_model_len)
    kept = tokens.tolist()
    return _checked(PooledPrompt("i", kept if limit is None else _cut(kept, limit, request)), max_model_len)


def _limit(request: Generate, max_model_len: int | None) -> int | None:
    """Return the number of tokens that the request has its prompt cut to; None: it is not cut."""
    keep = request.options.truncate_prompt_tokens
    return max_model_len if keep == -1 else keep


def _cut(ids: list[int], keep: int, request: Generate) -> list[int]:
    return ids[max(0, len(ids) - keep) :] if request.options.truncation_side == "left" else ids[:keep]


def _checked(prompt: PooledPrompt, max_model_len: int | None) -> PooledPrompt:
    if not prompt:
        raise PromptError("empty_prompt", "the text is empty, and the tokenizer adds no token to it; send some text")
    if max_model_len is not None and len(prompt) > max_model_len:
        raise _too_long(max_model_len, len(prompt))
    return prompt


def _too_long(max_model_len: int, tokens: int) -> PromptError:
    return PromptError(
        "context_length_exceeded",
        f"{too_long_message(max_model_len, tokens)}, or have it cut with truncate_prompt_tokens: -1",
    )
