"""Faults of scripts/mutants.py beside pool, selection and metadata: in the checks and in the GPU's kernels.

Kernels in CUDA C++ are run by emulation, those in Triton by its interpreter, so these need no GPU.
"""

from __future__ import annotations

from mutant import Mutant

_CHECKS, _LEDGER = "sglang_csa2/checks.py", "sglang_csa2/ledger.py"
_OF_CHECKS, _EMULATED = "tests/host/test_checks.py", "tests/kernels/test_cuda_{}emulation.py"
_METADATA = f"{_OF_CHECKS}::test_metadata_that_is_not_the_batchs"
_SELECTION = f"{_OF_CHECKS}::test_a_selection_that_breaks_a_rule"
_POOL = f"{_OF_CHECKS}::test_a_pool_that_breaks_a_rule"
_TOPK, _DECODE = _EMULATED.format("topk_"), _EMULATED.format("index_decode_")
_PREFILL, _ATTENTION = _EMULATED.format("index_"), _EMULATED.format("")
_INTERPRETED = "tests/kernels/test_interpret.py::test_interpreted[{}]"

CHECK_MUTANTS = (
    Mutant(
        "check: stamps not compared",
        _LEDGER,
        "(outside | (stamps[slots.clamp(0, len(stamps) - 1).long()] != serials) | (serials == 0))",
        "(outside | (serials == 0))",
        f"{_OF_CHECKS}::test_a_slot_not_written_since_its_allocation",
    ),
    Mutant(
        "check: a prefix is adopted unread",
        _LEDGER,
        "        if not whole.all():",
        "        if False:",
        f"{_OF_CHECKS}::test_a_prefix_that_is_not_one_sequence",
    ),
    Mutant(
        "check: tokens of a page from several sequences",
        _LEDGER,
        "whole[1:] &= borders | (self.before[slots[1:]] == serials[:-1])",
        "del borders",
        f"{_OF_CHECKS}::test_a_prefix_that_is_not_one_sequence",
    ),
    Mutant(
        "check: window KV goes with its page for ever",
        _LEDGER,
        "self.expected_window[slot, seen:length] = self.swa.chain(swa, positions[seen:], slot, length)",
        "self.expected_window[slot, seen:length] = self.expected[slot, seen:length]",
        f"{_OF_CHECKS}::test_window_kv_moved_under_a_cached_page",
    ),
    Mutant(
        "check: who was in a request slot before is still there",
        _LEDGER,
        "                or self.owners.get(slot) != rid\n",
        "",
        f"{_OF_CHECKS}::test_who_comes_after_in_a_request_slot_passes",
    ),
    Mutant(
        "check: a freed request slot is remembered",
        _LEDGER,
        "            self.lengths.pop(slot, None)",
        "            pass",
        f"{_OF_CHECKS}::test_who_comes_after_in_a_request_slot_passes",
    ),
    Mutant(
        "check: a page put in the place of another goes unseen",
        _LEDGER,
        "                or not found.equal(self.seen[slot, :first])\n",
        "",
        f"{_OF_CHECKS}::test_a_page_put_in_the_place_of_its_copy_passes",
    ),
    Mutant(
        "check: any layer may write index K",
        _CHECKS,
        '        self._writes(cache, "index K")\n',
        "",
        f"{_OF_CHECKS}::test_a_layer_that_writes_what_is_not_its_own",
    ),
    Mutant(
        "check: a tail may have the forward's selection",
        _LEDGER,
        "        if tail.selection is whole.selection:",
        "        if False:",
        f"{_OF_CHECKS}::test_a_tail_with_the_forwards_selection",
    ),
    Mutant(
        "the tail's source compressed twice",
        "sglang_csa2/backend.py",
        "        self._source_already_written = layer.layer_id",
        "        pass",
        f"{_OF_CHECKS}::test_a_ratio_two_source_is_compressed_once_under_replay",
    ),
    Mutant(
        "check: rows not compared with the batch",
        _LEDGER,
        '_equal(meta.positions[live], positions.to(device)[live], "positions", "the host\'s")',
        "del positions",
        _METADATA,
    ),
    Mutant(
        "check: any layer's cache will do",
        _LEDGER,
        "if cache is None or cache.data_ptr() != self.caches[kind, source]:",
        "if cache is None:",
        f"{_OF_CHECKS}::test_another_layers_cache",
    ),
    Mutant(
        "check: a part of the window will do",
        _CHECKS,
        "if not torch.equal(slots >= 0, listed):",
        "if ((slots >= 0) & ~listed).any():",
        _METADATA,
    ),
    Mutant(
        "check: a pair closes with any row",
        _CHECKS,
        "if (mine[partners.clamp(min=0)] != what)[inside].any():",
        "if False:",
        _METADATA,
    ),
    Mutant(
        "check: any source's selection will do",
        _CHECKS,
        "if topk is None or topk.slots is not slots:",
        "if topk is None:",
        f"{_OF_CHECKS}::test_a_selection_that_its_source_did_not_publish",
    ),
    Mutant(
        "check: fewer chosen than there are will do",
        _CHECKS,
        "if (wrong := counts != wanted).any():",
        "if (wrong := counts > wanted).any():",
        _SELECTION,
    ),
    Mutant(
        "check: an absent pool will do",
        _CHECKS,
        "            if (visible > config.candidate_pool_entries).any():",
        "            if False:",
        _POOL,
    ),
    Mutant(
        "check: a graph is let pass",
        _CHECKS,
        "    backend.init_forward_metadata_in_graph = init_forward_metadata_in_graph\n",
        "",
        f"{_OF_CHECKS}::test_a_graph_is_refused",
    ),
)

KERNEL_MUTANTS = (
    Mutant(
        "CUDA C++: one tie too many",
        "kernels/csrc/select.cu",
        "if (is_above || (is_tied && my_tied < limit.ties)) {",
        "if (is_above || (is_tied && my_tied <= limit.ties)) {",
        f"{_TOPK}::test_select_in_blocks",
    ),
    Mutant(
        "CUDA C++: newest block not kept",
        "kernels/csrc/select.cu",
        "keys[i] = i < items && base + 32 * i == forced ? kForced : ordered",
        "keys[i] = ordered",
        f"{_TOPK}::test_best_blocks",
    ),
    Mutant(
        "CUDA C++: NaN is the best score",
        "kernels/csrc/select.cuh",
        "return score == score ? bits ^ (sign | 0x80000000u) : 0;",
        "return score == score ? bits ^ (sign | 0x80000000u) : kAll - 1;",
        f"{_TOPK}::test_select_in_blocks",
    ),
    Mutant(
        "CUDA C++: a cluster's ties by rank alone",
        "kernels/csrc/select_cluster.cuh",
        "tied = share.ties_before + (before >> 16);",
        "tied = before >> 16;",
        f"{_TOPK}::test_ties_across_the_blocks_of_a_cluster",
    ),
    Mutant(
        "CUDA C++: ratio-2 slots not halved",
        "kernels/csrc/select_cluster.cuh",
        "slots[place] = ahead[j][i] >> p.ratio_shift;",
        "slots[place] = ahead[j][i];",
        f"{_TOPK}::test_slots",
    ),
    Mutant(
        "CUDA C++: sink left out",
        "kernels/csrc/sparse_attention.cu",
        "norm(shared.totals[thread] + fast_exp2(sink_log2(thread) - shared.peaks[thread]));",
        "norm(shared.totals[thread]);",
        f"{_ATTENTION}::test_scores_that_grow_and_sinks",
    ),
    Mutant(
        "CUDA C++: splits joined without their peaks",
        "kernels/csrc/sparse_attention.cu",
        "shares[i] = fast_exp2(shares[i] - top) * factor;",
        "shares[i] = factor;",
        f"{_ATTENTION}::test_splits",
    ),
    Mutant(
        "CUDA C++: a piece of a tile's records stays for the next",
        "kernels/csrc/sparse_attention.cu",
        "for (int i = 0; i < 4; ++i) raw[i] = raw[4 + i];",
        "for (int i = 0; i < 3; ++i) raw[i] = raw[4 + i];",
        f"{_ATTENTION}::test_rows_taken_in_turn",
    ),
    Mutant(
        "CUDA C++: read before the kernel before has ended",
        "kernels/csrc/ptx.cuh",
        "  return *p;\n",
        "  return __ldg(p);\n",
        "tests/kernels/test_cuda_compile.py::test_nothing_is_read_before_the_wait",
    ),
    Mutant(
        "CUDA C++: main KV's slots after the window's",
        "kernels/csrc/sparse_attention.cu",
        "} else if (tile == params.swa_tiles) {",
        "} else if (false) {",
        f"{_ATTENTION}::test_splits",
    ),
    Mutant(
        "CUDA C++: sums of values not rescaled",
        "kernels/csrc/sparse_attention.cu",
        "scale_output(make_float2(shared.moves[head], shared.moves[head + 8]));",
        "",
        f"{_ATTENTION}::test_scores_that_grow_and_sinks",
    ),
    Mutant(
        "CUDA C++: denominators not rescaled",
        "kernels/csrc/sparse_attention.cu",
        "sum[g].x *= factor.x, sum[g].y *= factor.y;",
        "sum[g].x *= factor.x;",
        f"{_ATTENTION}::test_scores_that_grow_and_sinks",
    ),
    Mutant(
        "CUDA C++: one entry past the visible ones",
        "kernels/csrc/index_scores_decode.cu",
        "if (key >= present) scores.x = -INFINITY;",
        "if (key > present) scores.x = -INFINITY;",
        f"{_DECODE}::test_decode",
    ),
    Mutant(
        "CUDA C++: scales of the page's first keys",
        "kernels/csrc/index_scores_decode.cu",
        "scales = page + kScalesAt + slot % kTileKeys * kScaleBytes;",
        "scales = page + kScalesAt;",
        f"{_DECODE}::test_candidates",
    ),
    Mutant(
        "CUDA C++: all rows of a group see alike",
        "kernels/csrc/index_scores_decode.cu",
        "present = (GROUP == 1 ? tile.keys : __shfl_sync(kAll, seen, r)) - lane / 4 * kBlockKeys;",
        "present = tile.keys - lane / 4 * kBlockKeys;",
        f"{_DECODE}::test_groups",
    ),
    Mutant(
        "CUDA C++: later tokens scored in a prefill",
        "kernels/csrc/index_scores_prefill.cu",
        "left[i] = entry + product * 16 + eighth * 8 < visible[row] ? sums[i] : -INFINITY;",
        "left[i] = sums[i];",
        f"{_PREFILL}::test_lengths",
    ),
    Mutant(
        "Triton: the first tie lost",
        "kernels/triton_topk.py",
        "kept = above | (tied & (tied_before <= room))",
        "kept = above | (tied & (tied_before < room))",
        _INTERPRETED.format("top-k"),
    ),
    Mutant(
        "Triton: denominators not rescaled",
        "kernels/triton_sparse_attention.py",
        "total = total * rescale + tl.sum(weights, axis=1)",
        "total = total + tl.sum(weights, axis=1)",
        _INTERPRETED.format("attention"),
    ),
    Mutant(
        "Triton: scales of the page's first key",
        "kernels/triton_index_scores.py",
        "(page + 4096 + offset * 4)",
        "(page + 4096 + offset * 0)",
        _INTERPRETED.format("index scores"),
    ),
    Mutant(
        "Triton: pending half of the token itself",
        "kernels/triton_pool_pairs.py",
        "    first = position - position % 2\n",
        "    first = position\n",
        _INTERPRETED.format("stores and pooling"),
    ),
    Mutant(
        "Triton: zeros lose their sign",
        "kernels/triton_records.py",
        "return with_sign(decode_e4m3(code & 0x7F), (code & 0x80) << 24)",
        "return with_sign(decode_e4m3(code & 0x7F), (code & 0x80) << 24) + 0.0",
        _INTERPRETED.format("stores and pooling"),
    ),
)
