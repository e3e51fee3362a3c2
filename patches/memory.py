"""[host] The target model's pool and its budget: csa2's layout and class."""

from __future__ import annotations

from contextvars import ContextVar

from sglang.srt.mem_cache import kv_cache_configurator

from sglang_csa2.pool import Csa2KVPool, host_layout

# True while the host builds a draft worker's pool, which stays stock in layout and class.
_building_draft_pool: ContextVar[bool] = ContextVar("building_draft_pool", default=False)


def select_layout(original):
    """csa2's records wherever the host asks for the layout of the target's caches: budget and pool alike."""
    if _building_draft_pool.get():
        return original()
    names = host_layout()
    return names.swa, names.option


def build_pool(original, self, **kwargs):
    """Build the host's V4 pool with csa2's class for the target model."""
    if self.is_draft_worker:
        token = _building_draft_pool.set(True)
        try:
            return original(self, **kwargs)
        finally:
            _building_draft_pool.reset(token)
    # The host names the class as a global of its module: rebound for this one call.
    stock = kv_cache_configurator.DeepSeekV4TokenToKVPool
    kv_cache_configurator.DeepSeekV4TokenToKVPool = Csa2KVPool
    try:
        return original(self, **kwargs)
    finally:
        kv_cache_configurator.DeepSeekV4TokenToKVPool = stock
