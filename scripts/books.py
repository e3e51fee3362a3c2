"""What a server's log and endpoint say of what it holds and what it ran: for the soak, the fuzzer and the tests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Books = TypeVar("Books")


def settled(read: Callable[[], Books]) -> Books:
    """A reading of the pools' books once two in a row are equal; `read` runs a request of one token or two first.

    One token: decode batches write the books only now and then. They say what is held besides that request, prefixes
    in the cache not among it. Without a flush in between, which would clear a leak away.

    Raises:
        RuntimeError: they still change after 100 readings.
    """
    last = read()
    for _ in range(100):
        time.sleep(0.2)
        now = read()
        if now == last:
            return now
        last = now
    raise RuntimeError(f"the pools' books do not settle: {last}")


def decode_rows(log: str) -> list[int]:
    """Requests in each decode batch; all are in the log of a server with --decode-log-interval 1."""
    return [int(rows) for rows in re.findall(r"Decode batch, #running-req: (\d+)", log)]


def mixed_rows(counts: Iterable[tuple[int, int]], decoded: int) -> int:
    """The least number of answers' tokens that were decoded in prefill batches.

    counts: tokens and retractions of each answer; decoded: rows of all decode batches. An answer's first token, and the
    first after each retraction, come from a prefill; the others from decode batches.
    """
    return sum(tokens - 1 - retractions for tokens, retractions in counts) - decoded
