"""The content of a recording that decides which messages the copies of a pipeline exchange, and in which order.

    program     3B0  3B1  1B0 ...            the places at which gradients are complete
    weights     stage 3: head.weight ...     the gradients in the message of each place
    norms       bn1, 2 calls ...             the statistics in the message at the end of a step
    loss        head.weight                  the weights of the last stage that are whole for longer

Two recordings of one model may have one program: batches that take other branches have the same actions on other weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import torch

from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorm

__all__ = ["exchange_order"]


def exchange_order(
    weights: Sequence[Iterable[int]],
    norms: Iterable[DeferredNorm],
    loss: Iterable[int],
    named: Iterable[tuple[str, torch.Tensor]],
) -> str:
    """Return a digest that is equal on two copies if they exchange the same gradients and statistics.

    `weights` has the ids of the weights of every stage, `loss` those of the loss, and `named` are the tensors of the model: ids differ
    between copies, names do not.
    """
    names = {id(tensor): name for name, tensor in named}
    stages = [_names_of(each, names) for each in weights]
    layers = [(_names_of(map(id, norm.layer.buffers()), names), len(norm.calls)) for norm in norms]
    return sha256(str([stages, layers, _names_of(loss, names)]).encode()).hexdigest()[:12]


def _names_of(ids: Iterable[int], names: Mapping[int, str]) -> list[str]:
    return sorted(names.get(one, "?") for one in ids)
