"""Collectives over a process group. A rank that waits for the others checks the status board, so no rank waits for a rank that failed.

    on a CPU      start ── ... ── wait: the host waits
    on a GPU      start ── ... ── wait: the current stream waits ── ... ── end of the call: the host waits

What ranks agree on is on the CPU, and goes through a group of ours, so that no stream is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import PATIENCE, POLL, await_report
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.messages.own_groups import own_group
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.process_groups import has_gloo_alone
from pipecompile.tracing.state.signal_errors import is_from_handler

__all__ = ["COLLECTIVE_PART", "CollectiveGroup", "GradientBucket", "PendingCollective", "with_gradients"]

COLLECTIVE_PART = "its part of a collective"
"""Name, on the status board, of the value that a rank of a group owes to the others."""

_POLL_WORK = 0.0002
"""Seconds between two looks at a collective that is under way."""


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Of torch 2.14, whose older names warn; torch 2.11 has the older names alone."""


class CollectiveGroup:
    """The ranks of a process group. All ranks call the same methods in the same order, and wait for results in any order."""

    def __init__(self, group: dist.ProcessGroup, communicator: Communicator) -> None:
        self._first, self.communicator = group, communicator

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; after the loss of a copy of the pipeline, the group of the remaining ranks."""
        return self.communicator.current(self._first)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def index(self) -> int:
        """Place of this rank among them."""
        return self.group.rank()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, as `torchrun` numbers them."""
        return tuple(dist.get_process_group_ranks(self.group))

    def own(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Return the process group of ours with these ranks, if it takes the tensor: a failed pipeline leaves the mesh's as it is."""
        return own_group(self.group, tensor.device.type)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. All have their tensors on devices of one type."""
        return self.start_sum(tensor.detach().clone()).wait()

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all ranks, element by element. All have their tensors on devices of one type."""
        return self._start_all_reduce(tensor.detach().clone(), dist.ReduceOp.MAX).wait()

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors `(width,)` of all ranks as the rows of a tensor `(ranks, width)`. All are on devices of one type."""
        return self.start_all_gather(row.detach()).wait()

    def start_all_gather(self, row: torch.Tensor, into: torch.Tensor | None = None) -> PendingCollective:
        """Start to gather the tensors `(width,)` of all ranks; the result is `(ranks, width)`, in the memory of `into` if it is given.
        `row` must not change until then.
        """
        rows = row.new_empty(self.size, row.numel()) if into is None else into.view(self.size, row.numel())
        work = _all_gather(rows.view(-1), row, self.own(row), async_op=True)
        return PendingCollective(self, work, rows)

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        own = torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")
        lengths = self.all_gather(torch.tensor([len(own)], device="cpu"))[:, 0].tolist()
        if not any(lengths):
            return [""] * self.size
        rows = self.all_gather(torch.nn.functional.pad(own, (0, max(lengths) - len(own))))
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def start_sum(self, tensor: torch.Tensor) -> PendingCollective:
        """Start a sum over all ranks; its result is `tensor` itself."""
        return self._start_all_reduce(tensor, dist.ReduceOp.SUM)

    def start_reduce_scatter(self, rows: torch.Tensor) -> PendingCollective:
        """Start a sum of `rows` `(ranks, width)`, of which each rank gets its own row `(width,)`. `rows` is overwritten."""
        if (
            rows.device.type == "cpu"
        ):  # gloo's reduce-scatter is an all-reduce as well, and its work has no `is_completed`
            return PendingCollective(self, self.start_sum(rows).work, rows[self.index])
        own = rows.new_empty(rows.shape[1])
        work = _reduce_scatter(own, rows.view(-1), group=self.own(rows), async_op=True)
        return PendingCollective(self, work, own)

    def _start_all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> PendingCollective:
        return PendingCollective(self, dist.all_reduce(tensor, op, self.own(tensor), async_op=True), tensor)

    def wait(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        """Wait for a collective of a tensor; on a GPU with the current stream, and with the host when the call ends. Raises RankLost."""
        assert work is not None
        is_launched = is_accelerator(tensor.device) and not has_gloo_alone(self.own(tensor))
        with self._connected():
            if self.size > 1 and not is_launched:
                self._poll(work.is_completed)
            work.wait()
        if is_launched:
            event = torch.accelerator.current_stream(tensor.device).record_event()
            self.communicator.groups.launched(self.group, partial(self._wait_for, event))

    def _wait_for(self, event: torch.Event) -> None:
        """Wait for a stream that waits for a collective. Raises RankLost."""
        with self._connected():
            self._poll(event.query)
        self.communicator.check_verdict()  # what is aborted is over as well

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise RankLost for an error of a collective in this context."""
        try:
            yield
        except RuntimeError as error:
            if is_from_handler(error):
                raise
            raise self._lost(f"the connection to it is gone: {str(error).partition(chr(10))[0]}") from None

    def _poll(self, is_over: Callable[[], bool]) -> None:
        """Return when a collective is over. Raises RankLost."""
        start = checked = awake()
        while not is_over():
            sleep(_POLL_WORK)
            if (now := awake()) - checked > POLL:
                checked = now
                self._check(checked - start)
        if checked != start:
            self.communicator.board.clear_wait()

    def _check(self, waited: float) -> None:
        """Post the wait on the status board; raise RankLost if a rank failed, or after the timeout. `waited` is in seconds."""
        late = self._late_ranks()[0]
        self.communicator.check(late)
        self.communicator.board.post_wait(late, COLLECTIVE_PART)
        if waited > self.communicator.timeout:
            raise self._lost(f"it has been silent for {self.communicator.timeout:.3g} s")

    def _late_ranks(self) -> list[int]:
        """Return the other ranks that may be late: those that do not wait themselves, or all if all wait."""
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != self.communicator.rank]
        return [rank for rank in others if self.communicator.board.wait_of(rank) is None] or others

    def _ended(self) -> RankLost | None:
        """Return the report of a rank of the group whose script or process has ended; None if there is none, as far as is known."""
        for rank in dist.get_process_group_ranks(self.group):
            cause = self.communicator.board.cause(rank, "") if rank != self.communicator.rank else ""
            if cause:
                report = FailureReport(rank, cause, action=f"before {COLLECTIVE_PART} arrived", awaited=COLLECTIVE_PART)
                return RankLost(report, is_posted=False)
        return None

    def _lost(self, what: str) -> RankLost:
        """Return the report of the late rank. The ranks of its pipeline may report it first: they know which value it owes."""
        await_report(self.communicator.check, PATIENCE, POLL)
        if (ended := self._ended()) is not None:
            return ended
        late = self._late_ranks()
        rank, name = self.communicator.board.root_of_wait(late[0], COLLECTIVE_PART)
        what = self.communicator.board.with_reason(rank, what)
        others = f" (or to another of ranks {', '.join(map(str, late))})" if len(late) > 1 else ""
        return RankLost(
            FailureReport(rank, what + others, action=f"before {name} arrived", awaited=name), is_posted=False
        )


@dataclass(frozen=True, slots=True, eq=False)
class PendingCollective:
    """A collective that runs while this rank goes on. `result` is complete after `wait`."""

    group: CollectiveGroup
    work: dist.Work | None
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the result. Raises RankLost."""
        self.group.wait(self.work, self.result)
        return self.result


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Gradients of `weights` that are reduced in one message.

    The result of `pending` is summed over the `further` groups, one after the other, and then given to `settle`. `result` is None
    until it is complete.
    """

    weights: Sequence[torch.Tensor]
    pending: PendingCollective | None
    further: Sequence[CollectiveGroup]
    settle: Callable[[torch.Tensor], None]
    result: torch.Tensor | None = None

    def start_further(self) -> None:
        """Start the sum over each further group, in turn, when the sum over the group before it is complete."""
        for group in self.further:
            if self.pending is not None:
                self.pending = group.start_sum(self.pending.wait())
        self.further = ()

    def complete(self) -> torch.Tensor:
        """Return the result, and keep no more memory than it takes. Raises RankLost."""
        self.start_further()
        if self.pending is not None:
            result, self.pending = self.pending.wait(), None
            self.result = result.clone() if result.nbytes < result.untyped_storage().nbytes() else result
        assert self.result is not None
        return self.result


def with_gradients(is_there: Sequence[bool], counts: torch.Tensor) -> Sequence[bool]:
    """Return whether any rank has a gradient, per parameter of a bucket; `is_there` says it of this one, and `counts` has their number.

    A GPU is waited for only where this rank lacks one.
    """
    return is_there if all(is_there) else [count > 0 for count in counts.tolist()]
