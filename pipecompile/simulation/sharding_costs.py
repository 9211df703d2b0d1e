"""Costs of parameters that copies of a pipeline shard: seconds of their collectives, and bytes of what is whole for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pipecompile.text.input_checks import amount, amounts

__all__ = ["ShardingCosts", "ShardingOptions", "make_sharding_costs"]


class ShardingOptions(TypedDict, total=False):
    """Keyword costs of actions on sharded parameters; documented at `simulate`."""

    unshard: float | Sequence[float]
    reduce_grad: float | Sequence[float]
    unsharded_bytes: float | Sequence[float]
    gradient_bytes: float | Sequence[float]
    shard_bandwidth: float


@dataclass(frozen=True, slots=True)
class ShardingCosts:
    """Checked costs per stage: seconds of UNSHARD (`unshard`) and of REDUCE_GRAD (`reduce`); bytes of the gathered parameters from
    UNSHARD to RESHARD (`unsharded`), and of the gradients from the first B or W to the end of REDUCE_GRAD (`gradients`).
    """

    unshard: tuple[float, ...]
    reduce: tuple[float, ...]
    unsharded: tuple[float, ...]
    gradients: tuple[float, ...]


def make_sharding_costs(n_stages: int, options: Mapping[str, Any]) -> ShardingCosts | None:
    """Return the checked costs of `ShardingOptions`; None if all are 0. Raise InputError if one is not a number per stage."""

    def stages(name: str) -> tuple[float, ...]:
        return amounts(name, options.get(name, 0.0), n_stages, "stage")

    bandwidth = amount("shard_bandwidth", options.get("shard_bandwidth", math.inf), zero=False, finite=False)
    unsharded, gradients = stages("unsharded_bytes"), stages("gradient_bytes")
    gathering, reducing = (
        tuple(seconds + size / bandwidth for seconds, size in zip(stages(name), sizes, strict=True))
        for name, sizes in (("unshard", unsharded), ("reduce_grad", gradients))
    )
    costs = ShardingCosts(gathering, reducing, unsharded, gradients)
    return costs if any(map(any, (gathering, reducing, unsharded, gradients))) else None
