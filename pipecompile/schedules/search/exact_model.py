"""The exact schedule as a constraint model for CP-SAT: intervals for actions and messages, devices and links without overlap.

    action     F, R, I, W: an interval per stage and micro-batch on its device. B in place of I and W, where that takes less time
    message    an interval on its link, after the action that sends it and before the actions that read it
    memory     a cumulative constraint per device:
               saved  ├──────────────────────┤                F to I, of a recomputed stage R to I
               recipe ├────────┤                              F to R, of a recomputed stage
               weight_saved                  ├──────┤         I to W
               values        from the action or message that writes them to the end of the action or message that reads them

Micro-batches are equal, so each stage runs them in ascending order: schedules that differ in their names alone count once.

Times are whole ticks. Durations and sizes are rounded down and capacities up, so a bound of the model is a bound of the schedule. The
rows of a solution are simulated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from pipecompile.ir import Kind
from pipecompile.schedules.search.action_times import ActionTimes, action_times
from pipecompile.schedules.search.exact_variables import Copy, ExactModel, Key
from pipecompile.schedules.search.release_lags import release_lags
from pipecompile.schedules.search.ticks import Tick
from pipecompile.schedules.search.workload import Transfer, Transfers, Workload, with_free_recompute
from pipecompile.simulation.costs import Engines

__all__ = ["build_model"]

_TICKS = 10_000_000
"""Ticks of a step whose durations have no common divisor: rounding costs less than 0.01 % over a thousand actions."""

_UNITS = 1_000_000
"""Units of memory of the largest capacity, if the sizes have no common divisor."""

_ROUNDED = 1 - 1e-3
"""Factor on heads and tails: rounded durations make them a little shorter."""


def build_model(
    module: Any, workload: Workload, n_microbatches: int, capacity: Sequence[float], engines: Engines,
    horizon: float, bound: float, recompute: bool = False,
) -> ExactModel:  # fmt: skip
    """Return the model of schedules that take at least `bound` and at most `horizon` seconds. `module` is CP-SAT's `cp_model`.

    `recompute`: every stage may recompute all of its micro-batches or none; else the flags of the workload hold.
    """
    return _ModelBuilder(
        module, workload, n_microbatches, capacity, engines, horizon, bound, recompute=recompute
    ).build()


class _ModelBuilder:
    """The model while it is built: `busy` has the intervals per device, `links` per engine, `held` (interval, units) per device."""

    def __init__(
        self, module: Any, workload: Workload, n_microbatches: int, capacity: Sequence[float], engines: Engines,
        horizon: float, bound: float, *, recompute: bool,
    ) -> None:  # fmt: skip
        self.workload, self.m, self.capacity, self.engines = workload, n_microbatches, capacity, engines
        self.seconds = {
            Kind.FORWARD: workload.forward, Kind.RECOMPUTE: workload.recompute, Kind.INPUT_GRAD: workload.input_grad,
            Kind.WEIGHT_GRAD: workload.weight_grad, Kind.BACKWARD: workload.backward,
        }  # fmt: skip
        sent = (*workload.forward_transfers, *workload.gradient_transfers)
        durations = [*(x for kind in self.seconds.values() for x in kind), *(t.seconds for each in sent for t in each)]
        tick = Tick.of(durations, horizon, _TICKS)
        self.cp, self.horizon = module.CpModel(), tick.down(horizon) if tick.is_exact else tick.up(horizon)
        makespan = self.cp.new_int_var(
            min(tick.up(bound) if tick.is_exact else tick.down(bound), self.horizon), self.horizon, ""
        )
        self.out = ExactModel(self.cp, tick, makespan, split=workload.split)
        if recompute:
            self.out.recomputes = {s: self.cp.new_bool_var("") for s in range(workload.n_stages)}
        self.busy: list[list[Any]] = [[] for _ in range(workload.n_devices)]
        self.links: dict[object, list[Any]] = {}
        self.held: list[list[tuple[Any, float]]] = [[] for _ in range(workload.n_devices)]

    def build(self) -> ExactModel:
        for s in range(self.workload.n_stages):
            for m in range(self.m):
                self._cell(s, m)
        for s in range(self.workload.n_stages):
            self._send(self.workload.forward_transfers, Kind.FORWARD, s)
            self._send(self.workload.gradient_transfers, Kind.INPUT_GRAD, s)
        self._wait_for_memory()
        for intervals in (*self.busy, *self.links.values()):
            self.cp.add_no_overlap(intervals)
        self._memory()
        self.cp.minimize(self.out.makespan)
        return self.out

    def _var(self) -> Any:
        return self.cp.new_int_var(0, self.horizon, "")

    def _cell(self, s: int, m: int) -> None:
        """Add the actions of stage s on micro-batch m, after those of the micro-batch before."""
        f = self._action(Kind.FORWARD, s, m)
        i = self._backward(s, m)
        self._after(f, i)
        if self._may_recompute(s):
            again = self._action(Kind.RECOMPUTE, s, m)
            self._after(f, again)
            later = self.cp.add(self.out.start[i] >= self.out.end[again])
            if s in self.out.recomputes:
                later.only_enforce_if(self.out.recomputes[s])
        for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.INPUT_GRAD):
            if m and (kind, s, m) in self.out.start:
                self._after((kind, s, m - 1), (kind, s, m))
        self.cp.add(self.out.makespan >= self.out.end[i])

    def _action(self, kind: Kind, s: int, m: int) -> Key:
        key, duration = (kind, s, m), self.out.tick.down(self.seconds[kind][s])
        start = self.out.start[key] = self._var()
        self.out.end[key] = start + duration
        interval = self.cp.new_fixed_size_interval_var(start, duration, "")
        if kind is Kind.RECOMPUTE and s in self.out.recomputes:
            interval = self.cp.new_optional_fixed_size_interval_var(start, duration, self.out.recomputes[s], "")
        self.busy[self.workload.placement[s]].append(interval)
        return key

    def _may_recompute(self, s: int) -> bool:
        return s in self.out.recomputes or self.workload.is_recomputed[s]

    def _backward(self, s: int, m: int) -> Key:
        """Add I and W, or B, or the choice between them where B takes less time or memory than I and W."""
        work, tick = self.workload, self.out.tick
        i, w, b = (tick.down(each[s]) for each in (work.input_grad, work.weight_grad, work.backward))
        key, weight = (Kind.INPUT_GRAD, s, m), (Kind.WEIGHT_GRAD, s, m)
        start, busy = self._var(), self.busy[work.placement[s]]
        self.out.start[key] = start
        if not work.split:
            self.out.end[key] = start + b
            busy.append(self.cp.new_fixed_size_interval_var(start, b, ""))
            return key
        late = self.out.start[weight] = self._var()
        is_slower = work.backward[s] >= work.input_grad[s] + work.weight_grad[s] - tick.size
        if is_slower and work.weight_saved[s] <= work.saved[s]:
            self.out.end[key], self.out.end[weight] = start + i, late + w
            for begin, duration in ((start, i), (late, w)):
                busy.append(self.cp.new_fixed_size_interval_var(begin, duration, ""))
        else:
            self._choice(s, m, (i, w, b))
        self._after(key, weight)
        if m:
            ordered = self.cp.add(late >= self.out.end[Kind.WEIGHT_GRAD, s, m - 1])
            if (s, m) in self.out.is_whole:
                ordered.only_enforce_if(~self.out.is_whole[s, m])
        self.cp.add(self.out.makespan >= self.out.end[weight])
        return key

    def _choice(self, s: int, m: int, ticks: tuple[int, int, int]) -> None:
        """Add the choice between I with W and B. `ticks` has their durations."""
        key, weight, (i, w, b) = (Kind.INPUT_GRAD, s, m), (Kind.WEIGHT_GRAD, s, m), ticks
        start, late, end = self.out.start[key], self.out.start[weight], self.out.end
        whole = self.out.is_whole[s, m] = self.cp.new_bool_var("")
        end[key], end[weight] = self._var(), self._var()
        self.cp.add(end[key] == start + i + (b - i) * whole)
        self.cp.add(end[weight] == late + w - w * whole)
        self.cp.add(late == end[key]).only_enforce_if(whole)
        for begin, duration, presence in ((start, b, whole), (start, i, ~whole), (late, w, ~whole)):
            interval = self.cp.new_optional_fixed_size_interval_var(begin, duration, presence, "")
            self.busy[self.workload.placement[s]].append(interval)

    def _after(self, first: Key, then: Key) -> None:
        if first != then:
            self.cp.add(self.out.start[then] >= self.out.end[first])

    def _send(self, sent: Transfers, kind: Kind, s: int) -> None:
        """Add the messages of stage s of this kind, and the values at both ends: a value is held from the start of the action that
        writes it, and of its transfer, to the end of the last action or transfer that reads it.
        """
        source, tick, start, end = self.workload.placement[s], self.out.tick, self.out.start, self.out.end
        last: dict[tuple[str, int], tuple[float, list[Any]]] = {}
        for transfer in sent[s]:
            duration = tick.down(transfer.seconds)
            for m in range(self.m):
                readers = [(kind, reader, m) for reader in transfer.stages]
                ends = [end[self._last_reader(reader)] for reader in readers]
                leaves = end[kind, s, m]
                if duration:
                    leaves = self._var()
                    self.cp.add(leaves >= end[kind, s, m])
                    interval = self.cp.new_fixed_size_interval_var(leaves, duration, "")
                    engines = self._engines(source, transfer.device)
                    for engine in engines:
                        self.links.setdefault(engine, []).append(interval)
                    self.out.copies.append(Copy(leaves, duration, engines, end[kind, s, m]))
                for reader in readers:
                    self.cp.add(start[reader] >= leaves + duration)
                    self.out.arrivals.setdefault(reader, []).append(leaves + duration)
                if transfer.device != source:
                    self._hold_received(transfer, leaves, readers)
                    ends = [leaves + duration]
                last.setdefault((transfer.value, m), (transfer.nbytes, []))[1].extend(ends)
        for (_, m), (nbytes, ends) in last.items():
            self._hold(source, start[kind, s, m], ends, nbytes)

    def _hold_received(self, transfer: Transfer, leaves: Any, readers: Sequence[Key]) -> None:
        """Hold a value that another device sends until its readers end; of one reader whose recomputation is free, until its R ends."""
        end, (kind, s, m) = self.out.end, readers[0]
        self._hold(transfer.device, leaves, [end[self._last_reader(reader)] for reader in readers], transfer.nbytes)
        if len(readers) == 1 and kind is Kind.FORWARD and s in self.out.recomputes:
            again = end[Kind.RECOMPUTE, s, m]
            self._hold(transfer.device, end[readers[0]], [again], transfer.nbytes, self.out.recomputes[s])

    def _last_reader(self, reader: Key) -> Key:
        """Return the last action that surely reads a value of a forward: R reads the inputs again."""
        kind, s, m = reader
        is_read_again = kind is Kind.FORWARD and self.workload.is_recomputed[s] and not self.out.recomputes
        return (Kind.RECOMPUTE, s, m) if is_read_again else reader

    def _wait_for_memory(self) -> None:
        """Add what follows from the memory: heads and tails of all actions, and forwards that wait for a release."""
        workload = with_free_recompute(self.workload) if self.out.recomputes else self.workload
        lags, tick = release_lags(workload, self.capacity, self.m), self.out.tick
        for lag in lags:
            is_free = (lag.release, 0) in self.out.is_whole
            if is_free and lag.kind is Kind.WEIGHT_GRAD:
                continue  # a younger B may end before this W
            rounded = 0 if tick.is_exact else lag.count + workload.n_stages  # each action in between may lose a tick
            waits = 0 if is_free else max(0, tick.down(lag.seconds) - rounded)
            for m in range(self.m - lag.count):
                later, release = (Kind.FORWARD, lag.forward, m + lag.count), (lag.kind, lag.release, m)
                self.cp.add(self.out.start[later] >= self.out.end[release] + waits)
        self._bound_times(action_times(workload, self.m, lags))

    def _bound_times(self, times: ActionTimes) -> None:
        """Add the heads and tails. Of a backward that may be B the tail begins where its I would end, and W has none: its place among
        younger backwards is free.
        """
        tick, work = self.out.tick, self.workload
        for (kind, s, m), start in self.out.start.items():
            is_free = (s, m) in self.out.is_whole
            if kind not in times.head or (is_free and kind is Kind.WEIGHT_GRAD):
                continue
            end = self.out.end[kind, s, m]
            if is_free and kind is Kind.INPUT_GRAD:
                end = start + tick.down(min(work.input_grad[s], work.backward[s]))
            self.cp.add(start >= tick.down(times.head[kind][s][m] * _ROUNDED))
            self.cp.add(end + tick.down(times.tail[kind][s][m] * _ROUNDED) <= self.out.makespan)

    def _engines(self, source: int, target: int) -> tuple[object, ...]:
        return (source, ~target) if self.engines is Engines.DEVICE else ((source, target),)

    def _memory(self) -> None:
        """Add the cumulative constraint of every device whose memory is limited."""
        work, start, end = self.workload, self.out.start, self.out.end
        for s in range(work.n_stages):
            device = work.placement[s]
            for m in range(self.m) if self.capacity[device] < inf else ():
                f, r, i = ((kind, s, m) for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.INPUT_GRAD))
                flag = self.out.recomputes.get(s)
                if self._may_recompute(s):
                    self._hold(device, start[f], [end[r]], work.recipe[s], flag)
                    self._hold(device, start[r], [end[i]], work.saved[s], flag)
                if flag is not None or not work.is_recomputed[s]:
                    self._hold(device, start[f], [end[i]], work.saved[s], None if flag is None else ~flag)
                if work.split:
                    self._hold(device, end[i], [end[Kind.WEIGHT_GRAD, s, m]], work.weight_saved[s])
        for device, held in enumerate(self.held):
            if held:
                unit = Tick.of([size for _, size in held], self.capacity[device], _UNITS)
                most = unit.most(self.capacity[device])
                self.cp.add_cumulative([each for each, _ in held], [unit.down(size) for _, size in held], most)

    def _hold(self, device: int, first: Any, ends: Sequence[Any], size: float, presence: Any = None) -> None:
        """Add `size` to the memory of a device from `first` to the latest of `ends`, if `presence` holds."""
        if not size or self.capacity[device] == inf:
            return
        last = ends[0]
        if len(ends) > 1:
            last = self._var()
            for end in ends:
                self.cp.add(last >= end)
        if presence is None:
            interval = self.cp.new_interval_var(first, self._var(), last, "")
        else:
            interval = self.cp.new_optional_interval_var(first, self._var(), last, presence, "")
        self.held[device].append((interval, size))
