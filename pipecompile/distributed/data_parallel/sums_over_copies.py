"""Several copies of a pipeline as one: sums of their metrics, and an evaluation in which no copy waits for another until the end.

copy 0    3 batches   loss, metrics ─┐
copy 1    2 batches   loss, metrics ─┴─► sums over all samples, on all ranks, in one exchange
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.distributed.agreement.copy_calls import rows_of_copies
from pipecompile.distributed.agreement.step_agreement import shared_from
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.driver.evaluation import RunningTotal
from pipecompile.errors import InputError
from pipecompile.text.shown_value import type_text
from pipecompile.torch_private import pytree

__all__ = ["sum_of_totals", "summed"]


def summed(values: Any, group: CollectiveGroup) -> Any:
    """Return numbers and tensors in nested containers, summed over the group. All copies have the same structure.

    Sums of numbers are exact as those of float64; a tensor keeps its dtype and device.
    """
    leaves, spec = flatten_containers(values)
    for leaf in leaves:
        if not isinstance(leaf, (bool, int, float, torch.Tensor)):
            raise InputError(
                f"{type_text(leaf)} cannot be summed over copies of the pipeline", hint="numbers and tensors"
            )
    rows_of_copies(group, "pipe.sum_over_copies")
    shapes = str([tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves])
    _check_alike(f"{spec} {shapes}", group)
    with torch.inference_mode(False), torch.no_grad():
        flat = [torch.as_tensor(leaf, device="cpu").detach().double().reshape(-1) for leaf in leaves]
        total = group.all_gather(torch.cat(flat)).sum(0) if flat else torch.zeros(0, device="cpu")
        parts = total.split_with_sizes([*map(len, flat)]) if flat else ()
        return pytree.tree_unflatten([_like(leaf, part) for leaf, part in zip(leaves, parts, strict=True)], spec)


def _check_alike(layout: str, group: CollectiveGroup) -> None:
    """Raise Disagreement, on all copies, if they have other values to sum."""
    texts = group.all_gather_text(layout)
    if len(set(texts)) > 1:
        raise Disagreement(
            "the copies of the pipeline have other values to sum",
            where="; ".join(f"copy {index}: {text:.200}" for index, text in enumerate(texts)),
            hint="the same names and shapes on all copies, zeros where a copy has counted nothing",
        )


def _like(leaf: Any, total: torch.Tensor) -> Any:
    if isinstance(leaf, torch.Tensor):
        return total.view(leaf.shape).to(leaf.device, torch.int64 if leaf.dtype == torch.bool else leaf.dtype)
    return float(total) if isinstance(leaf, float) else int(total)


def sum_of_totals(
    total: RunningTotal, group: CollectiveGroup | None, communicator: Communicator, last: int
) -> RunningTotal:
    """Return the running total of all copies, as the ranks of pipeline device `last` have it. A copy without a batch has no metrics."""
    names: Sequence[str] = [*total.metrics]
    if group is not None:
        rows_of_copies(group, "pipe.evaluate")
        texts = group.all_gather_text(msgspec.json.encode(names).decode())
        named: list[list[str]] = [msgspec.json.decode(text, type=list[str]) for text in texts]
        names = [*dict.fromkeys(chain.from_iterable(named))]
    own = [float(total.samples), float(total.loss), *(float(total.metrics.get(name, 0.0)) for name in names)]
    with torch.inference_mode(False):
        mine = torch.tensor(own, dtype=torch.float64, device="cpu")
        mine = mine if group is None else group.all_gather(mine).sum(0)
        samples, loss, *sums = shared_from(communicator, last, "sums of an evaluation", mine).tolist()
    communicator.flush()  # a script may end after this
    result = RunningTotal(is_mean=total.is_mean)
    result.samples, result.loss, result.metrics = int(samples), loss, dict(zip(names, sums, strict=True))
    return result
