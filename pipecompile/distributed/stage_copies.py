"""Copies of stages on several ranks (Chimera): each copy has the parameters of the stage, and the rank of the first one is their home.

    rank 0    stage 0, home      copy of stage 1
    rank 1    copy of stage 0    stage 1, home           before a step: home ──values──▶ copy     after it: home ◀──gradients── copy

A copy is a tensor that several ranks use, as a tied weight is (`tied_copies.py`). What forwards leave behind is not exchanged while a
step runs, so that stages with state of their own are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pipecompile.distributed.loss_parameters import loss_parameters
from pipecompile.errors import InputError, ScheduleError
from pipecompile.graph.stages import Stage
from pipecompile.ir.directions import Placement
from pipecompile.runtime.cells.side_effects import SideEffects

__all__ = ["check_loss", "check_placed", "check_stateless"]

_HINT = 'schedule="1f1b" or another with one copy of each stage; or devices=[...], the stages in one process'


def check_stateless(stages: Sequence[Stage], n_copies: int) -> None:
    """Raise InputError for a stage whose forward leaves something behind: each of its copies would leave that of its micro-batches."""
    for stage in stages:
        effects = SideEffects.of(stage)
        if what := _left_behind(effects):
            raise InputError(
                f"{n_copies} copies of stage {stage.index} run on several ranks, and its forward {what}",
                why="each rank would have the state of its own micro-batches alone",
                hint=_HINT,
            )


def _left_behind(effects: SideEffects) -> str:
    """Return what a forward leaves behind, as a phrase; empty if it leaves nothing."""
    if effects.written_buffers:
        return "writes buffers, as BatchNorm does in training"
    if effects.runs_python:
        return "runs hooks or layers that are kept whole, which may leave something"
    return "leaves values on objects" if effects.places or effects.flagged else ""


def check_loss(loss: Callable[..., Any] | None, model: nn.Module, n_copies: int) -> None:
    """Raise InputError if a loss has parameters that are not the model's: it runs on several ranks, each with its micro-batches."""
    if loss_parameters(loss, model):
        raise InputError(
            f"the loss has parameters of its own, and runs on the {n_copies} ranks with a copy of the last stage",
            why="each of them would have a part of their gradients",
            hint=f"these parameters in the model's forward; or {_HINT}",
        )


def check_placed(own: Sequence[Placement], placements: Sequence[Placement]) -> None:
    """Raise ScheduleError unless the stages of a schedule, on `own`, and their copies have their parameters there: on `placements`."""
    if own[0] == placements[0] and set(own) <= set(placements):
        return
    raise ScheduleError(
        f"the schedule puts stages on ranks {' and '.join(map(str, own))}",
        why=f"their parameters are placed for {' and '.join(map(str, placements))}",
        hint="compile(..., schedule=...) with this schedule",
    )
