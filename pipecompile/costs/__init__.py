"""Costs: seconds of forward and backward, bytes saved and bytes returned, per node of a traced graph and micro-batch.

    real parameters and inputs    ──►  profile    measured where the model is
    meta or fake, or a device     ──►  analytic   computed for a device that need not be present

The result, `NodeCost` per node, is turned into a partition problem by `problem_builder.py`. Open `node_cost.py` first,
then `model_choice.py`. This folder is above graph and tracing, and below runtime.
"""

from __future__ import annotations

from pipecompile.costs.analytic import NodeKernels, analytic_costs, node_work
from pipecompile.costs.device_specs import DEVICES, DeviceSpec, spec_for
from pipecompile.costs.model_choice import node_costs, select_cost_model
from pipecompile.costs.node_cost import CostError, CostProvider, NodeCost
from pipecompile.costs.profile import Repeats, profiled_costs

__all__ = [
    "DEVICES",
    "CostError",
    "CostProvider",
    "DeviceSpec",
    "NodeCost",
    "NodeKernels",
    "Repeats",
    "analytic_costs",
    "node_costs",
    "node_work",
    "profiled_costs",
    "select_cost_model",
    "spec_for",
]
