"""Faults of scripts/mutants.py in pool, selection, metadata and metrics code."""

from __future__ import annotations

from mutant import Mutant

METADATA = "tests/unit/test_metadata.py"
KERNELS = "tests/unit/test_kernels.py"
PLAN = "tests/unit/test_config_and_plan.py"
BACKEND = "tests/host/test_backend.py"
PAIRING = "tests/conformance/test_pairing.py"
PADDING = "tests/conformance/test_padding.py"
ROUTES = "tests/unit/test_routes.py"
METRICS = "tests/host/test_metrics.py"
_METRICS = "sglang_csa2/metrics.py"
_META, _TOPK = "sglang_csa2/metadata.py", "kernels/topk.py"
_CHUNKS = f"{PAIRING}::test_a_chunk_border_inside_a_pair_changes_nothing"
_ENTRIES = f"{METADATA}::test_entries_pairs_and_pending_halves"
_PARTIAL = f"{PAIRING}::test_a_partial_last_block_stays_eligible"
_ROWS = f"{METADATA}::test_rows_windows_and_outputs"
_DECODE = f"{METADATA}::test_a_decode_in_fixed_shapes_says_the_same"
_PADDED = f"{PADDING}::test_padding_rows_of_a_captured_decode_neither_read_nor_write"

MUTANTS = (
    Mutant(
        "compressed slot wrong by one",
        _META,
        "first_token) // ratio).masked_fill",
        "first_token) // ratio + 1).masked_fill",
        f"{METADATA}::test_compressed_slots_are_first_tokens_over_the_ratio",
    ),
    Mutant(
        "-1 becomes slot 0",
        _META,
        ".masked_fill(entries < 0, -1)",
        ".masked_fill(entries < 0, 0)",
        f"{METADATA}::test_compressed_slots_are_first_tokens_over_the_ratio",
    ),
    Mutant(
        "slots computed in int32",
        _META,
        "self.req_to_token[requests, positions].long()",
        "self.req_to_token[requests, positions]",
        f"{METADATA}::test_compressed_slots_do_not_wrap_near_the_int32_limit",
    ),
    Mutant(
        "window one token too long ago",
        _META,
        "first = (positions - window + 1)",
        "first = (positions - window)",
        _ROWS,
    ),
    Mutant(
        "window without its own token",
        _META,
        "absent = listed > positions[:, None]",
        "absent = listed >= positions[:, None]",
        _ROWS,
    ),
    Mutant(
        "window floor ignored",
        _META,
        "return first if floor is None else",
        "return first if True else",
        f"{METADATA}::test_a_window_floor_cuts_the_window",
    ),
    Mutant(
        "window KV written by full-pool slot",
        _META,
        "swa_out_slots=tables.full_to_swa[out_slots].long(),",
        "swa_out_slots=out_slots,",
        _ROWS,
    ),
    Mutant(
        "own entry not visible",
        _META,
        "visible=(positions + 1) // ratio,\n        entry_rows",
        "visible=positions // ratio,\n        entry_rows",
        _ENTRIES,
    ),
    Mutant(
        "open pair visible",
        _META,
        "visible=(positions + 1) // ratio,\n        entry_rows",
        "visible=(positions + ratio) // ratio,\n        entry_rows",
        _ENTRIES,
    ),
    Mutant(
        "pending pair by batch row",
        _META,
        "ring = requests * pending_ring",
        "ring = _to(device, layout.row_request) * pending_ring",
        _ENTRIES,
    ),
    Mutant(
        "pending half read at the other parity",
        _META,
        "ring[entry_rows] + first_token % pending_ring",
        "ring[entry_rows] + (first_token + 1) % pending_ring",
        _ENTRIES,
    ),
    Mutant(
        "pair closed across two requests",
        _META,
        "(entries - 1).masked_fill(layout.is_first[entries], -1)",
        "entries - 1",
        _ENTRIES,
    ),
    Mutant(
        "pairs closed by their even token",
        _META,
        "closes = layout.positions % ratio == ratio - 1",
        "closes = layout.positions % ratio == 0",
        _ENTRIES,
    ),
    Mutant(
        "first row kept pending instead of the last",
        _META,
        "(~closes & layout.is_last)",
        "(~closes & layout.is_first)",
        _ENTRIES,
    ),
    Mutant(
        "entry at its second token's position",
        _META,
        "first_token = positions[entry_rows] - (ratio - 1)",
        "first_token = positions[entry_rows]",
        _ENTRIES,
    ),
    Mutant(
        "entry stored at its token's slot",
        _META,
        "entry_slots=out_slots[entry_rows] // ratio",
        "entry_slots=out_slots[entry_rows]",
        _ENTRIES,
    ),
    Mutant(
        "shortest request bounds a group",
        _META,
        "longest=max(seq_lens[request] for request in batch)",
        "longest=min(seq_lens[request] for request in batch)",
        f"{METADATA}::test_groups_are_the_requests_with_rows",
    ),
    Mutant("padding rows of a decode are live", _META, "live = out_slots > 0", "live = out_slots >= 0", _PADDED),
    Mutant(
        "padding rows write window KV to slot 0",
        _META,
        "[slots].long().masked_fill(~live, -1)",
        "[slots].long()",
        _DECODE,
    ),
    Mutant(
        "decode position one too far",
        _META,
        "positions = (seq_lens.long() - 1)",
        "positions = seq_lens.long()",
        _PADDED,
    ),
    Mutant(
        "selection outlives its forward",
        _META,
        "field(default_factory=Selection)",
        "field(default_factory=lambda kept=Selection(): kept)",
        f"{BACKEND}::test_a_selection_does_not_outlive_its_forward",
    ),
    Mutant(
        "newest block dropped",
        _TOPK,
        "best = torch.where(block == newest, math.inf, best)",
        "pass",
        f"{KERNELS}::test_candidate_blocks_keep_the_newest_against_better_ones",
    ),
    Mutant(
        "newest block off by one",
        _TOPK,
        "newest = (visible[:, None] - 1) // block_size",
        "newest = visible[:, None] // block_size",
        f"{KERNELS}::test_candidate_blocks",
    ),
    Mutant(
        "candidate pool smaller by one block",
        _TOPK,
        "(visible[:, None] > 0), topk_blocks)",
        "(visible[:, None] > 0), topk_blocks - 1)",
        f"{KERNELS}::test_candidate_blocks",
    ),
    Mutant(
        "entries of a block beyond what is visible",
        _TOPK,
        "(entries >= visible[:, None, None])",
        "(entries > visible[:, None, None])",
        _PARTIAL,
    ),
    Mutant(
        "absent block read as block 0",
        _TOPK,
        "absent = (blocks[..., None] < 0) | ",
        "blocks = blocks.clamp(min=0)\n    "
        "entries = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)\n    absent = ",
        _PARTIAL,
    ),
    Mutant(
        "last of the tied entries lost",
        _TOPK,
        "(tied.cumsum(-1) <= room)",
        "(tied.cumsum(-1) < room)",
        f"{KERNELS}::test_topk_properties",
    ),
    Mutant(
        "NaN may be chosen",
        _TOPK,
        "allowed & (scores == scores)",
        "allowed",
        f"{KERNELS}::test_topk_never_chooses_nan_and_breaks_ties_low",
    ),
    Mutant(
        "stale table entries scored",
        "sglang_csa2/indexer.py",
        "past_end = entry >= (tile.lengths // layer.ratio)[:, None]",
        "past_end = entry > entry.numel() + tile.lengths[:, None]",
        f"{BACKEND}::test_batch_mates_and_order_change_nothing",
    ),
    Mutant(
        "candidate pool never published",
        "sglang_csa2/indexer.py",
        "meta.longest // layer.ratio > self.config.candidate_pool_entries",
        "meta.longest < 0",
        _PARTIAL,
    ),
    Mutant(
        "consumer ignores the candidate pool",
        "sglang_csa2/indexer.py",
        "consumed = meta.selection.consume_pool(layer.pool_source, layer.layer_id)",
        "pass",
        _PARTIAL,
    ),
    Mutant(
        "pool's columns taken for positions",
        "sglang_csa2/indexer.py",
        "return entries.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)",
        "return columns",
        _PARTIAL,
    ),
    Mutant(
        "kv and score of a pending half swapped",
        "kernels/pool_pairs.py",
        "pending[ring_rows] = torch.cat([kv[rows], score[rows]], dim=-1)",
        "pending[ring_rows] = torch.cat([score[rows], kv[rows]], dim=-1)",
        _CHUNKS,
    ),
    Mutant(
        "pending half never read",
        "kernels/pool_pairs.py",
        "in_batch = (partner_rows >= 0)[:, None]",
        "in_batch = (partner_rows >= -1)[:, None]",
        _CHUNKS,
    ),
    Mutant(
        "negative slot stored at the last row",
        "kernels/store.py",
        "    live = slots >= 0\n    cache[slots[live]",
        "    live = slots >= -1\n    cache[slots[live]",
        f"{PADDING}::test_a_negative_slot_stores_nothing",
    ),
    Mutant(
        "index page reached by the wrong offset",
        "kernels/index_scores.py",
        "page, offset = slots // data.shape[1], slots % data.shape[1]",
        "page, offset = slots // data.shape[1], (slots + 1) % data.shape[1]",
        f"{KERNELS}::test_gather_index_k_reads_only_its_slots",
    ),
    Mutant(
        "Reuse layers write the cache",
        "sglang_csa2/backend.py",
        "if run_compressor and spec.writes_cache and",
        "if run_compressor and spec.ratio and",
        _PARTIAL,
    ),
    Mutant(
        "metadata of the last forward kept",
        "sglang_csa2/backend.py",
        "        if mode.is_idle():\n            self.forward_metadata = None\n            return",
        "        if mode.is_idle() or self.forward_metadata is not None:\n            return",
        f"{BACKEND}::test_a_selection_does_not_outlive_its_forward",
    ),
    Mutant(
        "a layer reads the first source",
        "sglang_csa2/layer_plan.py",
        "return max(source for source in sources",
        "return min(source for source in sources",
        f"{PLAN}::test_flash_roles",
    ),
    Mutant(
        "a graph's padding counted as rows",
        _METRICS,
        'lengths[: len(lengths) - getattr(batch, "num_padding", 0)]',
        "lengths[: len(lengths)]",
        f"{METRICS}::test_a_graphs_padding_is_not_counted",
    ),
    Mutant(
        "every rank counts the same rows",
        _METRICS,
        " and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0",
        " and parallel.attn_cp_rank == 0",
        f"{METRICS}::test_one_rank_reports",
    ),
    Mutant(
        "what serves compared with itself",
        _METRICS,
        "_standing(self.backend) != self.standing or",
        "_standing(self.backend) != _standing(self.backend) or",
        f"{METRICS}::test_a_forward_on_another_route_than_at_start_is_counted",
    ),
    Mutant(
        "a start on another route not noticed",
        _METRICS,
        "or _serving(self.backend) != self.chosen",
        "or _serving(self.backend) != _serving(self.backend)",
        f"{METRICS}::test_a_start_on_another_route_than_the_tables_is_counted",
    ),
    Mutant(
        "the operations not watched",
        _METRICS,
        "for of in (ops, _inner(ops)) for name in _OPERATIONS]",
        "for of in (ops, _inner(ops)) for name in ()]",
        f"{METRICS}::test_a_forward_on_another_route_than_at_start_is_counted",
    ),
    Mutant(
        "a layer's refusal not counted",
        _METRICS,
        '    "forward_low_ratio_sources",\n',
        "",
        f"{METRICS}::test_a_refused_forward_is_counted_once",
    ),
    Mutant(
        "a route's name not read off its kernels",
        "sglang_csa2/indexer_cuda.py",
        "routes.SCAN: routes.route_of(kernels.block_maxima)",
        'routes.SCAN: "triton"',
        f"{ROUTES}::test_what_is_built_is_what_was_chosen",
    ),
)
