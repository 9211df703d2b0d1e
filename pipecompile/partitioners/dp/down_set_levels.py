"""Down-sets listed by size, as bit masks: each level adds one ready cluster to every down-set of the level before.

  ┌─▶ b ─┐            {} ─▶ {a} ─┬─▶ {a b} ─┬─▶ {a b c} ─▶ {a b c d}
a ┤      ├─▶ d                   ╰─▶ {a c} ─╯
  └─▶ c ─┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Adjacency, Flow

__all__ = ["DownSetLevels", "as_rows"]


class DownSetLevels:
    """The levels above the down-set `begin`, by the clusters that are `free` (all without it), up to so many seconds of work. `time` is
    that of each cluster, and `neighbours` what `adjacency` returns.

    `level` maps the mask of each down-set to (its ready clusters, as a mask; its seconds of work at speed 1; the seconds of the `flows`
    that leave it and not `begin`, of which each consumer comes after the source).
    """

    def __init__(
        self, time: Sequence[float], neighbours: Adjacency,
        begin: int = 0, free: Collection[int] | None = None, most_work: float = inf, flows: Iterable[Flow] = (),
    ) -> None:  # fmt: skip
        predecessors, successors = neighbours
        chosen = range(len(time)) if free is None else free
        self.time, self.most_work = time, most_work
        self._needs = {v: sum(1 << a for a in set(predecessors[v]) if a in chosen) for v in chosen}
        self._successors = {v: [b for b in set(successors[v]) if b in chosen] for v in chosen}
        self._sent, self._last_read = [0.0] * len(time), [list[tuple[int, float]]() for _ in time]
        for flow in (flow for flow in flows if flow.consumers and flow.time):
            self._sent[flow.source] += flow.time
            for consumer in flow.consumers:
                self._last_read[consumer].append((sum(1 << v for v in flow.consumers), flow.time))
        ready = sum(1 << v for v, need in self._needs.items() if not need)
        self.level = {begin: (ready, sum(time[v] for v in _bits(begin)), 0.0)}

    def advance(self, most: int) -> None:
        """Go to the next level; it is not whole if it has more than `most` down-sets."""
        following: dict[int, tuple[int, float, float]] = {}
        for mask, (ready, work, leaving) in self.level.items():
            for v in _bits(ready):
                larger = mask | 1 << v
                if larger not in following and work + self.time[v] <= self.most_work:
                    freed = sum(1 << b for b in self._successors[v] if not self._needs[b] & ~larger)
                    inside = sum(seconds for readers, seconds in self._last_read[v] if not readers & ~larger)
                    following[larger] = ready & ~(1 << v) | freed, work + self.time[v], leaving + self._sent[v] - inside
            if len(following) > most:
                break
        self.level = following


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def as_rows(masks: Sequence[int], n: int) -> NDArray[np.uint8]:
    """Unpack bit masks into an array (masks, n)."""
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, count=n, bitorder="little")
