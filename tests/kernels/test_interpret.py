"""The GPU tests at small sizes in Triton's interpreter, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Triton 3.6's interpreter, moreover, fails with numpy 2.4 and later on a loop whose bounds are tensors.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs these tests themselves")
HERE = Path(__file__).parent
# The interpreter scans slowly: of the top-k tests a few do.
SUITES = {
    "stores and pooling": ["test_store.py", "test_pool_pairs.py", "test_gather.py", "test_v4.py"],
    "index scores": ["test_index_scores.py"],
    "attention": ["test_sparse_attention.py"],
    "top-k": ["test_topk.py", "-k", "in_blocks or best_blocks or slots or refusals"],
}


@pytest.mark.parametrize("suite", SUITES)
def test_interpreted(suite):
    names, options = [], []
    for word in SUITES[suite]:
        (names if word.endswith(".py") else options).append(word)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(str(HERE / n) for n in names),
        *options,
    ]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
