"""Host memory while weights are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.weights import load_weights
from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.served import RUNTIME

MOST = 1.7
"""Most host memory relative to the bytes of the parameters: the parameters, and about a third for the parts of files
that threads are reading. A second copy of the model would make it 2."""


def test_loading_never_holds_a_second_copy_of_the_model(tmp_path: Path) -> None:
    """200 MB in many tensors, in a process of its own: the most that this one ever held says nothing."""
    write_tiny_checkpoint(tmp_path, "llama", layers=12, hidden=768, intermediate=3072, heads=12, kv_heads=12)
    run = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(RUNTIME), str(Path(__file__).parents[2])))},
        capture_output=True,
        text=True,
        check=True,
    )
    parameter_bytes, grown = json.loads(run.stdout)
    assert parameter_bytes > 190e6, "too little beside what libraries take"
    assert parameter_bytes < grown < MOST * parameter_bytes


def _most_resident_bytes() -> int:
    """Not from getrusage: there a program starts with what the one that started it held."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def main(checkpoint: Path) -> None:
    before = _most_resident_bytes()
    model = Decoder(ModelConfig.read(checkpoint), TensorParallel(), torch.bfloat16, "cpu")
    load_weights(model.parameters, checkpoint)
    print(json.dumps((model.parameter_bytes, _most_resident_bytes() - before)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
