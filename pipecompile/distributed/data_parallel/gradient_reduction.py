"""The reduction of the gradients of one step over the replicas of a pipeline, and of its loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property, partial
from hashlib import sha256
from math import nan

import torch
from torch import nn

from pipecompile.distributed.agreement.copy_calls import other_modes, rows_of_copies
from pipecompile.distributed.agreement.state_of_copies import StateOfCopies
from pipecompile.distributed.agreement.weights_of_copies import WeightsOfCopies, shortened
from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket, with_gradients
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients, Part
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.distributed.data_parallel.weighed_gradients import weigh_in_place, weighed
from pipecompile.distributed.failures.failure_report import Disagreement, StageDisagreement
from pipecompile.errors import RunError
from pipecompile.torch_private.device_functions import to_device
from pipecompile.torch_private.dtensors import gradient_of, like, local

__all__ = ["GradientReduction", "LossOfBatch", "Parameters"]

Parameters = Callable[[], Iterator[nn.Parameter]]
"""A function that yields the parameters of this rank that every replica has whole."""

LossOfBatch = Callable[[torch.Tensor | None], torch.Tensor]
"""A function from the loss of this replica, None without samples, to the loss of the whole batch."""

_WEIGHT, _FLOOR, _PROGRAM, _UNIT, _RUNS, _MODES, _TRAINED, _STEP, _WEIGHTS, _STATE = range(10)
"""Places of the row of a replica: what it counts, the least divisor, digests, whether it has samples, digests, a number of its steps and
digests of its weights and of what else it reads.
"""

_HELD = " gradients held under no_sync"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of losses, by their number in a message."""


class GradientReduction:
    """The reduction of the gradients of one step.

    row        3B0  3B1  1B0  1B1
    buckets             [ 3 ─────── ]  [ 1 ]  [ the rest ]     started in this order on all replicas, waited for at the end

    `share` is the weight of this replica's part of the batch. `parts` are what the parts of all replicas count, once they are agreed on.
    `is_alike` says whether all replicas run the same program.
    """

    def __init__(
        self,
        group: CollectiveGroup,
        shards: ShardedParameters,
        parameters: Parameters,
        samples: float | None,
        held: HeldGradients,
    ) -> None:
        self.group, self.shards, self.parameters, self.samples = group, shards, parameters, samples
        self.share, self.unit, self.floor, self.is_alike = 1.0, "samples", 0.0, True
        self.parts: tuple[float, ...] = ()
        self._held = held
        self._buckets: list[GradientBucket] = []

    @cached_property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The parameters that every replica has whole; read when the step runs, since a first step places them."""
        return tuple(self.parameters())

    def agree(self, program: str | None, modes: str, weights: WeightsOfCopies, state: StateOfCopies) -> None:
        """Compare the program, whose order is that of the buckets, and compute `share` from the samples of all replicas.

        `program` is None on a replica without samples. `modes` are those in which the step runs, in words. `weights` compares the
        values of the parameters, `state` what else is read.
        """
        own = [self.samples or 0.0, self.floor, _digest(program or ""), _digest(self.unit), float(program is not None)]
        own += [_digest(modes), _digest(self._trained), *weights.row(self.whole), state.digest() if program else 0.0]
        rows = rows_of_copies(self.group, "pipe.step", own)
        if len({row[_MODES] for row in rows}) > 1:
            raise other_modes(self.group, modes)
        running = [row for row in rows if row[_RUNS]]
        self.parts = tuple(row[_WEIGHT] * row[_RUNS] for row in rows)
        _check_parts(running, self.unit)
        self.is_alike = len(running) == len(rows) and len({row[_PROGRAM] for row in running}) == 1
        if len({row[_TRAINED] for row in rows}) > 1:
            raise self._other_parameters(weights)
        weights.compare(self.group, [(row[_STEP], row[_WEIGHTS]) for row in rows], self.whole)
        state.compare(self.group, [row[_STATE] for row in rows])
        if program is None:
            self.share = 0.0
        elif self.samples is not None:
            total = max(sum(row[_WEIGHT] for row in running), self.floor)
            self.share = max(self.samples, self.floor) / total if total else nan  # 0/0, as the loss of the whole batch

    @property
    def _trained(self) -> str:
        """The places and shapes of the parameters of this rank that are trained, or have gradients that are held, as text: their gradients
        are sent one after the other.
        """
        every = [(one, self._held.has(one)) for one in (*self.whole, *self.shards.parameters)]
        rows = [
            (place, tuple(one.shape), is_held)
            for place, (one, is_held) in enumerate(every)
            if one.requires_grad or is_held
        ]
        return str(rows)

    def _other_parameters(self, weights: WeightsOfCopies) -> StageDisagreement:
        """Return the error of copies that train other parameters, with the names. Ranks of other stages may have no difference."""
        names = {id(one): name for name, one in weights.named()}
        own = [names.get(id(one), "?") for one in (*self.whole, *self.shards.wholes) if one.requires_grad]
        own += [f"{self._held.count}{_HELD}"] if self._held.count else []
        rows = [json.loads(text) for text in self.group.all_gather_text(json.dumps(own))]
        shared = set(rows[0]).intersection(*rows[1:])
        texts = [shortened([name for name in row if name not in shared]) for row in rows]
        if any(name.endswith(_HELD) for row in rows for name in row if name not in shared):
            why, hint = "gradients of a step under no_sync were cleared on one copy alone", "zero_grad() on all copies"
        elif self.is_alike:
            why, hint = "a parameter was frozen on one copy alone", "requires_grad alike on the same rank of all copies"
        else:
            why = "a recording of one copy alone has used parameters that no recording before had used"
            hint = "compile(..., example_args=...) in the mode of training, on all copies"
        return StageDisagreement(
            "the copies of the pipeline train other parameters on their ranks",
            where="; ".join(
                f"rank {rank}: {text or 'none of these'}" for rank, text in zip(self.group.ranks, texts, strict=True)
            ),
            why=why,
            hint=hint,
        )

    def loss_of_batch(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of the batch, from this replica's; None on a replica without samples. All replicas call this together.

        It has the dtype of this replica's loss. The sum is in float64: targets of one replica may have another dtype.
        """
        if self.is_alike:
            assert loss is not None
            return self.group.sum(self.part_of(loss).double()).to(loss.dtype)
        part = [0.0, -1.0] if loss is None else [float(self.part_of(loss)), float(_DTYPES.index(loss.dtype))]
        rows = self.group.all_gather(torch.tensor(part, dtype=torch.float64, device="cpu")).tolist()
        dtype = _DTYPES[max(int(row[1]) for row in rows)] if loss is None else loss.dtype
        return torch.tensor(sum(row[0] for row in rows), dtype=dtype, device=None if loss is None else loss.device)

    def part_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the part of this replica's loss in that of the batch. A loss that counts nothing may be 0/0."""
        return loss * self.share if self.share else torch.zeros_like(loss)

    @torch.no_grad()
    def start(self, complete: Container[int] | None) -> int:
        """Start to reduce gradients, a bucket per dtype; return the number of buckets."""
        started = {id(weight) for bucket in self._buckets for weight in bucket.weights}
        for bucket in self._buckets if self.shards.is_by_stage else ():
            bucket.complete()  # the gradients of one stage at a time are whole

        def is_due(weight: torch.Tensor) -> bool:
            return id(weight) not in started if complete is None else id(weight) in complete

        trained = [one for one in self.whole if (one.requires_grad or self._held.has(one)) and is_due(one)]
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        buckets = [self._bucket([p for p in trained if p.dtype is dtype]) for dtype in dtypes]
        buckets += self.shards.reduced(is_due, self.share, self._held)
        self._buckets += buckets
        return len(buckets)

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> GradientBucket:
        """Start one bucket: the weighted gradients, and per parameter the number of ranks that have a gradient for it."""
        gradients = [local(gradient_of(parameter)).reshape(-1) for parameter in parameters]
        held = [self._held.of(parameter) for parameter in parameters]
        is_there = [p.grad is not None or one is not None for p, one in zip(parameters, held, strict=True)]
        has_gradient = to_device(torch.tensor(is_there, dtype=gradients[0].dtype, device="cpu"), gradients[0].device)
        flat = torch.cat([*gradients, has_gradient])
        weigh_in_place(flat[: -len(parameters)], self.share)
        sizes = [*map(len, gradients), len(parameters)]
        for parameter, own, one in zip(parameters, flat.split_with_sizes(sizes), held, strict=False):
            parameter.grad = None
            if one is not None:
                own.add_(one)
        settle = partial(_set_gradients, parameters, sizes, is_there)
        return GradientBucket(parameters, self.group.start_sum(flat), (), settle)

    @torch.no_grad()
    def own_parts(self) -> list[Part]:
        """Take the weighted gradients of this replica, instead of a reduction."""
        parts = self.shards.own_parts(self.share)
        for parameter in self.whole:
            if parameter.requires_grad:
                gradient = None if parameter.grad is None else local(gradient_of(parameter)).reshape(-1)
                parts.append((parameter, weighed(gradient, self.share)))
                parameter.grad = None
        return parts

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all buckets and set the gradients. Raises RunError for a gradient that was added after its bucket started."""
        for bucket in self._buckets:
            bucket.start_further()
        for bucket in self._buckets:
            bucket.complete()
        if late := [weight for bucket in self._buckets for weight in bucket.weights if weight.grad is not None]:
            raise RunError(
                f"a gradient was added to {len(late)} parameter{'s' * (len(late) > 1)} while the gradients of all copies"
                " were being reduced",
                stage=None,
                microbatch=0,
                why="all backwards of this rank that use the parameter were over: a hook may have added the gradient",
                hint="add it where the parameter is used, or after the step",
            )
        for bucket in self._buckets:
            result, bucket.result = bucket.complete(), None
            bucket.settle(result)


def _digest(text: str) -> float:
    """Return 48 bits of a hash, which float64 has exactly."""
    return float(int(sha256(text.encode()).hexdigest()[:12], 16))


def _check_parts(running: Sequence[Sequence[float]], unit: str) -> None:
    """Raise Disagreement if no replica has samples, or if they count other things."""
    if not running:
        raise Disagreement(
            "the batch is empty", where="0 samples on all copies of the pipeline", hint="a sample on one copy at least"
        )
    if len({row[_UNIT] for row in running}) > 1:
        raise Disagreement(
            "the copies of the pipeline count other things in their parts of the batch",
            where=f"here {unit}",
            why="the divisor of the loss is known for the parts of some copies only",
            hint='loss_reduction="sum", with the divisor of the whole batch in the loss',
        )


def _set_gradients(
    parameters: Sequence[nn.Parameter], sizes: Sequence[int], is_there: Sequence[bool], flat: torch.Tensor
) -> None:
    """Set the gradients to their parts of a reduced bucket; a parameter without a gradient on any rank gets none."""
    *gradients, counts = flat.split_with_sizes(sizes)
    for parameter, gradient, has_one in zip(parameters, gradients, with_gradients(is_there, counts), strict=True):
        parameter.grad = like(parameter, gradient) if has_one else None
