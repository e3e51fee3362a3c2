"""Timing for the kernel benchmarks: CUDA-graph replays over rotating inputs, medians in microseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Calls = list[Callable[[], object]]


def graph_of(calls: Calls) -> torch.cuda.CUDAGraph:
    """The calls captured in one graph that has been replayed once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Time of one of the graph's `calls` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def medians_us(columns: dict[str, Calls], rounds: int = 15) -> dict[str, float]:
    """Median time of one call of each column; the columns' replays alternate, so that drift meets all of them."""
    graphs = {name: graph_of(calls) for name, calls in columns.items()}
    times = {name: [] for name in columns}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph, len(columns[name])))
    return {name: statistics.median(values) for name, values in times.items()}


def median_us(calls: Calls, rounds: int = 15) -> float:
    """Median time of one call."""
    return medians_us({"": calls}, rounds)[""]


def copy_rate() -> float:
    """Bytes per microsecond, read and written, of a kernel that copies much memory."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda").view(torch.int64)
    target = torch.empty_like(source)
    # A plain copy in a graph is the copy engine's, which is slower than a kernel's.
    return 2 * source.nbytes / median_us([lambda: torch.bitwise_not(source, out=target)] * 2)
