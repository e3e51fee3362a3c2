"""Write a tiny DeepSeek-V4.1 checkpoint: random weights by a fixed recipe, and a tokenizer.

    python scripts/make_tiny_checkpoint.py configs/tiny-dsv41 [--seed N]

The folder holds `config.json` and `tensors.json` (name -> shape, dtype); `model.safetensors` and the tokenizer
files are written beside them. The weights follow the recipe of the golden values, seed included, so their expected
outputs apply: the same bytes on every machine.

The tokenizer is byte-level BPE below 1,024 ids: the special tokens of DeepSeek's chat encoder, the 256 bytes, and
merges of letter pairs. Every id decodes to text, so a random network's output can be printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The seeds of the golden values (tests/golden/data/*/golden.json), by the folder's name.
GOLDEN_SEEDS = {"tiny-dsv41": 11, "tiny-dsv41-64h": 17}
VOCAB_SIZE = 1024
# The first three are the config's bos, eos and pad ids. The rest is what DeepSeek's chat encoder looks up.
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<think>",
    "</think>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
    "<｜image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)
SPACE = "Ġ"  # how byte-level BPE spells a space


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


def write_weights(folder: Path, seed: int | None = None) -> Path:
    """Write `model.safetensors` from the folder's `tensors.json`; the seed is by default that of the golden values."""
    if seed is None:
        seed = GOLDEN_SEEDS.get(folder.resolve().name, 11)
    tensors = json.loads((folder / "tensors.json").read_text())
    path = folder / "model.safetensors"
    weights = {name: make_tensor(name, shape, dtype, seed) for name, (shape, dtype) in tensors.items()}
    save_file(weights, path, metadata={"format": "pt"})
    return path


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    pairs = itertools.chain(
        itertools.product(string.ascii_lowercase, repeat=2),
        itertools.product(SPACE, string.ascii_letters),
        itertools.product(string.digits, repeat=2),
    )
    merges = list(itertools.islice(pairs, VOCAB_SIZE - len(tokens)))
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS[:3]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds config.json and tensors.json")
    parser.add_argument("--seed", type=int, default=None, help="by default that of the golden values")
    arguments = parser.parse_args()
    path = write_weights(arguments.folder, arguments.seed)
    write_tokenizer(arguments.folder)
    print(f"wrote {path} ({path.stat().st_size >> 20} MiB) and a tokenizer of {VOCAB_SIZE} ids")


if __name__ == "__main__":
    main()
