"""The first message of a call that all copies of a pipeline make together: a row of one width for every call, so that other calls are told.

copy 0    pipe.step       [0, 6 samples, ...] ─┐
                                               ├─► rows of all copies; other calls raise on all
copy 1    pipe.evaluate   [1, 0, ...]         ─┘

Messages of different sizes in one group end the process inside gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.failures.failure_report import Disagreement

__all__ = ["COPY_CALLS", "equal_rows_of_copies", "other_modes", "rows_of_copies"]

COPY_CALLS = ("pipe.step", "pipe.evaluate", "pipe.sum_over_copies", "pipe.clip_grad_norm_")
"""The calls by which copies exchange something."""

_WIDTH = 10
"""Numbers that a call may add."""


def rows_of_copies(group: CollectiveGroup, call: str, numbers: Sequence[float] = ()) -> list[list[float]]:
    """Return the `numbers` of all copies. Raises Disagreement, on all copies, if one makes another call."""
    own = [*numbers, *[0.0] * (_WIDTH - len(numbers)), float(COPY_CALLS.index(call))]
    with torch.inference_mode(False):
        rows = group.all_gather(torch.tensor(own, dtype=torch.float64, device="cpu")).tolist()
    made = [COPY_CALLS[int(row[_WIDTH])] for row in rows]
    if len(set(made)) > 1:
        raise Disagreement(
            "the copies of the pipeline are asked for different things",
            where="; ".join(f"copy {index}: {name}" for index, name in enumerate(made)),
            why="all copies make the same calls in the same order: a loader of one copy may have fewer batches",
            hint="the same number of batches on all copies; a copy that has none left steps with x[:0], which adds nothing",
        )
    return [row[: len(numbers)] for row in rows]


def equal_rows_of_copies(group: CollectiveGroup, call: str, numbers: Sequence[float]) -> None:
    """Raise Disagreement, on all copies, unless all make this call with these numbers."""
    rows = rows_of_copies(group, call, numbers)
    if any(row != rows[0] for row in rows):
        raise Disagreement(
            f"the copies of the pipeline call {call} with other arguments",
            where="; ".join(
                f"copy {index}: {', '.join(f'{number:g}' for number in row)}" for index, row in enumerate(rows)
            ),
            why="all copies keep the same weights, so their gradients are scaled alike",
            hint="the same arguments on every rank",
        )


def other_modes(group: CollectiveGroup, modes: str) -> Disagreement:
    """Return the error that names the modes of each copy; all copies call this together."""
    texts = group.all_gather_text(modes)
    return Disagreement(
        "the copies of the pipeline run a step in other modes",
        where="; ".join(f"copy {index}: {text}" for index, text in enumerate(texts)),
        why="their gradients are added up, as those of one model",
        hint="train(), autocast, the scale of a GradScaler and load_state_dict alike on every rank",
    )
