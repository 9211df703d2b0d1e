"""Solver: cut a weighted graph into ordered stages so that the bottleneck, the load of the slowest device, is minimal.

Plain data in, plain data out; no torch. Open first: `problem.py` (the data and its JSON form), `objective.py` (what is
minimised), `solver.py` (the order of the methods). `verify.py` checks problems and partitions.

    problem ─▶ clusters ─▶ bounds/ + dp/ (orders, down-sets) + local search ─▶ ilp/ if a gap is left ─▶ Partition

`constraints.py` treats what the user forces on the cut, `machine.py` what devices can do, `incumbent.py` the state of a solve.
"""

from pipecompile.partitioners.incumbent import Progress as Progress
from pipecompile.partitioners.objective import StageLoad as StageLoad
from pipecompile.partitioners.objective import stage_loads as stage_loads
from pipecompile.partitioners.problem import Node as Node
from pipecompile.partitioners.problem import Problem as Problem
from pipecompile.partitioners.problem import Shared as Shared
from pipecompile.partitioners.problem import Tensor as Tensor
from pipecompile.partitioners.solver import Partition as Partition
from pipecompile.partitioners.solver import partition as partition
from pipecompile.partitioners.verify import verify_problem as verify_problem
