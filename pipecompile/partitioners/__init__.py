"""Cut a graph into ordered stages so that the slowest is as fast as can be. Plain data in, plain data out; no torch."""

from pipecompile.partitioners.constraints import Price as Price
from pipecompile.partitioners.incumbent import Progress as Progress
from pipecompile.partitioners.objective import StageLoad as StageLoad
from pipecompile.partitioners.objective import stage_loads as stage_loads
from pipecompile.partitioners.problem import Node as Node
from pipecompile.partitioners.problem import Problem as Problem
from pipecompile.partitioners.problem import Shared as Shared
from pipecompile.partitioners.problem import Tensor as Tensor
from pipecompile.partitioners.solver import Partition as Partition
from pipecompile.partitioners.solver import partition as partition
from pipecompile.partitioners.solver import price_of_steering as price_of_steering
