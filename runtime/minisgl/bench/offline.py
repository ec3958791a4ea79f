"""Output tokens per second of scheduler and engine without a server, beside the roofline of the hardware."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from minisgl.bench import long_context
from minisgl.bench import record as bench_record
from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.bench.device_trace import trace_device
from minisgl.bench.record import Result
from minisgl.bench.report import Metric, gpu_names, report
from minisgl.bench.roofline import Roofline, hardware_of
from minisgl.bench.sampling import PLAIN, Variant
from minisgl.bench.workloads import WORKLOADS, Sizes, Workload, WorkloadName, roofline_tokens_per_second
from minisgl.errors import BenchError
from minisgl.hub.resolve import resolve
from minisgl.models.config import ModelConfig
from minisgl.options import Count, Index, option
from minisgl.wire.messages import SamplingParams

if TYPE_CHECKING:
    from minisgl.offline import LLM

_WARM_UP_TOKENS: Final = 16
"""Limit for answers in the warm-up, which otherwise is the workload with another seed."""

_TRACED_TOKENS: Final = 64
"""Limit for answers in a traced run: enough steps to look at, in a file that a browser can still open."""


class OfflineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads to run, how often, and the files to write."""

    workloads: tuple[WorkloadName, ...] = ("A",)
    variants: tuple[Variant, ...] = (PLAIN,)
    seed: Annotated[Index, option("seed of lengths, tokens and sampling")] = 0
    repeat: Annotated[
        Count, option("timed runs, each with the next seed; the median is reported", default="{} run")
    ] = 1
    trace: Annotated[
        Path | None,
        option(
            "write a trace in Chrome's format of one more run with short answers, and print how long the device was "
            "idle; with several workloads or variants, their names become part of FILE",
            default="none",
        ),
    ] = None
    record: Annotated[
        Path | None,
        option(
            "update the results in FILE, which holds those of other models and workloads on the same kind of device",
            default="none",
        ),
    ] = None

    def seeds(self) -> range:
        """Seeds of the timed runs."""
        return range(self.seed, self.seed + self.repeat)

    def metric_name(self, workload: WorkloadName, variant: Variant, key: str) -> str:
        """Name in the report of the metric `key` of a workload that is sampled by `variant`."""
        parts = [workload.lower()] * (len(self.workloads) > 1) + [variant.name] * (len(self.variants) > 1)
        return "_".join([*parts, key])

    def run_name(self, model: str) -> str:
        """Name of this run of a model: workloads and variants are part of it."""
        return " ".join([model, *self.workloads, *(variant.name for variant in self.variants)])

    def trace_path(self, trace: Path, workload: WorkloadName, variant: Variant) -> Path:
        """Path of a trace: `trace`, with the names of workload and variant in it if there are several."""
        name, dot, suffixes = trace.name.partition(".")
        parts = [name] + [workload.lower()] * (len(self.workloads) > 1) + [variant.name] * (len(self.variants) > 1)
        return trace.with_name(f"{'-'.join(parts)}{dot}{suffixes}")


def run(model: str, sizes: Sizes, options: OfflineOptions, engine: Mapping[str, Any], *, json_path: str | None) -> None:
    """Run the workloads on an `LLM` with the options `engine`, print and write the report. `model` is a directory, a
    Hub id or the name of a built-in configuration. Raises BenchError, and the errors of `LLM`."""
    from minisgl.offline import LLM

    sizes.check()
    known = bench_record.read(options.record) if options.record is not None else None
    with _model_directory(model) as (directory, builtin):
        config = ModelConfig.read(directory, engine.get("hf_overrides"), engine.get("quantization"))
        with LLM(directory, detokenize=False, **{**engine, **({"dummy_weights": True} if builtin else {})}) as llm:
            start = _measure_start(llm)
            metrics: dict[str, Metric] = {
                "model": model,
                "workload": " ".join(options.workloads),
                "variants": " ".join(variant.name for variant in options.variants),
                **start,
            }
            reference: dict[str, Metric] = {}
            roofline = _roofline(llm, config, kv_bytes=1 if engine.get("kv_cache_dtype") == "fp8" else 2)
            for name, variant in product(options.workloads, options.variants):
                if name == "L":
                    measured, floor = _measure_long(llm, sizes, variant, options.seeds(), roofline)
                else:
                    measured, floor = _measure(llm, name, sizes, variant, options.seeds(), roofline)
                reference |= {options.metric_name(name, variant, key): value for key, value in floor.items()}
                if options.trace is not None:
                    path = options.trace_path(options.trace, name, variant)
                    measured |= _trace(llm, name, sizes, variant, options.seeds().stop + 1, path)
                metrics |= {options.metric_name(name, variant, key): value for key, value in measured.items()}
                if options.record is not None and known is not None:
                    quantization = None if config.quantization is None else config.quantization.name
                    kv_cache_dtype = engine.get("kv_cache_dtype", "auto")
                    key = bench_record.model_key(model, llm.tensor_parallel, quantization, kv_cache_dtype)
                    results = _results(key, name, variant, sizes, {**start, **measured})
                    compiled = options.run_name(key), llm.stats.compiled_after_ready
                    bench_record.update(options.record, known, results, compiled)
            metrics |= _engine_metrics(llm)
    report("offline", metrics, reference, json_path)


def _results(
    model: str, workload: WorkloadName, variant: Variant, sizes: Sizes, metrics: Mapping[str, float]
) -> dict[str, Result]:
    """Results to record, under their names there. `model` is the model's part of these names."""

    def result(key: str) -> Result:
        return Result(metrics[key], (metrics[f"{key}_min"], metrics[f"{key}_max"]), metrics.get("f1_ratio"))

    results = {f"engine_up_{model}_s": Result(metrics["engine_up_seconds"])}
    suffix = "" if variant == PLAIN else f"_{variant.name}"
    if workload == "L":
        length = f"{sizes.context_length / 1000:g}k{suffix}"
        results[f"first_token_{length}_{model}_s"] = result("first_token_seconds")
        results[f"tpot_at_{length}_{model}_ms"] = result("tpot_ms")
        return results
    name = f"{workload.lower()}_{model}{suffix}"
    results[f"{name}_tok_s"] = result("tokens_per_second")
    if "f1_ratio" in metrics:
        results[f"{name}_f1"] = Result(metrics["f1_ratio"])
    return results


def _measure_start(llm: LLM) -> dict[str, float]:
    """Generate the first token; returns the seconds of each part of the start until then."""
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


def _measure(
    llm: LLM, name: WorkloadName, sizes: Sizes, variant: Variant, seeds: range, roofline: Roofline | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Run a workload once per seed after a warm-up; returns its metrics, and those of the roofline F1."""
    make = WORKLOADS[name]
    vocabulary = llm.limits.vocab_size
    _generate(llm, make(sizes, vocabulary, seeds.stop), variant, longest_output=_WARM_UP_TOKENS)
    before = _counters(llm)
    workloads = [make(sizes, vocabulary, seed).uncached(variant.number, vocabulary) for seed in seeds]
    seconds, rates = [], []
    for seed, workload in zip(seeds, workloads, strict=True):
        took = _generate(llm, workload, variant)
        seconds.append(took)
        rates.append(workload.output_tokens / took)
        print(f"{name} {variant.name}, seed {seed}: {took:.2f} s, {rates[-1]:,.1f} output tokens/s", file=sys.stderr)
    counted = {key: value - before[key] for key, value in _counters(llm).items()}
    metrics = {
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_min": min(rates),
        "tokens_per_second_max": max(rates),
        "seconds": statistics.median(seconds),
        "runs": len(seeds),
        "first_seed": seeds.start,
        "requests": len(workloads[0].prompts),
        "prompt_tokens_of_first_seed": workloads[0].prompt_tokens,
        "output_tokens_of_first_seed": workloads[0].output_tokens,
        **counted,
    }
    if roofline is None:
        return metrics, {}
    floor = statistics.median(roofline_tokens_per_second(name, workload, roofline) for workload in workloads)
    return metrics | {"f1_ratio": metrics["tokens_per_second"] / floor}, {"tokens_per_second": floor}


def _measure_long(
    llm: LLM, sizes: Sizes, variant: Variant, seeds: range, roofline: Roofline | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Run workload L; returns its metrics, and those of the roofline F1."""
    metrics = long_context.measure(llm, sizes, seeds, variant)
    return metrics, {} if roofline is None else long_context.roofline_times(sizes, roofline)


def _engine_metrics(llm: LLM) -> dict[str, Metric]:
    stats, limits = llm.stats, llm.limits
    return {
        "device": llm.device,
        "tensor_parallel": llm.tensor_parallel,
        "prefill_backend": stats.prefill_backend,
        "decode_backend": stats.decode_backend,
        "transport": stats.transport,
        "compiled_kernels": stats.compiled_kernels,
        "compiled_after_ready": stats.compiled_after_ready,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "num_window_pages": limits.num_window_pages,
        "parameter_gib": stats.parameter_bytes / 2**30,
        "kv_pool_gib": stats.kv_pool_bytes / 2**30,
    }


def _trace(llm: LLM, name: WorkloadName, sizes: Sizes, variant: Variant, seed: int, path: Path) -> dict[str, float]:
    workload = WORKLOADS[name](sizes, llm.limits.vocab_size, seed)
    with trace_device(path, llm.device) as found:
        _generate(llm, workload, variant, longest_output=_TRACED_TOKENS)
    print(f"trace written to {path}", file=sys.stderr)
    [device] = found
    return {
        "trace_idle_share": device.idle_share,
        "trace_gaps": device.gaps,
        "trace_longest_gap_us": device.longest_gap,
    }


def _generate(llm: LLM, workload: Workload, variant: Variant, longest_output: int | None = None) -> float:
    """Run all requests of a workload; returns seconds. Raises BenchError `bad_answer` when an answer is not complete,
    which means that its logits were not finite."""
    params = workload.params(variant, longest_output)
    began = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - began
    failed = [output for output in outputs if output.finish_reason != "length"]
    if failed:
        raise BenchError("bad_answer", f"{len(failed)} of {len(outputs)} answers failed: {failed[0].error}")
    return seconds


def _process_age() -> float:
    """Seconds since this process was started, imports included. /proc counts since boot in ticks of 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _counters(llm: LLM) -> dict[str, int]:
    """Counters of engine and scheduler since the start, under the names of the report."""
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


def _roofline(llm: LLM, config: ModelConfig, *, kv_bytes: int) -> Roofline | None:
    """Roofline F1; None on hardware that was not measured."""
    hardware = hardware_of(next(iter(gpu_names()), "")) if llm.device == "cuda" else None
    return None if hardware is None else Roofline(config, hardware, llm.tensor_parallel, kv_bytes)


@contextmanager
def _model_directory(model: str) -> Iterator[tuple[Path, bool]]:
    """Directory of the model, and whether it was made from a built-in configuration, without weights."""
    if model in BUILTIN_CONFIGS and not Path(model).exists():
        with tempfile.TemporaryDirectory(prefix="minisgl-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(BUILTIN_CONFIGS[model]))
            yield Path(folder), True
    else:
        yield resolve(model), False
