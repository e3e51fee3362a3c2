"""Write a tiny DeepSeek-V4.1 checkpoint: config, tokenizer and random weights by a fixed recipe.

    python scripts/make_tiny_checkpoint.py configs/tiny-dsv41 [--seed 11]

The folder holds `config.json` and `tensors.json` (name -> shape, dtype); `model.safetensors` and the tokenizer
files are written beside them. The recipe is that of the golden values, so their expected outputs apply: the same
bytes on every machine.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

GOLDEN_SEED = 11


def make_tensor(name: str, shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    """One tensor of the recipe: a normal draw seeded by its name, scaled by what it is."""
    generator = np.random.RandomState((zlib.crc32(name.encode()) + seed) & 0xFFFFFFFF)
    draw = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
    if name.endswith("norm.weight"):
        draw = 1 + 0.1 * draw
    elif len(shape) >= 2:
        draw = draw * shape[-1] ** -0.5
    else:
        draw = 0.5 * draw
    if name.endswith(("w2.weight", "_fn")):
        draw = draw * 0.1
    if "hc_attn_scale" in name or "hc_ffn_scale" in name:
        draw = draw * 0.2
    return draw.to(getattr(torch, dtype))


def write_weights(folder: Path, seed: int) -> Path:
    tensors = json.loads((folder / "tensors.json").read_text())
    path = folder / "model.safetensors"
    weights = {name: make_tensor(name, shape, dtype, seed) for name, (shape, dtype) in tensors.items()}
    save_file(weights, path, metadata={"format": "pt"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds config.json and tensors.json")
    parser.add_argument("--seed", type=int, default=GOLDEN_SEED)
    arguments = parser.parse_args()
    path = write_weights(arguments.folder, arguments.seed)
    print(f"wrote {path} ({path.stat().st_size >> 20} MiB)")


if __name__ == "__main__":
    main()
