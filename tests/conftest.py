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
    from make_tiny_checkpoint import write_tokenizer, write_weights

    folder = REPOSITORY / "configs" / "tiny-dsv41"
    if not (folder / "model.safetensors").exists():
        write_weights(folder)
    write_tokenizer(folder)
    return folder
