"""Grammars of constrained answers on the CPU: `python benchmarks/grammar.py --model DIRECTORY [--vocab-size N]`.

Prints the time to read the tokenizer; to check and to compile constraints that were not seen before; and to fill masks
and to consume tokens along answers, per token of one row and for batches of 256 rows, each at another place of its
answer. Times of batches are by the clock, all others CPU time. Only tokenizer.json is read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from minisgl.grammar.build import build
from minisgl.grammar.grammars import Grammars
from minisgl.grammar.validate import validate
from minisgl.wire.text import ConstraintKind, StructuredOutput

ROWS = 256
REPEATS = 5
ANSWERS = 40

FIELDS: list[tuple[dict[str, Any], Callable[[int], Any]]] = [
    ({"type": "string", "maxLength": 60}, lambda i: f"The answer to question {i}, in a few words"),
    ({"type": "integer", "minimum": 0}, lambda i: 17 * i),
    ({"type": "boolean"}, lambda i: i % 2 == 0),
    ({"enum": ["low", "medium", "high"]}, lambda i: ("low", "medium", "high")[i % 3]),
    ({"type": "array", "items": {"type": "number"}, "maxItems": 5}, lambda i: [i / 4, 3.5, -2]),
]


def twenty_fields(number: int) -> tuple[ConstraintKind, Any, str]:
    names = [f"field_{number}_{i}" for i in range(20)]
    schema = {
        "type": "object",
        "properties": {name: FIELDS[i % 5][0] for i, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }
    return "json", schema, json.dumps({name: FIELDS[i % 5][1](number + i) for i, name in enumerate(names)}, indent=2)


def any_object(number: int) -> tuple[ConstraintKind, Any, str]:
    schema = {"type": "object", "description": f"{number}"}
    return "json", schema, json.dumps({"id": number, "list": [{"name": "value", "text": "Some more words"}] * 4})


def calls(number: int) -> tuple[ConstraintKind, Any, str]:
    tools = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{number}_{i}"},
                "arguments": {
                    "type": "object",
                    "properties": {f"argument_{j}": FIELDS[j % 5][0] for j in range(6)},
                    "required": ["argument_0"],
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i in range(128)
    ]
    call = {"name": f"tool_{number}_77", "arguments": {"argument_0": "Some text for a tool", "argument_1": 5}}
    return "json", {"anyOf": tools}, json.dumps(call)


def regex(number: int) -> tuple[ConstraintKind, Any, str]:
    return "regex", rf"[A-Z][a-z]+( [a-z]+)*: \d{{1,8}} \({number}\)", f"Some words and a number: 12345 ({number})"


COLUMNS = (
    *(("check", "ms"), ("compile", "ms"), ("mask p50", "µs"), ("p99", "µs"), ("max", "µs")),
    *(("256 masks p50", "ms"), ("p99", "ms"), ("consume", "ms")),
)
WIDTHS = (8, 9, 10, 8, 8, 15, 7, 9)
CASES = {"20 fields": twenty_fields, "any object": any_object, "128 tools": calls, "regex": regex}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/demo"), help="directory with tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="number of logits; default: that of the tokenizer")
    parser.add_argument("--threads", type=int, help="threads that fill masks")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    size = arguments.vocab_size or tokenizer.get_vocab_size()
    end = tokenizer.get_vocab_size() - 1
    with timed() as seconds:
        grammars = Grammars(arguments.model, size, [end], threads=arguments.threads)
    print(f"vocabulary {size}, tokenizer read in {seconds() * 1e3:.0f} ms")
    print(" " * 12 + "".join(f"{name:>{width}}" for (name, _), width in zip(COLUMNS, WIDTHS, strict=True)))
    print(" " * 12 + "".join(f"{unit:>{width}}" for (_, unit), width in zip(COLUMNS, WIDTHS, strict=True)))
    for name, make in CASES.items():
        measure(name, make, tokenizer, grammars)


def measure(
    name: str, make: Callable[[int], tuple[ConstraintKind, Any, str]], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    checks, compilations, masks = [], [], []
    batches: list[list[int]] = []
    row = np.zeros(grammars.mask_words, np.int32)
    for number in range(ANSWERS):
        kind, value, answer = make(number)
        constraint = StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))
        with timed() as seconds:
            validate(constraint)
        checks.append(seconds())
        text = build(constraint)
        with timed() as seconds:
            matcher = grammars.matcher(text)
        compilations.append(seconds())
        batches.append(tokenizer.encode(answer, add_special_tokens=False).ids)
        for token in batches[-1]:
            with timed() as seconds:
                matcher.fill_mask(row)
            masks.append(seconds())
            assert matcher.consume(token), f"{name}: the answer does not satisfy the constraint"
        assert matcher.can_end
    fills, consumptions = measure_batches(make, batches, grammars)
    columns = [np.median(checks) * 1e3, np.median(compilations) * 1e3]
    columns += [np.percentile(masks, q) * 1e6 for q in (50, 99, 100)]
    columns += [np.percentile(fills, q) * 1e3 for q in (50, 99)] + [np.median(consumptions) * 1e3]
    print(f"{name:12}" + "".join(f"{column:{width}.2f}" for column, width in zip(columns, WIDTHS, strict=True)))


def measure_batches(
    make: Callable[[int], tuple[ConstraintKind, Any, str]], answers: list[list[int]], grammars: Grammars
) -> tuple[list[float], list[float]]:
    """Return the seconds of each step of batches in which answers begin at different times."""
    fills, consumptions = [], []
    masks = np.zeros((ROWS, grammars.mask_words), np.int32)
    for _ in range(REPEATS):
        kinds = [make(row % ANSWERS) for row in range(ROWS)]
        texts = [
            build(StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value)))
            for kind, value, _ in kinds
        ]
        rows = [
            (grammars.matcher(text), answers[i % ANSWERS], i % len(answers[i % ANSWERS]))
            for i, text in enumerate(texts)
        ]
        for matcher, answer, at in rows:
            matcher.replay(answer[:at])
        for step in range(min(len(answer) - at for _, answer, at in rows) + 20):
            active = [(i, m, a[at + step]) for i, (m, a, at) in enumerate(rows) if at + step < len(a)]
            if len(active) < ROWS * 3 // 4:
                break
            with timed(time.perf_counter) as seconds:
                errors = grammars.fill([(matcher, i) for i, matcher, _ in active], masks)
            fills.append(seconds() * ROWS / len(active))
            assert not errors
            with timed(time.perf_counter) as seconds:
                allowed = grammars.consume([(matcher, token) for _, matcher, token in active])
            consumptions.append(seconds() * ROWS / len(active))
            assert all(allowed)
    return fills, consumptions


@contextmanager
def timed(clock: Callable[[], float] = time.process_time) -> Iterator[Callable[[], float]]:
    start = clock()
    end = start
    yield lambda: end - start
    end = clock()


if __name__ == "__main__":
    main()
