"""Field reports on pairs, chunks and prefixes, over the host's real pool (docs/conformance.md has the table)."""

from __future__ import annotations

import pytest
import torch
from harness import Bench, Request, expected, relative_error

NOISE = 5e-3
# A pool of 2 blocks of 8 and a Top-K of 4: a short context already chooses, drops blocks and crosses them.
SMALL = {"candidate_topk_blocks": 2, "index_topk": 4}


def played(schedule: list[tuple[int, str]], *, n: int, slot: int = 3, seed: int = 1, **config) -> tuple[Bench, Request]:
    bench = Bench(pages=4, **config)
    request = Request.draw(n, seed, slot)
    for count, mode in schedule:
        bench.forward([(request, count)], mode)
    return bench, request


def assert_expected(bench: Bench, request: Request) -> None:
    for layer_id, out in expected(bench, request).outputs.items():
        assert relative_error(bench.output(request, layer_id), out) < NOISE, f"layer {layer_id}"


def assert_same(bench: Bench, request: Request, other_bench: Bench, other: Request) -> None:
    mine, theirs = bench.cache_bytes(request), other_bench.cache_bytes(other)
    for name, owned in mine.items():
        assert torch.equal(owned, theirs[name]), name
    for layer_id in range(10):
        assert torch.equal(bench.output(request, layer_id), other_bench.output(other, layer_id)), f"layer {layer_id}"


@pytest.mark.parametrize("n", [1, 12, 13])
def test_an_odd_prefix_leaves_its_last_row_pending_and_an_even_one_nothing(n):
    """sgl-project/sglang#38819: after an odd prefix the wrong rows were paired, at another ring stride.

    https://github.com/sgl-project/sglang/issues/38819
    """
    bench, request = played([(n, "EXTEND")], n=n, slot=5)
    pending = bench.pool.pending_pairs(2)
    written = (~pending.isnan().any(-1)).nonzero().flatten().tolist()
    if n % 2 == 0:
        assert written == []
        return
    assert written == [5 * bench.pool.pending_ring + (n - 1) % bench.pool.pending_ring]
    kv, score = bench.layers[2].compressor.project(request.inputs[2].rows(slice(n - 1, n)).x)
    assert torch.equal(pending[written[0]], torch.cat([kv, score], -1)[0])


def test_a_shared_complete_entry_keeps_its_bytes():
    """lightseekorg/tokenspeed#1594: a hit in mid pair lost the pair, or rewrote a shared entry.

    https://github.com/lightseekorg/tokenspeed/pull/1594
    """
    bench = Bench(pages=6)
    first = Request.draw(262, seed=1, slot=1)
    bench.forward([(first, 257)])
    before = bench.cache_bytes(first)
    second = Request.draw(262, seed=2, slot=2)
    bench.req_to_token[2, :256] = bench.req_to_token[1, :256]
    second.length = 256
    bench.forward([(second, 3), (first, 1)])
    bench.forward([(second, 1), (first, 1)], "DECODE")
    after = bench.cache_bytes(first)
    for name, owned in before.items():
        assert torch.equal(after[name][: len(owned)], owned), name


@pytest.mark.parametrize("n", [7, 8, 9, 16, 17, 18, 25])
def test_a_partial_last_block_stays_eligible(n):
    """sgl-project/sglang#38848: the ratio-1 consumer dropped the entries of its pool's half-full newest block.

    https://github.com/sgl-project/sglang/pull/38848
    """
    bench, request = played([(n, "EXTEND")], n=n, **SMALL)
    assert_expected(bench, request)
    selection = bench.backend.forward_metadata.selection
    for layer_id, chosen in expected(bench, request).chosen.items():
        assert torch.equal(selection.topk[layer_id].positions, chosen), f"layer {layer_id}"


@pytest.mark.parametrize("chunks", [[1] * 12, [3, 5, 7, 1], [1, 2, 1, 2, 7], [9, 8]], ids=str)
def test_a_chunk_border_inside_a_pair_changes_nothing(chunks):
    """ggml-org/llama.cpp#26471, wtdcode/vllm-backport#69: a batch border inside a group gave garbage.

    https://github.com/ggml-org/llama.cpp/issues/26471 https://github.com/wtdcode/vllm-backport/issues/69
    """
    n = sum(chunks)
    whole_bench, whole = played([(n, "EXTEND")], n=n, **SMALL)
    bench, request = played([(count, "EXTEND") for count in chunks], n=n, **SMALL)
    assert_same(bench, request, whole_bench, whole)


def test_pending_halves_are_private_to_a_request():
    """sgl-project/sglang#35494: two live requests on one radix prefix shared their compressor's state.

    https://github.com/sgl-project/sglang/issues/35494
    """
    bench = Bench(pages=4, **SMALL)
    requests = [Request.draw(12, seed=seed, slot=slot) for seed, slot in ((1, 6), (2, 1), (3, 4))]
    # Lengths differ, so that the shorter ones have stale table entries where the longest has tokens.
    bench.forward([(request, 3 + 2 * i) for i, request in enumerate(requests)])
    for order in ((2, 0, 1), (1, 2, 0), (0, 1, 2)):
        bench.forward([(requests[i], 1) for i in order], "DECODE")
    # Another batch row than before, beside a request that comes and goes.
    bench.forward([(requests[1], 3), (requests[0], 2)], "MIXED")
    for request in requests:
        assert_expected(bench, request)


@pytest.mark.parametrize("n", [5, 6, 20])
def test_a_decode_step_is_a_prefill_one_longer(n):
    """ml-explore/mlx-lm#1189: a step of one row differed from a prefill; the second request was gibberish.

    https://github.com/ml-explore/mlx-lm/issues/1189
    """
    bench, request = played([(n, "EXTEND"), (1, "DECODE")], n=n + 1, **SMALL)
    whole_bench, whole = played([(n + 1, "EXTEND")], n=n + 1, **SMALL)
    assert_same(bench, request, whole_bench, whole)
    second = Request.draw(n, seed=9, slot=request.slot)
    bench.forward([(second, n)])
    assert_expected(bench, second)


@pytest.mark.parametrize("left_at", [3, 4])
def test_a_slot_given_up_between_the_halves_of_a_pair_is_clean(left_at):
    """Abort or retraction between the two halves (the matrix at the end of section 5; sgl-project/sglang#33385).

    https://github.com/sgl-project/sglang/issues/33385
    """
    bench, _ = played([(left_at, "EXTEND")], n=left_at, slot=3, **SMALL)
    second = Request.draw(9, seed=2, slot=3)
    for count in (1, 1, 3, 4):
        bench.forward([(second, count)])
    assert_expected(bench, second)
