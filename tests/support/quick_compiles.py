"""Compilations in less time: few tests need stable times or the shortest step, and thousands compile a model."""

from __future__ import annotations

import pytest

__all__ = ["compile_quickly", "measure_once", "search_briefly"]

SHARE = 20
"""Divisor of the effort of searches for cuts with a shorter step, which else take seconds for models of three stages."""


def compile_quickly(patch: pytest.MonkeyPatch) -> None:
    """Let `compile` measure once and search briefly from now on."""
    measure_once(patch)
    search_briefly(patch)


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """Let `compile` measure costs by one sweep from now on, and the slowdown of threads by one turn."""
    from pipecompile.costs.model_choice import node_costs
    from pipecompile.costs.profile import Repeats
    from pipecompile.planning import cost_table

    once = Repeats(least=1, most=1, budget=0.0)
    patch.setitem(node_costs.__kwdefaults__, "repeats", once)
    patch.setattr(cost_table, "REPEATS", once)


def search_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let `compile` search for cuts with a shorter step with a part of the effort from now on."""
    from pipecompile.partitioners import step_cuts

    for name in ("_WORK", "_ANNEALING", "_VISITS"):
        patch.setattr(step_cuts, name, getattr(step_cuts, name) // SHARE)
