"""`plan=` beside the keywords that it excludes: nothing is measured, solved or chosen with a plan."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan

__all__ = ["check_plan"]


def check_plan(plan: Plan, steering: Any, costs: Any, checkpoint: Any) -> None:
    """Raise InputError for keywords that a solved plan excludes, and for a choice that this plan has not made."""
    what, why, hint = "", "nothing is solved with a plan", "one of the two"
    if steering:
        what = "plan is given together with constraints on the cut (split_before, keep_together, pin or balance)"
    elif costs is not None:
        what = "plan is given together with costs"
    elif checkpoint == "auto" and not plan.recompute:
        what = 'checkpoint="auto" is given together with a plan that says of no stage whether it recomputes'
        why = "nothing is chosen with a plan"
        hint = 'checkpoint="always", or a plan that was made with checkpoint="auto"'
    if what:
        raise InputError(what, why=why, hint=hint)
