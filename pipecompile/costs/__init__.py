"""What every node of a traced graph costs: forward and backward seconds, saved and made bytes, for one micro-batch.

real parameters and inputs  ──►  profile    measured where the model is
meta or fake, or a device   ──►  analytic   by arithmetic, for a device that need not be here
"""

from __future__ import annotations

from pipecompile.costs.analytic import NodeKernels, analytic_costs, node_work
from pipecompile.costs.devices import DEVICES, DeviceSpec, spec_for
from pipecompile.costs.model_choice import chosen_cost, node_costs
from pipecompile.costs.node_cost import CostError, CostProvider, NodeCost
from pipecompile.costs.profile import Repeats, profiled_costs

__all__ = [
    "DEVICES",
    "CostError",
    "CostProvider",
    "DeviceSpec",
    "NodeCost",
    "Repeats",
    "NodeKernels",
    "analytic_costs",
    "chosen_cost",
    "node_costs",
    "node_work",
    "profiled_costs",
    "spec_for",
]
