"""The messages by which copies of a pipeline exchange gradients: their places in the row of a rank, and a digest of their order.

    row         3B0   3B1   SEND   1B0   1B1   SEND
                             └ the weights of stage 3      └ the weights of stage 1, and weights that both stages use

A message starts where its gradients are complete, after the SENDs that follow the backward: gradients of activations, for which other
ranks wait, go first. The digest covers all that decides which messages are exchanged, and in which order:

    program     3B0  3B1  1B0 ...            the places at which gradients are complete
    weights     stage 3: head.weight ...     the gradients in the message of each place
    norms       bn1, 2 calls ...             the statistics in the message at the end of a step
    loss        head.weight                  the weights of the last stage that are whole for longer

Two recordings of one model may have one program: batches that take other branches have the same actions on other weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import torch

from pipecompile.ir import Instruction, Kind, Op
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorm

__all__ = ["completed", "exchange_order"]


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


_ADDING = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def completed(row: Sequence[Instruction], weights: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
    """Return, by index in the row, the ids of the weights whose gradients are complete there; each weight is at one index.

    `weights` has the ids of the weights of every stage. The loss may use any weight, so if this row has the last stage, no
    gradient is complete before the last action of that stage.
    """
    actions = [(index, instruction.action) for index, instruction in enumerate(row)]
    last = {a.stage: index for index, a in actions if a is not None and a.kind in _ADDING}
    loss, ends = last.get(len(weights) - 1, 0), dict[int, int]()
    for stage, index in last.items():
        ends |= {weight: max(index, loss, ends.get(weight, 0)) for weight in weights[stage]}
    complete = defaultdict[int, set[int]](set)
    for weight, index in ends.items():
        complete[_after_sends(row, index)].add(weight)
    return {index: frozenset(complete[index]) for index in sorted(complete)}


def _after_sends(row: Sequence[Instruction], index: int) -> int:
    """Return the index of the last SEND between the action at `index` and the next action; `index` if there is none."""
    following = range(index + 1, len(row))
    end = next((i for i in following if row[i].op is Op.COMPUTE), len(row))
    return max((i for i in range(index + 1, end) if row[i].op is Op.SEND), default=index)
