"""The exact cut of a graph with few down-sets: the dynamic program of a chain, with down-sets in the place of positions.

      ┌─▶ b ─┐                               ┌─▶ ab ─┐
    a ┤      ├─▶ d   has six down-sets  {} ─▶ a       ├─▶ abc ─▶ abcd      best[s][I] = min over J inside I of
      └─▶ c ─┘                               └─▶ ac ─┘                                 max(best[s - 1][J], load_s(J, I))

Stage s takes I - J. What that sends and receives is a product of "says J" and "says I", so all loads are matrix products: with N down-sets and F
flows O(N^2 (F + K)). Most networks are nearly chains and have few. Tarnawski et al., "Efficient algorithms for device placement
of DNN graph operators", 2020. Without multicast, a sender is charged per side as in `chain`: then the value is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.loads import TOLERANCE
from pipecompile.partitioners.reach import neighbours
from pipecompile.partitioners.stages import Stages
from pipecompile.partitioners.steering import span_of

__all__ = ["MOST", "cut_lattice"]

MOST = 1000
"""Down-sets up to which this is tried: at most some hundred milliseconds and 100 MB."""

Floats = NDArray[np.float64]


def cut_lattice(clusters: Clusters, stages: Stages, most: int = MOST) -> tuple[list[int] | None, float] | None:
    """The best cut and a lower bound of every cut's bottleneck, which it meets if every flow has one consumer or multicast
    holds. The cut is None, the bound infinite, when none fits in memory. None when there are too many down-sets.
    """
    sets = _down_sets(clusters, most)
    if sets is None or len(sets) * len(clusters.flows) > 4 * most * most:
        return None
    inside = np.array([[mask >> v & 1 for v in range(len(clusters))] for mask in sets], dtype=np.float64)
    nested = (inside @ (1 - inside).T == 0) & ~_together(inside, clusters.strict)
    table = _Table(inside, clusters, stages)
    best = np.full(len(sets), np.inf)
    best[0] = 0.0
    origin = []
    for s in range(len(stages)):
        value = np.where(nested & _allowed(inside, clusters, s, len(stages)), table.load(s), np.inf)
        value = np.maximum(best[:, None], value)
        origin.append(value.argmin(axis=0))
        best = value.min(axis=0)
    return _traced(inside, origin) if np.isfinite(best[-1]) else None, float(best[-1])


class _Table:
    """The loads of all stages I - J, as matrices over (J, I)."""

    def __init__(self, inside: Floats, clusters: Clusters, stages: Stages) -> None:
        self.stages = stages
        columns = (clusters.time, clusters.forward, clusters.bytes, clusters.activation)
        self.time, self.forward, self.bytes, self.activation = (_work(inside, column) for column in columns)
        timed = [flow for flow in clusters.flows if flow.time]
        held = [flow for flow in clusters.flows if flow.bytes] if stages.bounded else []
        self.sent = _sent(inside, timed, multicast=stages.multicast)
        self.received = _received(inside, timed, [flow.time for flow in timed])
        self.inbox = _received(inside, held, [flow.bytes for flow in held])
        self.bytes = self.bytes + _shared(inside, clusters)

    def load(self, s: int) -> Floats:
        """The load of I - J as stage s, infinite where it does not fit in memory."""
        stages, asked = self.stages, self.stages.recompute[s]
        once, again = ((self.time + more) / stages.speed[s] for more in (0.0, self.forward))
        kept = self.bytes + stages.in_flight[s] * self.inbox
        limit = stages.limit[s] * (1 + TOLERANCE)
        value = np.full(kept.shape, np.inf)
        if asked is not False:
            value = np.where(kept + self.activation <= limit, self._sum(again), value)
        if asked is not True:
            fit = kept + stages.in_flight[s] * self.activation <= limit
            value = np.where(fit, self._sum(once), value)
        return value

    def _sum(self, compute: Floats) -> Floats:
        if self.stages.overlap:
            return np.maximum(compute, np.maximum(self.sent, self.received))
        return compute + self.sent + self.received


def _together(inside: Floats, strict: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """[J, I] is true when I - J holds both clusters of a pair apart."""
    bad = np.zeros((len(inside), len(inside)), dtype=bool)
    for a, b in strict:
        bad |= np.outer((1 - inside[:, a]) * (1 - inside[:, b]), inside[:, a] * inside[:, b]) > 0
    return bad


def _allowed(inside: Floats, clusters: Clusters, s: int, n_stages: int) -> NDArray[np.bool_]:
    """Whether I can be all that is in the stages up to s."""
    first, last = span_of(clusters, n_stages) or ([0] * len(clusters), [n_stages - 1] * len(clusters))
    wanted = [v for v, stage in enumerate(last) if stage <= s]
    banned = [v for v, stage in enumerate(first) if stage > s]
    allowed: NDArray[np.bool_] = (inside[:, wanted].min(axis=1, initial=1) > 0) & (
        inside[:, banned].max(axis=1, initial=0) == 0
    )
    return allowed


def _traced(inside: Floats, origin: Sequence[NDArray[np.intp]]) -> list[int]:
    stage = np.zeros(inside.shape[1], dtype=np.int64)
    here = len(inside) - 1
    for s in reversed(range(len(origin))):
        before = int(origin[s][here])
        stage[(inside[here] - inside[before]) > 0] = s
        here = before
    return [int(s) for s in stage]


def _down_sets(clusters: Clusters, most: int) -> list[int] | None:
    """All down-sets as bit masks, small ones first, or None when there are more than `most`."""
    before, after = neighbours(clusters)
    needs = [sum(1 << a for a in sources) for sources in before]
    level = {0: sum(1 << v for v, need in enumerate(needs) if not need)}  # a down-set, and what can be added to it
    found: list[int] = []
    while level:
        found += level
        if len(found) > most:
            return None
        following: dict[int, int] = {}
        for mask, ready in level.items():
            for v in _bits(ready):
                larger = mask | 1 << v
                if larger not in following:
                    freed = sum(1 << b for b in after[v] if not needs[b] & ~larger)
                    following[larger] = ready & ~(1 << v) | freed
        level = following
    return found


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _work(inside: Floats, column: Sequence[float] | Floats) -> Floats:
    """[J, I] is the sum of a column over I - J."""
    total = inside @ np.asarray(column, dtype=np.float64)
    return np.maximum(total[None, :] - total[:, None], 0.0)


def _sent(inside: Floats, flows: Sequence[Flow], *, multicast: bool) -> Floats:
    """[J, I] is what I - J sends."""
    if not flows:
        return np.zeros((len(inside),) * 2)
    source = inside[:, [flow.source for flow in flows]]
    time = np.array([flow.time for flow in flows])
    some = np.stack([inside[:, flow.consumers].max(axis=1) for flow in flows], axis=1)
    every = np.stack([inside[:, flow.consumers].min(axis=1) for flow in flows], axis=1)
    forwards: Floats = ((1 - source) * time) @ (source * (1 - every)).T  # a consumer is not in I yet
    backwards: Floats = ((1 - source) * some * time) @ (source * (every if multicast else 1)).T  # one is in J already
    return forwards + backwards


def _received(inside: Floats, flows: Sequence[Flow], amounts: Sequence[float]) -> Floats:
    """[J, I] is what I - J receives, of each flow so much."""
    if not flows:
        return np.zeros((len(inside),) * 2)
    owner, wanted, left = _patterns(inside, [flow.consumers for flow in flows])
    source, amount = inside[:, [flow.source for flow in flows]][:, owner], np.array(amounts)[owner]
    received: Floats = (left * amount) @ (wanted * (1 - source)).T + (left * source * amount) @ (wanted * source).T
    return received


def _shared(inside: Floats, clusters: Clusters) -> Floats:
    """[J, I] is what I - J holds of bytes that several clusters use."""
    if not clusters.shared:
        return np.zeros((len(inside),) * 2)
    owner, wanted, left = _patterns(inside, [users for users, _ in clusters.shared])
    held: Floats = (left * np.array([size for _, size in clusters.shared])[owner]) @ wanted.T
    return held


def _patterns(inside: Floats, sets: Sequence[tuple[int, ...]]) -> tuple[list[int], Floats, Floats]:
    """A column for every set of clusters and every part of it that some I holds: the set, [I holds just this part],
    [J lacks some of this part]. The product of the last two says that a cluster of the set is in I - J.
    """
    owner, wanted, left = [], [], []
    for number, clusters in enumerate(sets):
        held = inside[:, clusters]
        for pattern in sorted(set(map(tuple, held.tolist()))):
            if any(pattern):
                owner.append(number)
                wanted.append((held == pattern).all(axis=1))
                left.append((held < pattern).any(axis=1))
    return owner, np.stack(wanted, axis=1).astype(np.float64), np.stack(left, axis=1).astype(np.float64)
