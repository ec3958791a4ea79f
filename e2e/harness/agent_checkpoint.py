"""The demo checkpoint with markers of reasoning and tool calls, for loads that have both."""

from __future__ import annotations

import json
import shutil
import sys
from array import array
from pathlib import Path
from typing import Any, Final

from support.agent_markers import add_markers

_EMBEDDINGS: Final = "model.embed_tokens.weight"


def write_agent_checkpoint(demo: Path, out: Path) -> Path:
    """Copy the demo checkpoint to `out` and add the markers. Their embeddings are fractions of that of padding, which
    the model never gives: answers to requests without tools and thinking stay as they are. No two are equal: where a
    grammar permits several markers, the last bits of a product, which depend on the batch, would choose one."""
    shutil.copytree(demo, out)
    size = add_markers(out)
    config = json.loads((out / "config.json").read_text())
    _repeat_row(out / "model.safetensors", config["pad_token_id"], size)
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return out


def _repeat_row(file: Path, number: int, rows: int) -> None:
    """Append halves, quarters and so on of one row of the embeddings until there are so many rows. Not with torch,
    whose import takes each process of the scenarios four seconds of CPU time, nor with NumPy, which has no bfloat16."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    written, data = {}, bytearray()
    for name, entry in header.items():
        if name == "__metadata__":
            written[name] = entry
            continue
        first, end = entry["data_offsets"]
        tensor = content[begin + first : begin + end]
        if name == _EMBEDDINGS:
            before, columns = entry["shape"]
            width = len(tensor) // before
            row = tensor[number * width : (number + 1) * width]
            tensor += b"".join(_halved(row, times) for times in range(1, rows - before + 1))
            entry["shape"] = [rows, columns]
        written[name] = {**entry, "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    encoded = json.dumps(written).encode()
    # The data is aligned to eight bytes.
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _halved(values: bytes, times: int) -> bytes:
    """Each bfloat16 divided by two so many times: its exponent is in bits 7 to 14. The smallest values stay."""
    assert sys.byteorder == "little"
    return array("H", (v - (times << 7) if (v >> 7) & 0xFF > times else v for v in array("H", values))).tobytes()
