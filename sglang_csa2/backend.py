"""[host] The attention backend: glue between the stock model and CSA2, no arithmetic of its own.

Per forward the host calls `init_forward_metadata`. Per layer the model stores its window KV through the pool,
calls `forward_low_ratio_sources` on layers that compress or choose, then `forward`. Under decoder SWA bounded
replay it calls `write_tail_source_kv` for every row of the last source layer, and runs that layer and the later
ones on each request's last rows between `enter_late_layer_tail` and `exit_late_layer_tail`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.dsv4.attn_metadata_kernels import late_layer_tail_layout
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.deepseek_v4_backend import (
    LateLayerTail,
    late_layer_num_tokens,
    late_layer_whole_extend,
)
from sglang.srt.runtime_context import attention_backends, get_exec
from torch import Tensor

from sglang_csa2 import checks, envs, metrics, patches, routes
from sglang_csa2.attention import attend
from sglang_csa2.config import Csa2Config
from sglang_csa2.host import BACKEND_NAME
from sglang_csa2.indexer import indexer_for
from sglang_csa2.kernels import cuda_build
from sglang_csa2.layer_plan import LayerPlan
from sglang_csa2.metadata import Csa2Metadata, PageTables, build_decode_metadata, build_metadata
from sglang_csa2.ops import Norm, ops_for
from sglang_csa2.pool import Csa2KVPool
from sglang_csa2.workspace import Workspace

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


logger = logging.getLogger(__name__)


class BackendError(RuntimeError):
    """csa2 was asked to run where part of it did not take effect, or in a mode it does not serve."""


@dataclass(frozen=True)
class TailMetadata:
    """The late layers' rows under decoder SWA bounded replay: ours, and the struct that the model reads."""

    metadata: Csa2Metadata
    workspace: Workspace | None
    late_layer_tail: LateLayerTail


class Csa2AttnBackend(AttentionBackend):
    """CSA2 for the target model.

    forward_metadata, workspace: written by `init_forward_metadata`, swapped by `enter_/exit_late_layer_tail`.
    tail_forward_metadata: written by `init_forward_metadata`; None unless bounded replay runs this forward.
    """

    # The model asks: sources inside a prefill graph are not served.
    low_ratio_prefill_graph = False

    def __init__(self, model_runner: Any):
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        _verify(self.token_to_kv_pool, model_runner.device)
        config = Csa2Config.from_hf(model_runner.model_config.hf_config)
        self.plan = LayerPlan.from_config(config)
        self.device_type = torch.device(model_runner.device).type
        self.routes = routes.choose(routes.Machine.here(self.device_type), routes.Flags.from_env(), config)
        chosen = {operation: choice.route.name for operation, choice in self.routes.items()}
        self.ops = ops_for(self.device_type, chosen[routes.DECODE], chosen[routes.PREFILL])
        self.indexer = indexer_for(self.plan, self.device_type, chosen[routes.SCAN])
        self.prefill_kv_reuse = envs.prefill_kv_reuse()
        logger.info("csa2 serves %d layers through its %s route", len(self.plan.layers), self.ops.name)
        for operation, choice in self.routes.items():
            logger.info("csa2 route, %s: %s", operation, choice)
        # Kernels are built at start and not under the first request that is long enough.
        if "cuda" in chosen.values():
            cuda_build.build_all()
        device = self.req_to_token_pool.req_to_token.device
        self.ops.warm_up(device)
        self.indexer.warm_up(self.req_to_token_pool.req_to_token.shape[1], device)
        self.replays_tail = bool(get_exec().features.enable_decoder_swa_bounded_replay)
        self.forward_metadata: Csa2Metadata | None = None
        self.workspace: Workspace | None = None
        self.tail_forward_metadata: TailMetadata | None = None
        self._source_already_written: int | None = None
        if envs.check_enabled():
            checks.install(self)
        if metrics.enabled():
            metrics.install(self, model_runner)

    # Metadata ---------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self.tail_forward_metadata = self.workspace = None
        self._source_already_written = None
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_target_verify() or not (mode.is_decode() or mode.is_extend()):
            raise BackendError(f"csa2 serves decode, extend and mixed batches, not {mode.name}")
        if mode.is_decode() and self.device_type != "cpu":
            self.forward_metadata = self._build_decode(forward_batch, int(forward_batch.seq_lens_cpu.max()))
            return
        counts = [1] * forward_batch.batch_size if mode.is_decode() else list(forward_batch.extend_seq_lens_cpu)
        self.forward_metadata = self._build(forward_batch, counts, forward_batch.out_cache_loc)
        self.workspace = self._workspace(self.forward_metadata)
        if self.replays_tail and mode.is_extend_without_speculative():
            self.tail_forward_metadata = self._build_tail(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to prepare: a graph's buffers are those that its capture allocates."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Nothing to do on the host: a decode's metadata is computed inside its graph."""
        del in_capture
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise BackendError(f"csa2 captures decode batches only, not {forward_batch.forward_mode.name}")
        self.tail_forward_metadata = self.workspace = None

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        # The captured bound is the widest context; what is done follows the live lengths on the device.
        self.forward_metadata = self._build_decode(forward_batch, self.req_to_token_pool.req_to_token.shape[1])

    def _build_decode(self, batch: ForwardBatch, longest: int) -> Csa2Metadata:
        return build_decode_metadata(
            seq_lens=batch.seq_lens, out_slots=batch.out_cache_loc, longest=longest, **self._place(batch)
        )

    def _build(
        self, batch: ForwardBatch, counts: list[int], out_slots: Tensor, floor: Tensor | None = None
    ) -> Csa2Metadata:
        return build_metadata(
            row_counts=counts,
            seq_lens=batch.seq_lens_cpu.tolist(),
            out_slots=out_slots,
            window_floor=floor,
            **self._place(batch),
        )

    def _place(self, batch: ForwardBatch) -> dict[str, Any]:
        """What both builders need of the pool, the plan and the batch's requests."""
        pool = self.token_to_kv_pool
        return {
            "tables": PageTables(self.req_to_token_pool.req_to_token, pool.full_to_swa_index_mapping),
            "request_slots": batch.req_pool_indices,
            "window": self.plan.config.sliding_window,
            "ratios": self.plan.present_ratios,
            "pending_ring": pool.pending_ring,
        }

    def _build_tail(self, batch: ForwardBatch) -> TailMetadata:
        lens, seq_lens = list(batch.extend_seq_lens_cpu), batch.seq_lens_cpu.tolist()
        rows, counts, floor = late_layer_tail_layout(
            extend_lens_cpu=lens,
            seq_lens_cpu=seq_lens,
            tail_len=self.plan.config.sliding_window,
            device=batch.out_cache_loc.device,
            whole_extend=late_layer_whole_extend(batch, dspark=False),
        )
        metadata = self._build(batch, counts, batch.out_cache_loc[rows], floor)
        tail = LateLayerTail(
            token_indices=rows,
            positions=metadata.positions,
            extend_seq_lens=batch.extend_seq_lens.new_tensor(counts),
            extend_seq_lens_cpu=counts,
            swa_out_cache_loc=metadata.swa_out_slots,
            contiguous_start=lens[0] - counts[0] if len(lens) == 1 else None,
        )
        return TailMetadata(metadata, self._workspace(metadata), tail)

    def _workspace(self, metadata: Csa2Metadata) -> Workspace | None:
        if not Workspace.serves(self.ops, metadata):
            return None
        return Workspace(self.ops, metadata, self.plan.config.index_topk, reuse=self.prefill_kv_reuse)

    # Decoder SWA bounded replay -------------------------------------------------

    def late_layer_num_tokens(self, forward_batch: ForwardBatch) -> int | None:
        return late_layer_num_tokens(forward_batch, dspark=False) if self.replays_tail else None

    def write_tail_source_kv(self, *, layer: Any, x: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> None:
        """Compress every row of the layer that the tail starts at; its own pass in the tail then only chooses."""
        self.forward_low_ratio_sources(
            layer=layer, x=x, q_lora=None, positions=positions, forward_batch=forward_batch, run_indexer=False
        )
        self._source_already_written = layer.layer_id

    def enter_late_layer_tail(self, forward_batch: ForwardBatch) -> tuple[Csa2Metadata | None, Workspace | None]:
        del forward_batch
        if self.tail_forward_metadata is None:
            raise BackendError("the model entered the late-layer tail of a forward that has none")
        saved = self.forward_metadata, self.workspace
        self.forward_metadata = self.tail_forward_metadata.metadata
        self.workspace = self.tail_forward_metadata.workspace
        return saved

    def exit_late_layer_tail(
        self, saved: tuple[Csa2Metadata | None, Workspace | None], forward_batch: ForwardBatch
    ) -> None:
        del forward_batch
        self.forward_metadata, self.workspace = saved
        self._source_already_written = None

    # Layers -----------------------------------------------------------------

    def get_swa_out_cache_loc(self, forward_batch: ForwardBatch) -> Tensor:
        del forward_batch
        return self._metadata().swa_out_slots

    def forward_low_ratio_sources(
        self,
        *,
        layer: Any,
        x: Tensor,
        q_lora: Tensor | None,
        positions: Tensor,
        forward_batch: ForwardBatch,
        run_compressor: bool = True,
        run_indexer: bool = True,
    ) -> None:
        """Write a Full layer's compressed entries; publish a Full or Reindex layer's choice.

        layer: the model's attention layer. x bf16 [rows, hidden]. q_lora bf16 [rows, q_lora_rank], None when the
        indexer does not run. positions: the rows', as in the metadata.
        """
        if forward_batch.forward_mode.is_idle() or x.shape[0] == 0:
            return
        meta, spec = self._metadata(), self.plan[layer.layer_id]
        if run_compressor and spec.writes_cache and layer.layer_id != self._source_already_written:
            self._compress(layer, x, meta)
        if run_indexer and spec.chooses:
            q = layer.indexer.queries(q_lora, layer.freqs_cis, positions)
            weights = layer.indexer.head_weights(x)
            self.indexer.choose(spec, q, weights, self.token_to_kv_pool.index_cache(layer.layer_id), meta)

    def _compress(self, layer: Any, x: Tensor, meta: Csa2Metadata) -> None:
        pool, layer_id, table = self.token_to_kv_pool, layer.layer_id, layer.freqs_cis
        ratio = self.plan[layer_id].ratio
        pending = pool.pending_pairs(layer_id) if ratio == 2 else None
        norm, k_norm = (Norm(module.weight, module.eps) for module in (layer.compressor.norm, layer.indexer.k_norm))
        kv, score = layer.compressor.project(x)
        entries = self.ops.main_kv_store(kv, score, meta.ratios[ratio], pending, norm, table, pool.main_cache(layer_id))
        if entries.latent.shape[0]:
            key = layer.indexer.forward_wk(entries.latent)
            self.ops.index_k_store(key, k_norm, table, entries, pool.index_cache(layer_id))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        compress_ratio: int,
        attn_sink: Tensor,
        save_kv_cache: bool = False,
    ) -> Tensor:
        """Attention of one layer: q bf16 [rows, heads, 512], roped -> like q, before the inverse rotation.

        k and v are the model's sentinels: window KV has been stored through the pool.
        """
        del k, v
        if save_kv_cache:
            raise BackendError("csa2's window KV is stored by the pool; the model asked the backend to store it")
        if forward_batch.forward_mode.is_idle() or q.shape[0] == 0:
            return q.new_empty(q.shape)
        pool, spec = self.token_to_kv_pool, self.plan[layer.layer_id]
        if compress_ratio != spec.ratio:
            raise BackendError(f"layer {layer.layer_id} runs with ratio {compress_ratio}, planned with {spec.ratio}")
        main_cache = pool.main_cache(layer.layer_id) if spec.ratio else None
        swa_cache = pool.swa_cache(layer.layer_id)
        return attend(
            self.ops, spec, q, swa_cache, main_cache, attn_sink, layer.scaling, self._metadata(), self.workspace
        )

    def _metadata(self) -> Csa2Metadata:
        if self.forward_metadata is None:
            raise BackendError("no metadata: init_forward_metadata has not run for this forward")
        return self.forward_metadata


def _verify(pool: Any, device: str) -> None:
    """The plugin's own doubt: the host logs what fails in a plugin and goes on without it.

    Raises:
        BackendError: the pool, the resolved backend or a patch is not csa2's.
    """
    if type(pool) is not Csa2KVPool:
        raise BackendError(f"the KV pool is {type(pool).__name__}, not Csa2KVPool: csa2's patches did not take effect")
    if attention_backends() != (BACKEND_NAME, BACKEND_NAME):
        raise BackendError(f"the host resolved the backends to {attention_backends()}; csa2 must serve both phases")
    if missing := patches.missing(device):
        raise BackendError(f"patches that did not take effect: {', '.join(missing)}; see this process's log")
