"""The gradients of sharded parameters, in messages: large ones each in its own memory, the others in one row per dtype.

    large      whole.grad ───────────────────────────► reduce-scatter     no copy of the gradient
    others     whole.grad, whole.grad, counts ──► row ──► reduce-scatter

The row has, per parameter of both kinds, the number of ranks with a gradient for it: a parameter without one gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket, with_gradients
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients
from pipecompile.distributed.data_parallel.sharded_parameter import ShardedParameter
from pipecompile.distributed.data_parallel.weighed_gradients import weigh_in_place
from pipecompile.torch_private.device_functions import to_device
from pipecompile.torch_private.storages import n_tensors, storage_key

__all__ = ["ShardBuckets", "by_dtype", "has_own_message"]

_LARGE = 1 << 20
"""Bytes of a whole parameter from which on it has messages of its own, without a copy: benchmarks/sharding.py."""

_Settle = Callable[[torch.Tensor], None]


class ShardBuckets:
    """The messages of one reduction over `groups`: that of the shards last, before it those of the replicas of shards (HSDP).

    `share` is the weight of this replica's gradients, `held` what is held for them.
    """

    def __init__(self, groups: Sequence[CollectiveGroup], share: float, held: HeldGradients) -> None:
        *self.further, self.group = groups
        self.share, self.held = share, held

    def start(self, parameters: Iterable[ShardedParameter]) -> list[GradientBucket]:
        """Start to reduce the gradients of parameters. Return the buckets, of each dtype that of the row first: it has the counts."""
        return [bucket for own in by_dtype(parameters) for bucket in self._of_dtype(own)]

    def _of_dtype(self, parameters: Sequence[ShardedParameter]) -> list[GradientBucket]:
        large = [one for one in parameters if has_own_message(one, self.group.size)]
        small = [one for one in parameters if not has_own_message(one, self.group.size)]
        any_has: list[bool] = []
        return [
            self._row([*small, *large], len(small), any_has),
            *(self._large(one, any_has, i) for i, one in enumerate(large)),
        ]

    def _row(self, parameters: Sequence[ShardedParameter], n_small: int, any_has: list[bool]) -> GradientBucket:
        """Start the row of the first `n_small` parameters, and of the counts of all.

        Settled, it says in `any_has` for each of the others whether any rank has a gradient.
        """
        small = parameters[:n_small]
        has = [one.whole.grad is not None or self.held.of(one.shard) is not None for one in parameters]
        local = parameters[0].local
        has_gradient = to_device(torch.tensor(has, dtype=local.dtype, device="cpu"), local.device)
        columns = [one.rows(one.gradient, self.group.size) for one in small]
        rows = torch.cat([*columns, has_gradient.expand(self.group.size, -1)], 1)
        widths = [*(one.width for one in small), len(parameters)]
        for one, column in zip(small, rows.split_with_sizes(widths, 1), strict=False):
            self._weigh(one, column)

        def settle(row: torch.Tensor) -> None:
            *gradients, found = row.split_with_sizes(widths)
            has_one = with_gradients(has, found)
            any_has.extend(has_one[n_small:])
            for one, gradient, is_there in zip(small, gradients, has_one, strict=False):
                if is_there:
                    one.add_gradient(gradient)

        return self._bucket(small, rows, settle)

    def _large(self, parameter: ShardedParameter, any_has: list[bool], place: int) -> GradientBucket:
        gradient = parameter.gradient
        rows = parameter.rows(gradient, self.group.size)
        if gradient is not None and n_tensors(gradient) > 1 + (storage_key(rows) == storage_key(gradient)):
            rows = rows.clone()  # others share the memory, such as a gradient that is on its way to another rank
        self._weigh(parameter, rows)

        def settle(gradient: torch.Tensor) -> None:
            if any_has[place]:
                parameter.add_gradient(gradient)

        return self._bucket([parameter], rows, settle)

    def _weigh(self, parameter: ShardedParameter, rows: torch.Tensor) -> None:
        """Weight the rows of a gradient, drop the gradient on the parameter, and add its held part to the rows."""
        weigh_in_place(rows, self.share)
        parameter.whole.grad = None
        if (part := self.held.of(parameter.shard)) is not None:
            rows.add_(parameter.rows(part, self.group.size))

    def _bucket(self, parameters: Sequence[ShardedParameter], rows: torch.Tensor, settle: _Settle) -> GradientBucket:
        pending = self.group.start_reduce_scatter(rows)
        return GradientBucket([one.whole for one in parameters], pending, self.further, settle)


def has_own_message(parameter: ShardedParameter, size: int) -> bool:
    """Return whether a parameter is gathered from `size` ranks, and its gradient reduced, in a message of its own."""
    return parameter.nbytes >= _LARGE and parameter.is_even(size)


def by_dtype(parameters: Iterable[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Return parameters in lists of one dtype each."""
    groups: dict[torch.dtype, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.whole.dtype, []).append(parameter)
    return [*groups.values()]
