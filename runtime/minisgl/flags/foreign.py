"""Flags of other servers, and what they are here.

One with the meaning of a flag of ours is accepted under its own name. The others are named in the error, with what to
do. The migration pages list these tables.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from minisgl.options import close

MODEL: Final = "MODEL"
"""Stands for the positional argument with the model."""


class ForeignFlag(NamedTuple):
    """One flag of another server."""

    names: tuple[str, ...]
    ours: str
    """Flag of ours that it sets or resembles; MODEL; empty: there is none."""
    words: tuple[str, ...] | None
    """What the flag is replaced by, before its value if it has one; None: it is refused."""
    note: str
    takes_value: bool = False
    """Of a flag with `words`: whether a value follows it."""


class ForeignFlagError(ValueError):
    """A flag of another server is accepted, but not as it is given."""


def _alias(names: str, ours: str, note: str = "") -> ForeignFlag:
    """A flag with the meaning of one of ours, whose value it takes."""
    return ForeignFlag(tuple(names.split()), ours, () if ours == MODEL else (ours,), note, takes_value=True)


def _switch(names: str, words: str, note: str = "") -> ForeignFlag:
    """A flag without a value that means these words of our command line."""
    return ForeignFlag(tuple(names.split()), words.split(maxsplit=1)[0], tuple(words.split()), note)


def _default(names: str, ours: str, note: str) -> ForeignFlag:
    """A flag without a value for what is so by default; `ours` sets it otherwise."""
    return ForeignFlag(tuple(names.split()), ours, (), note)


def _other(names: str, ours: str, note: str) -> ForeignFlag:
    """A flag without one of ours with the same meaning; `ours` resembles it."""
    return ForeignFlag(tuple(names.split()), ours, None, note)


_SHARED: Final = (
    _other("--load-format", "--dummy-weights", "for `dummy`; safetensors is the only other format"),
    _other("--api-key", "--api-keys", "a file with the keys, so that no list of processes shows them"),
    _other("--trust-remote-code", "", "code of checkpoints is never run; remove it"),
    _other("--chat-template", "", "the checkpoint's is used; put chat_template.jinja into its directory"),
    _other("--ssl-keyfile --ssl-certfile", "", "put a proxy with TLS in front"),
    _other("--enable-lora --lora-paths", "", "LoRA is not supported"),
    _other("--download-dir", "", "set HF_HOME to the directory for downloads"),
)
"""Flags of both servers that are refused."""
_NUM_PROMPTS: Final = _alias("--num-prompts", "--num-requests", "of `bench serve`")
_BASE_URL: Final = _alias("--base-url", "--url", "of `bench serve`")

VLLM: Final = (
    _alias("--model", MODEL),
    _alias("--tensor-parallel-size -tp", "--tp"),
    _alias("--max-num-seqs", "--max-running"),
    _alias("--max-num-batched-tokens", "--max-step-tokens"),
    _alias("--gpu-memory-utilization", "--memory-fraction", "of the memory that is free at the start"),
    _alias("--block-size", "--page-size"),
    _alias("--num-gpu-blocks-override", "--num-pages"),
    _NUM_PROMPTS,
    _BASE_URL,
    _default("--enable-prefix-caching", "--cache", "on by default"),
    _switch("--no-enable-prefix-caching", "--cache naive"),
    _default("--enable-chunked-prefill", "--max-step-tokens", "always on"),
    _default("--async-scheduling", "--no-overlap", "on by default"),
    _switch("--no-async-scheduling", "--no-overlap"),
    _switch("--enforce-eager", "--cuda-graph-max-batch 0 --cuda-graph-max-tokens 0"),
    _default(
        "--enable-auto-tool-choice", "--tool-call-parser", "on by default; the format is found from the checkpoint"
    ),
    *_SHARED,
    _other("--tokenizer", "", "the checkpoint's is used"),
    _other("--swap-space --cpu-offload-gb", "", "nothing is moved to the host; preempted requests are computed again"),
    _other("--pipeline-parallel-size --data-parallel-size", "--tp", "tensor parallelism only; replicas on Kubernetes"),
    _other("--speculative-config", "--speculative", "`auto`: drafts from the text; `--draft-model`: of a draft head"),
    _other("--runner --convert", "--task", "found from the checkpoint; or `embed`, `rerank`, `classify`"),
    _other("--generation-config", "", "the checkpoint's generation_config.json is used"),
    _other("--disable-log-requests --disable-log-stats", "--log-level", "`warning` leaves out a line per request"),
    _other("--uvicorn-log-level", "--log-level", "of all processes"),
    _other("--seed", "", "each request has its own `seed`"),
)
"""Flags of vLLM's server that have another name here."""

SGLANG: Final = (
    _alias("--model-path --model", MODEL),
    _alias("--tp-size --tensor-parallel-size", "--tp"),
    _alias("--max-running-requests", "--max-running"),
    _alias("--max-queued-requests", "--max-waiting"),
    _alias("--context-length", "--max-model-len"),
    _alias("--mem-fraction-static", "--memory-fraction", "of the memory that is free at the start, with CUDA graphs"),
    _alias("--chunked-prefill-size", "--max-step-tokens", "of a whole step: decodes and chunks of prompts"),
    _alias("--cuda-graph-max-bs", "--cuda-graph-max-batch"),
    _alias("--json-model-override-args", "--hf-overrides"),
    _alias("--watchdog-timeout", "--stall-timeout"),
    _NUM_PROMPTS,
    _BASE_URL,
    _switch("--disable-radix-cache", "--cache naive"),
    _switch("--disable-overlap-schedule", "--no-overlap"),
    _switch("--disable-cuda-graph", "--cuda-graph-max-batch 0 --cuda-graph-max-tokens 0"),
    _default("--enable-metrics", "--port", "always on, at /metrics"),
    _default("--enable-cache-report", "--cache", "`usage` always has the cached tokens"),
    _default("--is-embedding", "--task", "found from the checkpoint"),
    *_SHARED,
    _other("--tokenizer-path", "", "the checkpoint's is used"),
    _other("--max-total-tokens", "--num-pages", "in pages of --page-size tokens"),
    _other("--max-prefill-tokens", "--max-step-tokens", "of a whole step: decodes and chunks of prompts"),
    _other("--dp-size --data-parallel-size --pp-size", "--tp", "tensor parallelism only; replicas on Kubernetes"),
    _other("--schedule-policy", "", "first come, first served; the longest cached prefix decides between replicas"),
    _other(
        "--speculative-algorithm", "--speculative", "`auto`: drafts from the text; `--draft-model`: of a draft head"
    ),
    _other("--grammar-backend", "", "llguidance is the only one"),
    _other("--base-gpu-id", "", "set CUDA_VISIBLE_DEVICES"),
    _other("--random-seed", "", "each request has its own `seed`"),
)
"""Flags of SGLang's server that have another name here."""

MINI_SGLANG: Final = (
    _alias("--max-seq-len-override", "--max-model-len"),
    _alias("--memory-ratio", "--memory-fraction"),
    _alias("--cuda-graph-max-bs --graph", "--cuda-graph-max-batch"),
    _alias("--num-tokenizer --tokenizer-count", "--tokenizers"),
    _alias("--max-prefill-length --max-extend-length", "--max-step-tokens"),
    _alias("--attn", "--attention-backend"),
    _alias("--cache-type", "--cache"),
    _switch("--dummy-weight", "--dummy-weights"),
)
"""Flags of mini-sglang that have another name here and in SGLang; its migration page has all."""

FOREIGN: Final[Mapping[str, ForeignFlag]] = {
    name: flag for table in (MINI_SGLANG, SGLANG, VLLM) for flag in table for name in flag.names
}
"""All of them, by name."""


class Translation(NamedTuple):
    """A command line without foreign flags, and what they were taken as."""

    arguments: list[str]
    taken: list[tuple[str, str]]


def translate(arguments: Sequence[str], own: Container[str], takes_model: bool) -> Translation:
    """Replace the foreign flags that mean flags in `own`, or the model where `takes_model`. A name in `own` is never
    foreign. Raises ForeignFlagError."""
    found = Translation([], [])
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            found.arguments.extend([argument, *rest])
            break
        name, equals, value = argument.partition("=")
        flag = None if argument in own or name in own else FOREIGN.get(name.replace("_", "-"))
        if flag is None or not _is_accepted(flag, own, takes_model):
            found.arguments.append(argument)
            continue
        assert flag.words is not None
        if equals and not flag.takes_value:
            raise ForeignFlagError(f"{argument}: the flag takes no value; give {name} alone, or leave it out")
        found.taken.append((name, " ".join(flag.words) or (MODEL if flag.ours == MODEL else flag.note)))
        found.arguments.extend(flag.words)
        if equals:
            found.arguments.append(value)
    return found


def hints(unknown: Sequence[str], own: Sequence[str], takes_model: bool, *, accepts_foreign: bool) -> Iterator[str]:
    """What to use instead of each unknown flag, as far as there is something like it. `own`: the command's flags.
    `takes_model`, `accepts_foreign`: whether it has the model as an argument, and takes foreign flags at all."""
    for argument in unknown:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            continue
        given = name.replace("_", "-")
        if flag := FOREIGN.get(given):
            if not flag.ours or _is_meant(flag, own, takes_model):
                yield _instead(name, flag)
            continue
        meant = {each: flag for each, flag in FOREIGN.items() if _is_meant(flag, own, takes_model)}
        if similar := close(given, [*own, *meant]):
            accepted = similar in own or (accepts_foreign and meant[similar].words is not None)
            yield f"did you mean {similar}?" + ("" if accepted else f" {_instead(similar, meant[similar])}")


def _is_meant(flag: ForeignFlag, own: Container[str], takes_model: bool) -> bool:
    """Whether a command with the flags `own` has what the flag means or resembles."""
    return takes_model if flag.ours == MODEL else flag.ours in own


def _is_accepted(flag: ForeignFlag, own: Container[str], takes_model: bool) -> bool:
    return flag.words is not None and _is_meant(flag, own, takes_model)


def _instead(name: str, flag: ForeignFlag) -> str:
    """What to do instead of giving the flag, by the name `name`."""
    note = f": {flag.note}" if flag.note else ""
    if not flag.ours:
        return f"{name} does not exist here{note}"
    if flag.words == () and not flag.takes_value:
        return f"{name} is not needed here, remove it{note}"
    return f"{name} is {' '.join(flag.words or (flag.ours,))} here{note}"
