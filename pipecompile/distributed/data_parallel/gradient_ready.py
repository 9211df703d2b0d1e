"""The places in the row of a rank after which gradients are complete: no later instruction adds to them.

    row     3B0   3B1   SEND   1B0   1B1   SEND
                         └ the weights of stage 3      └ the weights of stage 1, and weights that both stages use

The reduction of complete gradients starts after the SENDs that follow the backward, so gradients of activations, for which other
ranks wait, go first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipecompile.ir import Instruction, Kind, Op

__all__ = ["completed"]

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
