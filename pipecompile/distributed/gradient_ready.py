"""When the gradients of a rank are complete: after which instruction of its row nothing more is added to which weights.

    row     3B0   3B1   SEND   1B0   1B1   SEND
                         └ the weights of stage 3      └ those of stage 1, and those that both stages use

Gradients that other ranks wait for go first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipecompile.ir import Instruction, Kind, Op

__all__ = ["completed"]

_ADDING = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def completed(row: Sequence[Instruction], weights: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
    """By place in the row; a weight, known by its number, is at one place. `weights` are those of all stages. The loss may use
    any weight, so none is complete before the last stage is over, if that is in this row.
    """
    actions = [(index, instruction.action) for index, instruction in enumerate(row)]
    last = {a.stage: index for index, a in actions if a is not None and a.kind in _ADDING}
    loss, ends = last.get(len(weights) - 1, 0), dict[int, int]()
    for stage, index in last.items():
        ends |= {weight: max(index, loss, ends.get(weight, 0)) for weight in weights[stage]}
    found = defaultdict[int, set[int]](set)
    for weight, index in ends.items():
        found[_sent(row, index)].add(weight)
    return {index: frozenset(found[index]) for index in sorted(found)}


def _sent(row: Sequence[Instruction], index: int) -> int:
    """The last SEND between the action at this place and the next one; the place itself, if there is none."""
    following = range(index + 1, len(row))
    end = next((i for i in following if row[i].op is Op.COMPUTE), len(row))
    return max((i for i in range(index + 1, end) if row[i].op is Op.SEND), default=index)
