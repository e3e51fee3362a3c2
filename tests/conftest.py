"""Shared fixtures: the tiny checkpoint, built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
sys.path[:0] = [str(TESTS), str(TESTS / "host"), str(REPOSITORY / "scripts")]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """configs/tiny-dsv41 with its weights and tokenizer."""
    return _built("tiny-dsv41")


@pytest.fixture(scope="session")
def tiny_model_64h() -> Path:
    """configs/tiny-dsv41-64h, the tiny model with 64 heads and Top-512, with its weights and tokenizer."""
    return _built("tiny-dsv41-64h")


def _built(name: str) -> Path:
    from make_tiny_checkpoint import write_tokenizer, write_weights

    folder = REPOSITORY / "configs" / name
    if not (folder / "model.safetensors").exists():
        write_weights(folder)
    write_tokenizer(folder)
    return folder
