"""Speed of constrained answers: `python benchmarks/constrained.py --model qwen3-14b --rows 64 256 --neighbours`.

All rows answer under a schema of 20 fields; then prompts of the same length get as many tokens without a constraint.
The ratio is that of the times, free to constrained: 0.95 means 5 % fewer tokens per second. For neighbours, half of the
rows are constrained. Weights are random, and so is the vocabulary, which is made by code: bytes, and words of random
letters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from constrained_phases import Phases
from minisgl.bench import record
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.record import Result
from minisgl.bench.report import Metric, report
from minisgl.flags.arguments import Parser, add_json_argument, integer
from minisgl.offline import LLM, StructuredOutput
from minisgl.wire.messages import SamplingParams

_FIELDS: Final = 20
_TOKENS: Final = 240
"""Most tokens of an answer; with random tokens none has all fields by then, but each kind of field once."""
_PROMPT_TOKENS: Final = 64
_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Speed of constrained answers beside that of free ones.")
    parser.add_argument("--model", choices=sorted(BUILTIN_CONFIGS), default="qwen3-0.6b", help="built-in configuration")
    parser.add_argument("--rows", type=integer(1), nargs="+", default=[64], metavar="N", help="numbers of requests")
    parser.add_argument("--repeat", type=integer(1), default=3, metavar="N", help="runs; the median ratio is reported")
    parser.add_argument("--neighbours", action="store_true", help="also constrain half of the first number of requests")
    parser.add_argument("--layers", type=integer(1), default=None, metavar="N", help="use only so many layers")
    parser.add_argument("--phases", action="store_true", help="print the host time of the parts of steps, in ms")
    parser.add_argument("--record", type=Path, default=None, metavar="FILE", help="update the results in FILE")
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    known = None if args.record is None else record.read(args.record)
    config = dict(BUILTIN_CONFIGS[args.model])
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    key = record.model_key(args.model)
    schema = StructuredOutput("json", json.dumps(twenty_fields()))
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="minisgl-constrained-") as folder:
        write_checkpoint(Path(folder), config)
        with LLM(folder, detokenize=False, dummy_weights=True, max_running=max(args.rows)) as llm:
            phases = Phases(llm) if args.phases else None
            for rows in args.rows:
                results[f"json_{rows}_{key}_ratio"] = _measure(llm, [schema] * rows, args.repeat, phases)
            if args.neighbours:
                half = [schema if row % 2 else None for row in range(args.rows[0])]
                results["json_neighbours_ratio"] = _measure(llm, half, args.repeat, phases)
            compiled = llm.stats.compiled_after_ready
    figures: dict[str, Metric] = {"model": args.model, "compiled_after_ready": compiled}
    figures |= {name: result.value for name, result in results.items()}
    if known is not None:
        record.update(args.record, known, results, (f"{args.model} constrained", compiled))
    report("constrained", figures, {}, args.json)


def _measure(
    llm: LLM, constraints: Sequence[StructuredOutput | None], repeat: int, phases: Phases | None = None
) -> Result:
    """Ratio of the times of free and constrained answers: median, smallest and largest."""
    ratios = []
    for run in range(repeat + 1):
        params = [SamplingParams(max_tokens=_TOKENS, seed=row + 1000 * run) for row in range(len(constraints))]
        free = [msgspec.structs.replace(one, ignore_eos=True) for one in params]
        kinds = zip(params, free, constraints, strict=True)
        mixed = [one if kind is not None else other for one, other, kind in kinds]
        constrained, lengths = _timed(llm, mixed, constraints, run)
        if phases is not None:
            phases.report("constrained: number, mean, median, p90")
        same = [msgspec.structs.replace(one, max_tokens=length) for one, length in zip(free, lengths, strict=True)]
        unconstrained, _ = _timed(llm, same, None, run)
        if phases is not None:
            phases.report("free: number, mean, median, p90")
        seconds = f"{constrained:.3f} s, without constraints in {unconstrained:.3f} s"
        print(f"{len(constraints)} rows, run {run}: {sum(lengths)} tokens in {seconds}", file=sys.stderr)
        # The first run warms up.
        ratios += [unconstrained / constrained] * (run > 0)
    return Result(statistics.median(ratios), (min(ratios), max(ratios)))


def _timed(
    llm: LLM, params: Sequence[SamplingParams], constraints: Sequence[StructuredOutput | None] | None, seed: int
) -> tuple[float, list[int]]:
    """Seconds for all answers, and the length of each."""
    draw = random.Random(f"{seed} {constraints is None}")
    prompts = [draw.choices(range(1000, 100_000), k=_PROMPT_TOKENS) for _ in params]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, structured_output=constraints)
    seconds = time.perf_counter() - began
    errors = [output.error for output in outputs if output.error]
    assert not errors, errors[0]
    return seconds, [len(output.token_ids) for output in outputs]


def twenty_fields() -> dict[str, Any]:
    """Schema of an object with 20 fields of all kinds, none of which can become long."""
    closed = {"additionalProperties": False}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24},
        {"type": "integer", "minimum": 0, "maximum": 1_000_000},
        {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 100}, "minItems": 1, "maxItems": 4},
        {"enum": ["pending", "active", "suspended", "closed"]},
        {"type": "object", "properties": {"at": {"type": "boolean"}}, "required": ["at"], **closed},
    ]
    properties = {f"field_{number}": kinds[number % len(kinds)] for number in range(_FIELDS)}
    return {"type": "object", "properties": properties, "required": list(properties), **closed}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, and a tokenizer with nearly as many tokens, the last of which is EOS."""
    size = config["vocab_size"]
    eos = size - 300
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    vocabulary, merges = random_vocabulary(eos)
    added = {"id": eos, "content": "<|end|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**added, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def random_vocabulary(size: int) -> tuple[dict[str, int], list[str]]:
    """Byte-level vocabulary of `size` tokens with its merges: all bytes, then random words, numbers and punctuation in
    about the shares of a real one."""
    draw = random.Random(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merges: list[str] = []
    grown = [letters[ord(letter)] for letter in _LETTERS + _LETTERS.upper() + "0123456789"]
    grown += [letters[ord(sign)] for sign in ' "{}[]():,.;-_=/\\\n']
    ends = [letters[ord(letter)] for letter in _LETTERS]
    signs = [letters[byte] for byte in range(33, 127)]
    while len(vocabulary) < size:
        first = draw.choice(grown)
        second = draw.choice(ends if draw.random() < 0.85 else signs)
        token = first + second
        if token not in vocabulary and len(token) <= 14:
            vocabulary[token] = len(vocabulary)
            merges.append(f"{first} {second}")
            grown.append(token)
    return vocabulary, merges


if __name__ == "__main__":
    main()
