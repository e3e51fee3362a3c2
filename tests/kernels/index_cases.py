"""Inputs of the index-score tests, and their maxima checked against the reference in float64.

Every page and slot that must not be read holds NaN scales, and outputs start as NaN, so that one nobody wrote shows.
"""

import kernel_cases as cases
import torch

from sglang_csa2.kernels.index_scores import gather_index_k
from sglang_csa2.kernels.index_scores import index_scores as torch_form
from sglang_csa2.layout import INDEX_PAGE_SLOTS
from sglang_csa2.reference import index_scores as reference_scores
from sglang_csa2.reference import quantize_index


class Case:
    """A batch of requests with `lengths` entries each, and what its entries' keys are."""

    def __init__(self, lengths, ratio, heads, device, rows_per_request=1):
        self.ratio, self.heads = ratio, heads
        requests = len(lengths)
        tokens = max(max(lengths) * ratio, 1)
        self.req_to_token, slots = cases.paged_context(requests + 1, tokens, device)
        self.cache = cases.index_cache(max(slots // ratio, 64), device)
        self.requests = torch.randperm(requests, device=device).repeat_interleave(rows_per_request)
        by_request = torch.tensor(lengths, device=device)
        self.visible = by_request[self.requests]
        rows = len(self.requests)
        self.q = quantize_index(torch.randn(rows, heads, 128)).to(device)
        self.weights = (torch.randn(rows, heads, device=device) * 0.02).bfloat16()
        self.width = max(-(-max(lengths) // 64) * 64, 64) + 64
        self._poison(by_request, device)

    def _poison(self, by_request, device):
        """Junk scales on every slot that belongs to no visible entry; stale table entries past the end."""
        live = torch.zeros(self.cache.shape[0] * INDEX_PAGE_SLOTS, dtype=torch.bool, device=device)
        for request, length in enumerate(by_request.tolist()):
            first = torch.arange(length, device=device) * self.ratio
            live[(self.req_to_token[request, first] // self.ratio).long()] = True
        scales = self.cache[:, INDEX_PAGE_SLOTS * 64 :].view(-1, INDEX_PAGE_SLOTS, 4)
        scales[~live.view(-1, INDEX_PAGE_SLOTS)] = 255

    def keys(self, row):
        first = torch.arange(int(self.visible[row]), device=self.cache.device) * self.ratio
        return gather_index_k(self.cache, self.req_to_token[self.requests[row], first].long() // self.ratio)

    def expected(self, row):
        """float64 scores, and those of eager bf16."""
        keys = self.keys(row)
        q, weights = self.q[row : row + 1], self.weights[row : row + 1]
        exact = reference_scores(q, keys, weights, dtype=torch.float64)[0]
        eager = torch_form(q[:, None], weights[:, None], keys[None])[0, 0]
        return exact, eager

    def arguments(self):
        return self.q, self.weights, self.cache, self.req_to_token


def prefill_case(visible, ratio, heads, device):
    """Rows of one request that see as many entries as `visible` says."""
    case = Case([max(visible)], ratio, heads, device, rows_per_request=len(visible))
    case.visible = torch.tensor(visible, device=device)
    return case


def check_prefill(case, maxima, skip=0):
    """A scan whose rows with visible <= skip are untouched."""
    for row, visible in enumerate(case.visible.tolist()):
        if visible > skip:
            check(case, row, maxima)
        else:
            assert all(have[row].isnan().all() for have in maxima)


def check(case, row, maxima):
    """A row's maxima of blocks and tiles: those of its exact scores, within fp32's accumulation."""
    exact, eager = case.expected(row)
    for have, size in zip(maxima, (8, 64), strict=True):
        number = -(-len(exact) // size)
        if number:
            want, rough = maxima_of(exact, size), maxima_of(eager.double(), size)
            error, bound = cases.relative_error(have[row, :number], want), cases.relative_error(rough, want)
            assert error <= max(cases.SLACK * bound, 1e-6)
            assert error < 1e-5
        # Work follows the length: nothing past it is touched.
        assert have[row, number:].isnan().all()


def maxima_of(scores, size):
    groups = -(-len(scores) // size)
    padded = torch.nn.functional.pad(scores, (0, groups * size - len(scores)), value=-torch.inf)
    return padded.view(groups, size).amax(-1)
