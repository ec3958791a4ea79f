"""`minisgl bench offline`: output tokens per second of scheduler and engine, beside the floor of the hardware."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.bench import record as bench_record
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.errors import BenchError
from minisgl.bench.report import Figure, gpu_names, report
from minisgl.bench.roofline import ModelShape, hardware_of
from minisgl.bench.timeline import traced
from minisgl.bench.workloads import WORKLOADS, Sizes, Workload, WorkloadName, floor_tokens_per_second
from minisgl.flags.arguments import add_engine_arguments, add_json_argument, engine_options, integer
from minisgl.hub.resolve import resolve
from minisgl.wire.messages import SamplingParams

if TYPE_CHECKING:
    from minisgl.offline import LLM

_WARM_UP_TOKENS: Final = 16
"""Longest answer in the warm-up, which else is the workload with another seed."""

_TRACED_TOKENS: Final = 64
"""Longest answer in a traced run: enough steps to look at, in a file that a browser can still open."""

_DEFAULTS: Final = Sizes()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="qwen3-0.6b",
        metavar="MODEL",
        help="directory, Hub id, or one of the built-in configurations, which always have dummy weights: "
        f"{', '.join(BUILTIN_CONFIGS)} (default: qwen3-0.6b)",
    )
    parser.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        nargs="+",
        default=["A"],
        help="A: independent requests, C: one request alone, C64: 64 like it, D: requests with a shared prefix; "
        "several run one after the other, and the names of their figures begin with theirs (default: A)",
    )
    parser.add_argument(
        "--num-requests",
        type=integer(1),
        default=_DEFAULTS.requests,
        metavar="N",
        help=f"requests of A and D (default: {_DEFAULTS.requests} requests)",
    )
    for flag, what, default in (
        ("--input-len", "prompts", _DEFAULTS.input_length),
        ("--output-len", "answers", _DEFAULTS.output_length),
    ):
        parser.add_argument(
            flag,
            type=integer(1),
            nargs=2,
            default=default,
            metavar=("LO", "HI"),
            help=f"shortest and longest {what} of A (default: {default[0]} {default[1]} tokens)",
        )
    parser.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="of lengths, tokens and sampling (default: 0)"
    )
    parser.add_argument(
        "--repeat",
        type=integer(1),
        default=1,
        metavar="N",
        help="timed runs, each with the next seed; the median counts (default: 1 run)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace in Chrome's format of one more run with short answers, and print how long the device had "
        "nothing to do; several workloads write FILE with their names in it (default: none)",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="put the figures into this file too, beside those of other models and workloads on the same kind of "
        "device (default: none)",
    )
    add_json_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from minisgl.offline import LLM

    for flag, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            raise BenchError("bad_range", f"{flag} {low} {high}: the shortest is longer than the longest")
    known = bench_record.read(args.record) if args.record is not None else None
    sizes = Sizes(requests=args.num_requests, input_length=tuple(args.input_len), output_length=tuple(args.output_len))
    with _model_directory(args.model) as (directory, builtin):
        config = json.loads((directory / "config.json").read_text())
        options = engine_options(args) | ({"dummy_weights": True} if builtin else {})
        with LLM(directory, detokenize=False, **options) as llm:
            start = _start(llm)
            figures: dict[str, Figure] = {"model": args.model, "workload": " ".join(args.workload), **start}
            reference: dict[str, Figure] = {}
            for name in args.workload:
                measured = _measure(llm, name, sizes, args.seed, args.repeat)
                floor = _floor(name, sizes, range(args.seed, args.seed + args.repeat), config, args.tp)
                if llm.device == "cuda" and floor is not None:
                    measured["f1_ratio"] = _number(measured["tokens_per_second"]) / floor
                    reference[_figure(args, name, "tokens_per_second")] = floor
                if args.trace is not None:
                    path = _trace_path(args, name)
                    measured |= _trace(llm, name, sizes, args.seed + args.repeat + 1, path)
                figures |= {_figure(args, name, key): value for key, value in measured.items()}
                if known is not None:
                    bench_record.update(args.record, known, args.model, name, args.tp, {**start, **measured})
            figures |= _engine(llm)
    report("offline", figures, reference, args.json)
    return 0


def _figure(args: argparse.Namespace, workload: WorkloadName, key: str) -> str:
    """What `key` of a workload is called in the report."""
    return key if len(args.workload) == 1 else f"{workload.lower()}_{key}"


def _trace_path(args: argparse.Namespace, workload: WorkloadName) -> Path:
    path: Path = args.trace
    name, dot, suffixes = path.name.partition(".")
    return path if len(args.workload) == 1 else path.with_name(f"{name}-{workload.lower()}{dot}{suffixes}")


def _start(llm: LLM) -> dict[str, Figure]:
    """Serve the first token, and tell how long each part of the start took until then."""
    built = _process_age()
    llm.generate([[0]], SamplingParams(max_tokens=1, ignore_eos=True))
    up = _process_age()
    phases = llm.stats.start_seconds
    return {
        "engine_up_seconds": up,
        "start_command_seconds": built - sum(phases.values()),
        **{f"start_{phase}_seconds": seconds for phase, seconds in phases.items()},
        "start_first_token_seconds": up - built,
    }


def _measure(llm: LLM, name: WorkloadName, sizes: Sizes, seed: int, repeat: int) -> dict[str, Figure]:
    make = WORKLOADS[name]
    vocabulary = llm.limits.vocab_size
    warm_up = make(sizes, vocabulary, seed + repeat)
    _generate(llm, warm_up, longest_output=_WARM_UP_TOKENS)
    before = _counters(llm)
    seconds, rates = [], []
    for run_seed in range(seed, seed + repeat):
        workload = make(sizes, vocabulary, run_seed)
        took = _generate(llm, workload)
        seconds.append(took)
        rates.append(workload.output_tokens / took)
        print(f"{name}, seed {run_seed}: {took:.2f} s, {rates[-1]:,.1f} output tokens/s", file=sys.stderr)
    counted = {key: value - before[key] for key, value in _counters(llm).items()}
    workload = make(sizes, vocabulary, seed)
    return {
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "seconds": statistics.median(seconds),
        "runs": repeat,
        "first_seed": seed,
        "requests": len(workload.prompts),
        "prompt_tokens_of_first_seed": workload.prompt_tokens,
        "output_tokens_of_first_seed": workload.output_tokens,
        **counted,
    }


def _engine(llm: LLM) -> dict[str, Figure]:
    stats, limits = llm.stats, llm.limits
    return {
        "device": llm.device,
        "tensor_parallel": llm.tensor_parallel,
        "prefill_backend": stats.prefill_backend,
        "decode_backend": stats.decode_backend,
        "transport": stats.transport,
        "compiled_kernels": stats.compiled_kernels,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "parameter_gib": stats.parameter_bytes / 2**30,
        "kv_pool_gib": stats.kv_pool_bytes / 2**30,
    }


def _trace(llm: LLM, name: WorkloadName, sizes: Sizes, seed: int, path: Path) -> dict[str, Figure]:
    with traced(path, llm.device) as found:
        _generate(llm, WORKLOADS[name](sizes, llm.limits.vocab_size, seed), longest_output=_TRACED_TOKENS)
    print(f"trace written to {path}", file=sys.stderr)
    [device] = found
    return {
        "trace_idle_share": device.idle_share,
        "trace_gaps": device.gaps,
        "trace_longest_gap_us": device.longest_gap,
    }


def _generate(llm: LLM, workload: Workload, longest_output: int | None = None) -> float:
    """Seconds. Raises BenchError `bad_answer` when an answer is not complete: logits were not finite."""
    began = time.perf_counter()
    outputs = llm.generate(workload.prompts, workload.params(longest_output))
    seconds = time.perf_counter() - began
    failed = [output for output in outputs if output.finish_reason != "length"]
    if failed:
        raise BenchError("bad_answer", f"{len(failed)} of {len(outputs)} answers failed: {failed[0].error}")
    return seconds


def _process_age() -> float:
    """Seconds since this process was started: imports are part of an engine's start. From /proc, whose clock runs
    since boot and ticks every 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _counters(llm: LLM) -> dict[str, int]:
    stats, counters = llm.stats, llm.counters
    return {
        "steps": stats.steps,
        "graph_replays": stats.graph_replays,
        "eager_decode_steps": stats.eager_decode_steps,
        "cascade_steps": stats.cascade_steps,
        "mixed_steps": stats.mixed_steps,
        "prefill_tokens": stats.prefill_tokens,
        "decode_tokens": stats.decode_tokens,
        "cached_tokens": counters.cached_tokens,
        "retractions": counters.preemptions,
    }


def _floor(
    name: WorkloadName, sizes: Sizes, seeds: Sequence[int], config: Mapping[str, Any], tensor_parallel: int
) -> float | None:
    """Output tokens per second at the F1 floor, the median of the runs; None on hardware that was not measured."""
    hardware = hardware_of(next(iter(gpu_names()), ""))
    if hardware is None:
        return None
    model = ModelShape.from_config(config, tensor_parallel)
    workloads = [WORKLOADS[name](sizes, config["vocab_size"], seed) for seed in seeds]
    return statistics.median(floor_tokens_per_second(name, workload, model, hardware) for workload in workloads)


@contextmanager
def _model_directory(model: str) -> Iterator[tuple[Path, bool]]:
    """The directory, and whether it was made from a built-in configuration, without weights."""
    if model in BUILTIN_CONFIGS and not Path(model).exists():
        with tempfile.TemporaryDirectory(prefix="minisgl-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[model]))
            yield Path(folder), True
    else:
        yield resolve(model), False


def _number(figure: Figure) -> float:
    assert isinstance(figure, float | int)
    return figure
