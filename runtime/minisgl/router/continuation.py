"""Whether an answer that began with one model can go on with another. Pure."""

from __future__ import annotations

from minisgl.tokenizer.file_hashes import differing_files
from minisgl.wire.messages import ModelCard


def model_difference(before: ModelCard, now: ModelCard, length: int) -> str:
    """Return why `now` cannot continue an answer of `before`, which has `length` tokens at most, its prompt included.
    Empty: it can."""
    if differing := differing_files(before.tokenizer_hashes, now.tokenizer_hashes):
        return f"its tokenizer files changed ({', '.join(differing)}); send the request again"
    if not before.revision or not now.revision:
        return "an engine could not determine its model's revision; send the request again"
    if before.revision != now.revision:
        return f"the model's revision changed from {before.revision} to {now.revision}; send the request again"
    if before.vocab_size != now.vocab_size:
        return f"the vocabulary changed from {before.vocab_size} to {now.vocab_size} tokens; send the request again"
    if length > now.max_model_len:
        return f"the answer may need {length} tokens, and max_model_len is {now.max_model_len} now; lower max_tokens"
    return ""
