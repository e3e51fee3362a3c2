"""A csa2 backend and pool with the host's real classes, fed with random layers instead of a model.

Every layer's inputs are drawn per request and position and do not depend on earlier layers, so any schedule of the
same tokens (whole, chunked, decoded, batched, reordered) must leave the same cache bytes and outputs, and a plain
reference over the whole sequence gives the expected values.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from sglang_csa2 import plugin, reference
from sglang_csa2.config import Csa2Config
from sglang_csa2.layer_plan import LayerPlan, Role

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tiny-dsv41"
EPS, SCALE, HEADS, MAX_POSITION = 1e-20, 512**-0.5, 4, 1024
POISON = 0x7F  # NaN as e4m3, a huge scale as ue8m0


@functools.cache
def installed_host(device: str = "cpu") -> None:
    """Publish a csa2 run's arguments in this process, as the scheduler's process does, and install the ledger."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    plugin.register()
    arguments = ["--model-path", str(TINY), "--device", device, "--attention-backend", "csa2", "--skip-tokenizer-init"]
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    plugin.install(device)


def tiny_config(**changes) -> Csa2Config:
    return Csa2Config.from_hf(json.loads((TINY / "config.json").read_text()) | changes)


@functools.cache
def rope_table(ratio: int) -> torch.Tensor:
    yarn = reference.Yarn() if ratio else None
    base = 160000.0 if ratio else 10000.0
    return reference.rope_table(torch.arange(MAX_POSITION), reference.rope_frequencies(64, base, yarn))


@dataclass
class LayerInputs:
    """One request's inputs to one layer, a row per position."""

    q: torch.Tensor  # bf16 [n, heads, 512], roped
    kv: torch.Tensor  # bf16 [n, 512]
    x: torch.Tensor  # fp32 [n, 1056]: compressor kv | score | head weights
    q_lora: torch.Tensor  # bf16 [n, 32 * 128]

    @classmethod
    def draw(cls, n: int, generator: torch.Generator) -> LayerInputs:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return cls(
            normal(n, HEADS, 512).bfloat16(), normal(n, 512).bfloat16(), normal(n, 1056), normal(n, 4096).bfloat16()
        )

    def rows(self, part: slice) -> LayerInputs:
        return LayerInputs(self.q[part], self.kv[part], self.x[part], self.q_lora[part])

    def to(self, device: str) -> LayerInputs:
        return LayerInputs(*(getattr(self, name).to(device) for name in ("q", "kv", "x", "q_lora")))

    @staticmethod
    def cat(parts: list[LayerInputs]) -> LayerInputs:
        return LayerInputs(*(torch.cat([getattr(p, name) for p in parts]) for name in ("q", "kv", "x", "q_lora")))


class FakeLayer:
    """What the backend uses of a model's attention layer; projections that treat every row alike."""

    def __init__(self, layer_id: int, ratio: int, device: str = "cpu"):
        generator = torch.Generator().manual_seed(layer_id)

        def weight(n: int) -> torch.Tensor:
            return (1 + 0.1 * torch.randn(n, generator=generator)).to(device)

        self.layer_id, self.ratio, self.freqs_cis, self.scaling = layer_id, ratio, rope_table(ratio).to(device), SCALE
        self.kv_weight, self.attn_sink = weight(512), torch.randn(HEADS, generator=generator).to(device)
        self.compressor = SimpleNamespace(norm=SimpleNamespace(weight=weight(512), eps=EPS), project=self._project)
        self.indexer = SimpleNamespace(
            k_norm=SimpleNamespace(weight=weight(128), eps=EPS),
            forward_wk=lambda latent: latent[:, ::4].contiguous(),
            head_weights=lambda x: x[:, 1024:].bfloat16(),
            queries=self._queries,
        )

    def _project(self, x):
        if self.ratio == 1:
            return x[:, :512].bfloat16(), None
        return x[:, :512].contiguous(), x[:, 512:1024].contiguous()

    def _queries(self, q_lora, freqs, positions=None):
        from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer

        host = SimpleNamespace(wq_b=lambda x: (x, None), n_local_heads=32, index_head_dim=128, rope_head_dim=64)
        return DeepseekV41Indexer.queries(host, q_lora, freqs, positions)


@dataclass
class Request:
    """A sequence and its place in the host's tables."""

    inputs: list[LayerInputs]
    slot: int
    length: int = 0
    outputs: list[dict[int, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def draw(cls, n: int, seed: int, slot: int, layers: int = 10) -> Request:
        generator = torch.Generator().manual_seed(seed)
        return cls([LayerInputs.draw(n, generator) for _ in range(layers)], slot)


class Bench:
    """A pool of poisoned buffers and a backend over it."""

    def __init__(
        self, *, replays_tail: bool = False, pages: int = 24, seed: int = 0, device: str = "cpu", **config_changes
    ):
        installed_host(device)
        from sglang_csa2.backend import Csa2AttnBackend
        from sglang_csa2.pool import Csa2KVPool

        self.device, self.config = device, tiny_config(**config_changes)
        self.plan = LayerPlan.from_config(self.config)
        self.layers = [FakeLayer(layer.layer_id, layer.ratio, device) for layer in self.plan.layers]
        tokens = pages * 256
        self.pool = Csa2KVPool(
            max_num_reqs=8, swa_size=tokens, c4_size=0, c128_size=0, c4_state_pool_size=0, c128_state_pool_size=0,
            page_size=256, swa_page_size=256, dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128,
            layer_num=len(self.layers), device=device, enable_memory_saver=False,
            compression_ratios=list(self.config.compress_ratios), start_layer=0, end_layer=len(self.layers),
            kv_source_layers=list(self.config.kv_source_layer_ids), full_size=tokens,
        )  # fmt: skip
        self._poison()
        generator = torch.Generator().manual_seed(seed)
        self._free = (torch.randperm(pages, generator=generator) + 1).tolist()
        swa_pages = torch.randperm(pages, generator=generator) + 1
        mapping = torch.zeros((pages + 2) * 256, dtype=torch.int64)
        for page, swa_page in enumerate(swa_pages.tolist(), start=1):
            mapping[page * 256 : (page + 1) * 256] = torch.arange(swa_page * 256, (swa_page + 1) * 256)
        self.pool.register_mapping(mapping.to(device))
        # Stale table entries lie far outside the pool: reading one fails.
        table = torch.full((9, MAX_POSITION), 1 << 30, dtype=torch.int32)
        self.req_to_token = table.to(device)
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, free_rows=lambda indices: None),
            device=device,
            model_config=SimpleNamespace(hf_config=json.loads((TINY / "config.json").read_text()) | config_changes),
        )
        self.backend = Csa2AttnBackend(runner)
        self.backend.replays_tail = replays_tail

    def _poison(self) -> None:
        for layer in self.plan.layers:
            self.pool.swa_cache(layer.layer_id).fill_(POISON)
            if layer.writes_cache:
                self.pool.main_cache(layer.layer_id).fill_(POISON)
                self.pool.index_cache(layer.layer_id).fill_(POISON)
                if layer.ratio == 2:
                    self.pool.pending_pairs(layer.layer_id).fill_(float("nan"))

    def _grow(self, request: Request, length: int) -> torch.Tensor:
        """Slots of the request's next positions, taking whole pages as the allocator does."""
        for start in range(-(-request.length // 256) * 256, length, 256):
            page = self._free.pop()
            self.req_to_token[request.slot, start : start + 256] = torch.arange(page * 256, (page + 1) * 256).to(
                self.device
            )
        return self.req_to_token[request.slot, request.length : length].long()

    def forward(self, batch: list[tuple[Request, int]], mode: str = "EXTEND", **extra) -> None:
        """One forward of `count` further rows per request; outputs are kept on the requests."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

        slots = torch.cat([self._grow(request, request.length + count) for request, count in batch])
        counts = [count for _, count in batch]
        parts = [slice(request.length, request.length + count) for request, count in batch]
        for request, count in batch:
            request.length += count
        lengths = torch.tensor([request.length for request, _ in batch])
        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=len(batch), out_cache_loc=slots,
            seq_lens=lengths.to(self.device), seq_lens_cpu=lengths,
            req_pool_indices=torch.tensor([request.slot for request, _ in batch]).to(self.device),
            extend_seq_lens=torch.tensor(counts).to(self.device),
            extend_seq_lens_cpu=None if mode == "DECODE" else counts,
            return_logprob=False, extend_logprob_start_lens_cpu=None, capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        for name, value in extra.items():
            setattr(forward_batch, name, value)
        self.backend.init_forward_metadata(forward_batch)
        inputs = [
            LayerInputs.cat([request.inputs[i].rows(part) for (request, _), part in zip(batch, parts, strict=True)]).to(
                self.device
            )
            for i in range(len(self.layers))
        ]
        self._run_layers(batch, counts, inputs, forward_batch)

    def _run_layers(self, batch, counts, inputs, forward_batch) -> None:
        tail_from = max(self.config.kv_source_layer_ids) if self.backend.tail_forward_metadata else None
        saved, rows = None, None
        outputs: dict[int, torch.Tensor] = {}
        for layer, data in zip(self.layers, inputs, strict=True):
            positions = self.backend.forward_metadata.positions
            if layer.layer_id == tail_from:
                self.backend.write_tail_source_kv(
                    layer=layer, x=data.x, positions=positions, forward_batch=forward_batch
                )
                saved = self.backend.enter_late_layer_tail(forward_batch)
                rows = self.backend.tail_forward_metadata.late_layer_tail.rows
                counts = self.backend.tail_forward_metadata.late_layer_tail.extend_seq_lens_cpu
            if rows is not None:
                data = LayerInputs(rows(data.q), rows(data.kv), rows(data.x), rows(data.q_lora))
            outputs[layer.layer_id] = self.run_layer(layer, data, forward_batch).cpu()
        if saved is not None:
            self.backend.exit_late_layer_tail(saved, forward_batch)
        for layer_id, out in outputs.items():
            late = tail_from is not None and layer_id >= tail_from
            sizes = counts if late else forward_batch.extend_seq_lens.tolist()
            for (request, _), part in zip(batch, out.split(list(sizes)), strict=True):
                if layer_id == 0:
                    request.outputs.append({})
                request.outputs[-1][layer_id] = part

    def run_layer(self, layer: FakeLayer, data: LayerInputs, forward_batch, *, check: bool = True) -> torch.Tensor:
        backend, spec = self.backend, self.plan[layer.layer_id]
        positions = backend.forward_metadata.positions
        self.pool.set_swa_key_buffer_radix_fused_norm_rope(
            layer_id=layer.layer_id, swa_loc=backend.get_swa_out_cache_loc(forward_batch), kv=data.kv,
            kv_weight=layer.kv_weight, eps=EPS, freqs_cis=layer.freqs_cis, positions=positions,
        )  # fmt: skip
        if spec.chooses or spec.writes_cache:
            backend.forward_low_ratio_sources(
                layer=layer, x=data.x, q_lora=data.q_lora, positions=positions, forward_batch=forward_batch
            )
        out = backend.forward(
            q=data.q, k=data.q, v=data.q, layer=layer, forward_batch=forward_batch, compress_ratio=spec.ratio,
            attn_sink=layer.attn_sink, save_kv_cache=False,
        )  # fmt: skip
        # A graph capture cannot ask the device.
        assert not check or (out.dtype is torch.bfloat16 and not out.isnan().any())
        return out

    def output(self, request: Request, layer_id: int) -> torch.Tensor:
        """A request's outputs of a layer over all its forwards."""
        return torch.cat([outputs[layer_id] for outputs in request.outputs])

    def cache_bytes(self, request: Request) -> dict[str, torch.Tensor]:
        """Every byte that a request's positions own, by buffer, in the order of positions."""
        full = self.req_to_token[request.slot, : request.length].long()
        owned = {}
        for layer in self.plan.layers:
            name = f"layer{layer.layer_id}"
            owned[f"{name}.swa"] = self.pool.swa_cache(layer.layer_id)[self.pool.full_to_swa_index_mapping[full]].cpu()
            if layer.writes_cache:
                from sglang_csa2.kernels.store import index_page_views

                slots = full[: request.length // layer.ratio * layer.ratio : layer.ratio] // layer.ratio
                owned[f"{name}.main"] = self.pool.main_cache(layer.layer_id)[slots].cpu()
                data, scales = index_page_views(self.pool.index_cache(layer.layer_id))
                place = slots // 64, slots % 64
                owned[f"{name}.index"] = torch.cat([data[place], scales[place]], 1).cpu()
        return owned


@dataclass
class Expected:
    """The plain reference over one request's whole sequence."""

    outputs: dict[int, torch.Tensor]
    chosen: dict[int, torch.Tensor]
    scores: dict[int, torch.Tensor]
    eligible: dict[int, torch.Tensor]


def expected(
    bench: Bench, request: Request, *, replayed_from: int | None = None, score_dtype: torch.dtype | None = None
) -> Expected:
    """Run the reference. With `replayed_from`, late layers see only that position's window floor and later rows.

    score_dtype: None for the published bf16 roundings of the index scores, fp32 to choose as the GPU kernels do.
    """
    n, config = request.length, bench.config
    positions = torch.arange(n)
    main, index, result = {}, {}, Expected({}, {}, {}, {})
    pool_mask = None
    for spec in bench.plan.layers:
        layer = FakeLayer(spec.layer_id, spec.ratio)
        data = request.inputs[layer.layer_id].rows(slice(0, n))
        table = layer.freqs_cis[:n]
        kv = reference.rotate_tail(reference.rms_norm(data.kv, layer.kv_weight, EPS), table)
        keys = reference.quantize_swa_kv(kv)
        late = replayed_from is not None and layer.layer_id >= max(config.kv_source_layer_ids)
        window = reference.window_indices(positions, config.sliding_window, first=replayed_from if late else 0)
        if spec.role is not Role.SWA_ONLY:
            entries, ratio = n // spec.ratio, spec.ratio
            if spec.writes_cache:
                main[layer.layer_id], index[layer.layer_id] = _compress(layer, data, entries)
            visible = reference.visible_entries(positions, ratio)
            if spec.chooses:
                q = layer.indexer.queries(data.q_lora, table)
                weights = layer.indexer.head_weights(data.x)
                scores = reference.index_scores(q, index[spec.kv_source], weights, dtype=score_dtype)
                eligible = pool_mask if spec.uses_candidates else None
                result.scores[layer.layer_id] = scores
                result.chosen[layer.layer_id] = reference.select_topk(scores, visible, config.index_topk, eligible)
                if spec.is_candidate_source:
                    pool_mask = reference.candidate_mask(
                        scores, visible, config.candidate_topk_blocks, config.candidate_block_size
                    )
            chosen = result.chosen[spec.index_source]
            keys = torch.cat([keys, main[spec.kv_source]])
            window = torch.cat([window, torch.where(chosen >= 0, chosen + n, -1)], dim=1)
        result.outputs[layer.layer_id] = reference.sparse_attention(data.q, keys, window, layer.attn_sink, SCALE)
    return result


def _compress(layer: FakeLayer, data: LayerInputs, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    kv, score = layer.compressor.project(data.x)
    if score is not None:
        whole = entries * 2
        kv = reference.pool_pairs(kv[:whole].view(entries, 2, 512), score[:whole].view(entries, 2, 512))
    latent = reference.rms_norm(kv.bfloat16(), layer.compressor.norm.weight, EPS)
    table = layer.freqs_cis[: entries * layer.ratio : layer.ratio]
    main = reference.quantize_main_kv(reference.rotate_tail(latent, table))
    key = reference.rms_norm(layer.indexer.forward_wk(latent), layer.indexer.k_norm.weight, EPS)
    return main, reference.quantize_index(reference.rotate_tail(key, table))


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((out.double() - wanted.double()).norm() / wanted.double().norm()).item()
