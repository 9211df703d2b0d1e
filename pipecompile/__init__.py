"""Schedule compiler and graph partitioner for PyTorch: pipeline parallelism for models as their authors wrote them.

The names below are the public surface. They are imported when first used, so that `pipecompile --help` does not wait
for torch.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pipecompile.batching.microbatch_list import Microbatch as Microbatch
    from pipecompile.compiling import compile as compile
    from pipecompile.costs import CostError as CostError
    from pipecompile.errors import InfeasibleError as InfeasibleError
    from pipecompile.errors import InputError as InputError
    from pipecompile.errors import LostCopyWarning as LostCopyWarning
    from pipecompile.errors import MismatchError as MismatchError
    from pipecompile.errors import PartitionError as PartitionError
    from pipecompile.errors import PartitionWarning as PartitionWarning
    from pipecompile.errors import PipecompileError as PipecompileError
    from pipecompile.errors import PlanError as PlanError
    from pipecompile.errors import RecordingWarning as RecordingWarning
    from pipecompile.errors import RunError as RunError
    from pipecompile.errors import ScheduleError as ScheduleError
    from pipecompile.errors import TraceError as TraceError
    from pipecompile.errors import VerifyError as VerifyError
    from pipecompile.graph.explanation import Explanation as Explanation
    from pipecompile.graph.explanation import explain as explain
    from pipecompile.interchange import OrderReport as OrderReport
    from pipecompile.interchange import PipelineOrder as PipelineOrder
    from pipecompile.interchange import check_order as check_order
    from pipecompile.interchange import read_schedule as read_schedule
    from pipecompile.interchange import repair_order as repair_order
    from pipecompile.ir import Program as Program
    from pipecompile.ir import Schedule as Schedule
    from pipecompile.ir.candidates import Candidate as Candidate
    from pipecompile.ir.candidates import Considered as Considered
    from pipecompile.ir.periodic import PeriodicSchedule as PeriodicSchedule
    from pipecompile.ir.periodic_program import PeriodicProgram as PeriodicProgram
    from pipecompile.ir.plan import Plan as Plan
    from pipecompile.ir.timeline import Timeline as Timeline
    from pipecompile.layouts.estimate import plan_for as plan_for
    from pipecompile.layouts.hardware import Cluster as Cluster
    from pipecompile.layouts.layout_table import ClusterPlan as ClusterPlan
    from pipecompile.layouts.layout_table import LayoutRow as LayoutRow
    from pipecompile.parameters.checkpoint_files import latest_checkpoint as latest_checkpoint
    from pipecompile.parameters.checkpoint_saving import save_checkpoint as save_checkpoint
    from pipecompile.partitioners import Partition as Partition
    from pipecompile.partitioners import Problem as Problem
    from pipecompile.partitioners import partition as partition
    from pipecompile.passes.offloading import insert_offload as insert_offload
    from pipecompile.passes.offloading import offload_to_fit as offload_to_fit
    from pipecompile.passes.overlapping import insert_overlap as insert_overlap
    from pipecompile.passes.periodic_lowering import lower_periodic as lower_periodic
    from pipecompile.passes.periodic_lowering import unroll as unroll
    from pipecompile.passes.sharding import insert_sharding as insert_sharding
    from pipecompile.passes.sharding import shard_to_fit as shard_to_fit
    from pipecompile.passes.user_passes import UserPass as UserPass
    from pipecompile.pipeline import Pipeline as Pipeline
    from pipecompile.runtime.launch_timeline import simulate_launches as simulate_launches
    from pipecompile.runtime.partitions import CardPartition as CardPartition
    from pipecompile.runtime.partitions import partitions as partitions
    from pipecompile.schedules import auto_schedule as auto_schedule
    from pipecompile.schedules import build_schedule as build_schedule
    from pipecompile.schedules import register_schedule as register_schedule
    from pipecompile.schedules.periods import build_periodic as build_periodic
    from pipecompile.schedules.periods import find_period as find_period
    from pipecompile.show.chakra import save_chakra as save_chakra
    from pipecompile.simulation.advice import Advice as Advice
    from pipecompile.simulation.advice import advise as advise
    from pipecompile.simulation.calibration import calibrate as calibrate
    from pipecompile.simulation.forecast import StepForecast as StepForecast
    from pipecompile.simulation.forecast import forecast as forecast
    from pipecompile.simulation.simulator import simulate as simulate
    from pipecompile.simulation.steady_state import SteadyState as SteadyState
    from pipecompile.simulation.steady_state import simulate_periodic as simulate_periodic
    from pipecompile.tracing import trace as trace
    from pipecompile.tracing.recompute_flag import is_recomputing as is_recomputing
    from pipecompile.verifiers import verify as verify

_HOMES = {
    "batching.microbatch_list": ("Microbatch",),
    "parameters.checkpoint_files": ("latest_checkpoint",),
    "parameters.checkpoint_saving": ("save_checkpoint",),
    "verifiers": ("verify",),
    "compiling": ("compile",),
    "ir.candidates": ("Candidate", "Considered"),
    "costs": ("CostError",),
    "errors": (
        "InfeasibleError",
        "InputError",
        "LostCopyWarning",
        "MismatchError",
        "PartitionError",
        "PartitionWarning",
        "PipecompileError",
        "PlanError",
        "RecordingWarning",
        "RunError",
        "ScheduleError",
        "TraceError",
        "VerifyError",
    ),
    "graph.explanation": ("Explanation", "explain"),
    "interchange": ("OrderReport", "PipelineOrder", "check_order", "read_schedule", "repair_order"),
    "ir": ("Program", "Schedule"),
    "ir.periodic": ("PeriodicSchedule",),
    "ir.periodic_program": ("PeriodicProgram",),
    "partitioners": ("Partition", "Problem", "partition"),
    "layouts.estimate": ("plan_for",),
    "layouts.hardware": ("Cluster",),
    "layouts.layout_table": ("ClusterPlan", "LayoutRow"),
    "passes.offloading": ("insert_offload", "offload_to_fit"),
    "passes.overlapping": ("insert_overlap",),
    "passes.sharding": ("insert_sharding", "shard_to_fit"),
    "passes.periodic_lowering": ("lower_periodic", "unroll"),
    "passes.user_passes": ("UserPass",),
    "pipeline": ("Pipeline",),
    "ir.plan": ("Plan",),
    "tracing.recompute_flag": ("is_recomputing",),
    "runtime.launch_timeline": ("simulate_launches",),
    "runtime.partitions": ("CardPartition", "partitions"),
    "schedules": ("auto_schedule", "build_schedule", "register_schedule"),
    "schedules.periods": ("build_periodic", "find_period"),
    "show.chakra": ("save_chakra",),
    "simulation.advice": ("Advice", "advise"),
    "simulation.calibration": ("calibrate",),
    "simulation.forecast": ("StepForecast", "forecast"),
    "simulation.simulator": ("simulate",),
    "simulation.steady_state": ("SteadyState", "simulate_periodic"),
    "ir.timeline": ("Timeline",),
    "tracing": ("trace",),
}

_PICTURED = {
    "Plan",
    "Program",
    "Schedule",
    "Timeline",
    "auto_schedule",
    "build_schedule",
    "compile",
    "simulate",
    "simulate_launches",
}
"""Names whose results have a picture in a notebook: `show` registers the pictures when it is imported."""

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605 static checkers read the imports above


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            if name in _PICTURED:
                _imported("show.notebook")
            return getattr(_imported(home), name)
    raise AttributeError(f"module 'pipecompile' has no attribute {name!r}{_meant(name)}")


@cache
def _meant(name: str) -> str:
    """Return a question with the public name that is meant, "" if none is like it."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), {each.lower(): each for each in __all__}, 1)
    return f". Did you mean {next(each for each in __all__ if each.lower() == close[0])!r}?" if close else ""


def _imported(home: str) -> ModuleType:
    """Return a module of the package. Its first import leaves Python's generator of random numbers as it is: rich draws from it.

    Nothing is collected meanwhile: nearly all of the million objects of an import stay, and to look through them takes a fifth of its time.
    """
    import gc
    import random
    import sys

    name = f"pipecompile.{home}"
    if name in sys.modules:
        return import_module(name)
    state, collects = random.getstate(), gc.isenabled()
    gc.disable()
    try:
        if "pipecompile.text.log_switches" not in sys.modules:
            import_module("pipecompile.text.log_switches").set_levels()
        return import_module(name)
    finally:
        random.setstate(state)
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return [*globals(), *__all__]
