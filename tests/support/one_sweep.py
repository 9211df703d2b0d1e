"""Costs measured by one sweep over the nodes: few tests need times that are stable, and many compile a model."""

from __future__ import annotations

import pytest

__all__ = ["measure_once"]


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """Let `compile` measure costs by one sweep from now on, and the slowdown of threads by one turn."""
    from pipecompile.costs.model_choice import node_costs
    from pipecompile.costs.profile import Repeats
    from pipecompile.planning import cost_table

    once = Repeats(least=1, most=1, budget=0.0)
    patch.setitem(node_costs.__kwdefaults__, "repeats", once)
    patch.setattr(cost_table, "REPEATS", once)
