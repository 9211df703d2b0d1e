"""`compile`: from a model and what is wanted of it to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.batching.batch_dims import BatchDims, check_batch_dims
from pipecompile.batching.call_inputs import validate_model
from pipecompile.costs.links import checked
from pipecompile.costs.optimizer_bytes import optimizer_state
from pipecompile.costs.user_costs import Given
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_pipeline import RankPipeline
from pipecompile.graph.cut_constraints import Steering, Together
from pipecompile.ir import Schedule
from pipecompile.ir.plan import Plan
from pipecompile.options import Options, load_schedule, resolve_devices
from pipecompile.parameters.meta_init import Init, sources_of
from pipecompile.passes.checkpointing import Checkpoint
from pipecompile.pipeline import Pipeline
from pipecompile.runtime.malloc import keep_freed_memory
from pipecompile.schedules import Builder

__all__ = ["compile"]


def compile(
    model: nn.Module,
    n_stages: int,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    n_microbatches: int | str | None = None,
    batch_dims: BatchDims | None = None,
    schedule: str | Path | Schedule | Builder = "1f1b",
    devices: Sequence[str | torch.device] | None = None,
    mesh: DeviceMesh | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_reduction: str = "mean",
    partitioner: str = "auto",
    cost: str = "auto",
    costs: Given | None = None,
    memory_limit: float | Sequence[float] | None = None,
    optimizer: str | torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    speeds: Sequence[float] | None = None,
    bandwidth: float | Sequence[Sequence[float]] | None = None,
    split_before: Sequence[str] = (),
    keep_together: Sequence[Together] = (),
    pin: Mapping[str, int] | None = None,
    balance: Sequence[int] | None = None,
    plan: Plan | str | Path | None = None,
    dispatch: str = "auto",
    time_limit: float = 30.0,
    tied: str = "auto",
    checkpoint: Checkpoint = "never",
    restored: int = 1,
    batch_norm: str | None = None,
    has_aux: bool = False,
    compile_stages: bool | str = False,
    cuda_graphs: bool = False,
    cache_size: int = 16,
    init: Init = None,
) -> Pipeline:
    """Cut `model` into `n_stages` balanced stages and return it as a pipeline.

    **Arguments:**

    - `example_args`, `example_kwargs`: a mini-batch, to compile at once; without, the first call supplies it.
    - `n_microbatches`: default twice the number of devices, never more than the batch has samples; or "auto", the number that
      makes the shortest simulated step of the first mini-batch, chosen with schedule, recomputation and cut.
    - `batch_dims`: where a tensor's batch is not dimension 0, by parameter of forward: `{"src": 1, "mask": None}`; None for
      what all samples share. `"target"` is the target of `step`.
    - `schedule`: a name of the catalogue ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv" ...), "auto" for what is
      fastest in simulation, of the catalogue or searched for, a Schedule, its file (.csv), or a function of (n_stages, n_microbatches, n_devices) that builds one.
    - `devices`: one entry per pipeline device, repeats allowed; default one per stage, half as many for a schedule in a V,
      on the GPUs there are, else CPU. With fewer devices than stages, the schedule deals several stages to each.
    - `mesh`: the ranks of `torch.distributed` to run on, one per pipeline device, with a dimension "pp"; "dp" if there are copies on
      parts of the batch, "dp_shard" if these keep parameters in parts, "tp" if layers are in parts; default all ranks, if there are several and no `devices` (docs/distributed.md).
    - `loss_fn`: `loss_fn(output)`, or `loss_fn(output, target)` when `step` gets a target; a mean over the samples it
      sees, or a sum with `loss_reduction="sum"`. None: the model computes its loss itself. `has_aux`: it returns (loss,
      aux), and `step` returns (loss, a list with the aux of each micro-batch), tensors detached.
    - `partitioner`: "dp", "ilp" or "auto". `cost`: "profile", "analytic" or "auto". `time_limit`: seconds for the solver.
    - `costs`: seconds of modules, forward and backward, that you know better: `{"layer3": 2e-3}`; or a function of (graph,
      inputs) that gives a NodeCost per node.
    - `memory_limit`: bytes per device, one number or one per device. `optimizer`: whose state is counted with the parameters:
      "adam", "sgd" ... or the optimizer.
    - `speeds`: of the devices, relative to the first. `bandwidth`: bytes per second between devices, or of each pair.
    - `split_before`: modules that begin a stage; `keep_together`: modules, lists of them, or classes, each in one stage;
      `pin`: stages of modules, `{"head": 3}`; `balance`: how many of the model's children go into each stage.
    - `plan`: a plan, or its file: nothing is measured or solved. It must be of the same graph.
    - `dispatch`: "inline", "threads" or "auto".
    - `tied`: "together" keeps all uses of a tied parameter in one stage; "apart" lets them be where they balance best,
      with a mirror on each further device; "auto" is together where that costs nothing.
    - `checkpoint`: which forwards keep only their inputs and run again before their backward: "never", "always",
      "except_last" (all micro-batches but the last), a flag per stage, or "auto": those that `memory_limit` demands. `restored`: how many micro-batches a device may
      have run again ahead of their gradients, while it would else wait.
    - `batch_norm`: "deferred" updates running statistics once a step, to those of the whole mini-batch; "each", the default,
      once a micro-batch, as a loop over micro-batches does; without it, the number of such layers is told once.
    - `compile_stages`: True runs every stage through `torch.compile`; a string is the backend to use.
    - `cuda_graphs`: stages on GPUs are captured, once per micro-batch in flight, and replayed: for small cells, where launching takes
      longer than computing. Python of layers and of the loss runs only when they are captured. A stage that cannot be
      captured runs as it is, and a warning says why.
    - `cache_size`: how many recordings are kept, one for each kind of inputs (shapes without the batch, dtypes, plain
      values) and mode; the least recently used goes first.
    - `init`: what goes into a model built under `torch.device("meta")`, of which each process gives memory to what lives there:
      "reset_parameters" (each module's own, or the model's `_init_weights(module)`), a function of a module, a path (safetensors,
      or a directory of `torch.distributed.checkpoint`), or a list of these, done in turn. Without, `load_state_dict` has to.

    Parameters keep their identity and move in place, so an optimizer built before stays valid. On CPUs with glibc the
    process's heap is set to keep freed memory (`pipecompile/runtime/malloc.py`). Raises InputError,
    TraceError, PartitionError (InfeasibleError when nothing fits), ScheduleError or PlanError before anything moves.
    """
    asked, model = load_schedule(schedule), validate_model(model)
    ranks = RankMesh.of(mesh, devices)
    places = resolve_devices(devices, n_stages, asked) if ranks is None else ranks.devices
    steering = Steering.of(
        model, n_stages, split_before=split_before, keep_together=keep_together, pin=pin, balance=balance
    )
    options = Options(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        batch_dims=dict(batch_dims or {}),
        schedule=asked,
        devices=places,
        loss_fn=loss_fn,
        loss_reduction=loss_reduction,
        partitioner=partitioner,
        cost=cost,
        plan=Plan.load(plan) if isinstance(plan, (str, Path)) else plan,
        dispatch=dispatch if ranks is None else "inline",
        time_limit=time_limit,
        tied=tied,
        checkpoint=checkpoint if isinstance(checkpoint, str) else tuple(checkpoint),
        restored=restored,
        batch_norm=batch_norm,
        has_aux=has_aux,
        compile_stages=compile_stages,
        cuda_graphs=cuda_graphs,
        cache_size=cache_size,
        memory_limit=tuple(memory_limit) if isinstance(memory_limit, Sequence) else memory_limit,
        steering=steering,
        costs=costs,
        optimizer_state=optimizer_state(optimizer),
        speeds=None if speeds is None else tuple(speeds),
        bandwidth=checked(bandwidth, len(places)),
        init=sources_of(init, model),
    )
    check_batch_dims(options.batch_dims, model.forward, ("target",))
    pipe = Pipeline(model, options) if ranks is None else RankPipeline(model, options, ranks)
    if any(place.type == "cpu" for place in places):
        keep_freed_memory()
    if example_args or example_kwargs:
        pipe.prepare(pipe.flat(tuple(example_args), dict(example_kwargs or {})))
    return pipe
