"""Run `vllm bench serve` from vLLM's unmodified sources, without vLLM's engine and the CUDA libraries.

    pip download vllm --no-deps -d sources
    unzip -q 'sources/vllm-*.whl' 'vllm/benchmarks/*' 'vllm-*.dist-info/METADATA' -d sources
    minisgl serve MODEL --port 8000
    python e2e/clients/vllm_bench.py sources --backend openai-chat --base-url http://127.0.0.1:8000 \\
        --endpoint /v1/chat/completions --model NAME --tokenizer MODEL --dataset-name random --num-prompts 50

The benchmark imports other modules of vLLM, which would import the engine. This script replaces the functions that it
calls, and provides empty names for the others. Requires aiohttp, numpy, pillow, tqdm and transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Placeholder:
    """Placeholder with any attribute, for names that only other benchmarks use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return placeholder(name)


def placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Placeholder


def get_tokenizer(name: str, **_: Any) -> Any:
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)


REPLACEMENTS: dict[str, dict[str, Any]] = {
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.utils.gc_utils": {"freeze_gc_heap": gc.freeze},
    "vllm.utils.network_utils": {"join_host_port": "{}:{}".format},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
    # pybase64 has the same functions as base64.
    "pybase64": vars(base64),
}


class ReplacementFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules that no other finder has found: replaced modules, and the rest of vLLM."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REPLACEMENTS and not name.startswith("vllm."):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = placeholder  # type: ignore[method-assign]
        vars(module).update(REPLACEMENTS.get(module.__name__, {}))


def version(sources: Path) -> str:
    found = sorted(sources.glob("vllm-*.dist-info/METADATA"))
    lines = found[0].read_text().splitlines() if found else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("Version: ")), "of unknown version")


def main() -> int:
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "vllm" / "benchmarks" / "serve.py").is_file():
        print(__doc__, file=sys.stderr)
        return 2
    sources = Path(sys.argv[1])
    sys.path.insert(0, str(sources.resolve()))
    sys.meta_path.append(ReplacementFinder())
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = argparse.ArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    args = parser.parse_args(sys.argv[2:])
    print(f"vLLM {version(sources)}")
    result = asyncio.run(serve.main_async(args))
    return 0 if result["failed"] == 0 and result["completed"] == args.num_prompts else 1


if __name__ == "__main__":
    sys.exit(main())
