"""Schedule compiler and graph partitioner for PyTorch: pipeline parallelism for models as their authors wrote them."""

from pipecompile.checks import verify as verify
from pipecompile.errors import InfeasibleError as InfeasibleError
from pipecompile.errors import InputError as InputError
from pipecompile.errors import PartitionError as PartitionError
from pipecompile.errors import PipecompileError as PipecompileError
from pipecompile.errors import PlanError as PlanError
from pipecompile.errors import RunError as RunError
from pipecompile.errors import ScheduleError as ScheduleError
from pipecompile.errors import TraceError as TraceError
from pipecompile.errors import VerifyError as VerifyError
from pipecompile.ir import Program as Program
from pipecompile.ir import Schedule as Schedule
from pipecompile.partitioners import Partition as Partition
from pipecompile.partitioners import Problem as Problem
from pipecompile.partitioners import partition as partition
from pipecompile.pipeline import Pipeline as Pipeline
from pipecompile.pipeline import compile as compile
from pipecompile.plan import Plan as Plan
from pipecompile.schedules import build_schedule as build_schedule
from pipecompile.simulator import simulate as simulate
from pipecompile.timeline import Timeline as Timeline
from pipecompile.tracing import trace as trace
