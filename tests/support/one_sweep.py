"""Costs measured by one sweep over the nodes: few tests need times that are stable, and many compile a model."""

from __future__ import annotations

import pytest

__all__ = ["measure_once"]


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """Let `compile` measure costs by one sweep from now on."""
    from pipecompile.costs.model_choice import node_costs
    from pipecompile.costs.profile import Repeats

    patch.setitem(node_costs.__kwdefaults__, "repeats", Repeats(least=1, most=1))
