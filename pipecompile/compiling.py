"""`compile`: from a model and its options to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.batching.batch_dims import BatchDims
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.model_checks import validate_model
from pipecompile.batching.packed_split import Splits
from pipecompile.costs.user_costs import UserCosts
from pipecompile.distributed.data_parallel.continuing_pipeline import ContinuingPipeline
from pipecompile.distributed.data_parallel.lost_copies import check_lost_copies
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.rank_pipeline import RankPipeline
from pipecompile.errors import InputError
from pipecompile.graph.cut_constraints import Together
from pipecompile.ir import Program, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.meta_init import Init
from pipecompile.passes.checkpointing import Checkpoint
from pipecompile.passes.user_passes import UserPass
from pipecompile.pipeline import Pipeline
from pipecompile.runtime.cells.torch_compiled import check_backend
from pipecompile.runtime.malloc import keep_freed_memory
from pipecompile.runtime.partitions import CardPartition, parts_of_one_card
from pipecompile.schedules import Builder
from pipecompile.settings.batch_settings import example_inputs
from pipecompile.settings.keyword_names import with_suggestions
from pipecompile.settings.value_checks import refusal

__all__ = ["compile"]

_NOT_IN_OPTIONS = ("model", "n_stages", "example_args", "example_kwargs", "devices", "mesh")


@with_suggestions("pc.compile(model, 4, example_args=(x,))")
def compile(
    model: nn.Module,
    n_stages: int,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    n_microbatches: int | str | None = None,
    batch_dims: BatchDims | None = None,
    split: Splits | None = None,
    schedule: str | Path | Schedule | Program | Builder = "1f1b",
    devices: Sequence[str | torch.device | CardPartition] | None = None,
    mesh: DeviceMesh | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_reduction: str = "mean",
    partitioner: str = "auto",
    cost: str = "auto",
    costs: UserCosts | None = None,
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
    gap: float = 0.001,
    tied: str = "auto",
    checkpoint: Checkpoint = "never",
    restored: int = 1,
    offload: bool = False,
    reshard_after_forward: bool = False,
    gradient_sums: str = "eager",
    lost_copies: str = "raise",
    batch_norm: str | None = None,
    across_batch: str | None = None,
    has_aux: bool = False,
    passes: Sequence[UserPass | Callable[[Any], Any]] = (),
    compile_stages: bool | str = False,
    cuda_graphs: bool | str = False,
    check: bool | str = True,
    cache_size: int = 16,
    progress: bool = True,
    init: Init = None,
) -> Pipeline:
    """Cut `model` into `n_stages` balanced stages and return it as a pipeline.

    **Mini-batch**

    - `example_args`: positional arguments of a mini-batch, to compile at once. Without an example the first call supplies it.
    - `example_kwargs`: keyword arguments of the same mini-batch.
    - `n_microbatches`: number of micro-batches; default twice the number of devices, never more than the batch has samples.
      "auto" chooses the number with the shortest simulated step of the first mini-batch, together with schedule,
      recomputation and cut.
    - `batch_dims`: batch dimension of tensors, by parameter of forward, where it is not dimension 0: `{"src": 1, "mask": None}`.
      None stands for a tensor that all samples share, `list` for a list with an entry per sample, `"target"` for the target of
      `step`.
    - `split`: how an argument that is not cut by rows is divided, by parameter of forward: "offsets" for offsets of packed sequences
      (`cu_seqlens`) and "lengths" for their lengths, which keep sequences whole, with all tensors of tokens; or a function of
      (value, samples of each micro-batch) that returns a list with the value of each micro-batch.
    - `loss_fn`: `loss_fn(output)`, or `loss_fn(output, target)` if `step` gets a target. None: the model computes its loss itself.
    - `loss_reduction`: "mean" if the loss is a mean over the samples of a micro-batch, "sum" if it is a sum.
    - `has_aux`: True if `loss_fn` returns (loss, aux). `step` then returns (loss, list with the aux of each micro-batch), tensors
      detached.
    - `batch_norm`: "deferred" updates running statistics once a step, with those of the whole mini-batch; "each" once per
      micro-batch, as a loop over micro-batches does. None is "each", with a warning that counts such layers.
    - `across_batch`: where samples of a batch meet, in the loss or in the model (`x @ x.T`, a softmax over the batch). "each": only
      those of one micro-batch meet. "exact": all samples of the mini-batch meet, once, behind the last stage; the schedule must
      run all forwards before the first backward ("gpipe"). None is "each", with a warning that names the line. BatchNorm
      layers normalise each micro-batch in any case.

    **Cut**

    - `partitioner`: "dp" (dynamic programming), "ilp" (integer program), or "auto".
    - `time_limit`: seconds for the solver.
    - `gap`: fraction by which the slowest stage may be above the least there can be; the solver stops once that is proven.
    - `plan`: a plan, or the path of its file. Nothing is measured or solved; the plan must be of the same graph.
    - `tied`: "together" keeps all uses of a tied parameter in one stage; "apart" lets the uses be where they balance best, with a
      mirror on each further device; "auto" is "together" where that costs nothing.
    - `split_before`: names of modules that begin a stage.
    - `keep_together`: groups of modules. `["layer3", "layer4"]` keeps each of the two in one stage, `[["layer3", "layer4"]]` both in
      the same stage. A class stands for each of its modules.
    - `pin`: stages of modules: `{"head": 3}`.
    - `balance`: per stage, the number of the model's children in it.

    **Machine**

    - `devices`: one entry per pipeline device, repeats allowed. Default: one per stage, or half as many for a schedule in a V, on
      the GPUs of the machine, else on the CPU. With fewer devices than stages, the schedule deals several stages to each.
      `pc.partitions("cuda:0", 4)` are parts of one GPU.
    - `mesh`: the ranks of `torch.distributed` to run on, with a dimension "pp" of one rank per pipeline device. Further dimensions:
      "dp" for copies on parts of the batch, "dp_shard" for copies that shard parameters, "tp" for layers in parts. Default: all
      ranks, if there are several and no `devices` (docs/distributed.md).
    - `memory_limit`: bytes per device, one number for all or one per device.
    - `optimizer`: the optimizer whose state counts as memory: its name ("adam", "sgd" ...), its class, or the optimizer.
    - `speeds`: speed of each device, relative to the first.
    - `bandwidth`: bytes per second between devices, one number for all pairs or a row per device.
    - `cost`: "profile" measures the nodes, "analytic" computes their times, "auto" measures if the model has values.
    - `costs`: seconds of modules, forward and backward together: `{"layer3": 2e-3}`; or a function of (graph, inputs) that
      returns a NodeCost per node.

    **Run**

    - `schedule`: a name of the catalogue ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv" ...); "auto", the fastest in simulation,
      of the catalogue or of a search; a Schedule; the path of its .csv file; a function of (n_stages, n_microbatches, n_devices)
      that builds one; or a Program, or the path of its .txt file, which `step` runs as it is written.
    - `checkpoint`: forwards that keep only their inputs and run again before their backward: "never", "always", "except_last" (all
      micro-batches but the last), a flag per stage, or "auto", the stages that `memory_limit` demands.
    - `restored`: number of micro-batches that a waiting device may run again ahead of their gradients.
    - `offload`: True moves what forwards saved to the host until shortly before their backward, for as few micro-batches as
      `memory_limit` demands, and for all without a limit. Not with `checkpoint`.
    - `reshard_after_forward`: of parameters that copies of the pipeline shard (a mesh with "dp_shard"). False gathers all stages of a rank
      for the length of a step. True gathers each stage shortly before its actions and frees it after them, and sums its gradients after
      its last backward: with `memory_limit` as rarely as that allows, else between any two blocks of actions.
    - `gradient_sums`: "eager" adds up the gradients of a value in the order of eager autograd; a device sends one for each of its stages
      that read the value, unless eager adds these up first. "device" sends one per device, their sum: less is sent, and the sums of
      three gradients and more are rounded in another order.
    - `lost_copies`: what copies of the pipeline (a mesh with "dp") do when a rank of another copy fails or dies. "raise": all ranks raise.
      "continue": they go on without its copy. The call under way is undone and made again, on the samples of the copies that are
      left, with a LostCopyWarning; `pipe.copies` lists these. Ranks of the lost copy raise (docs/rank_failures.md).
    - `passes`: passes of yours among those that lower the schedule of a step: `[pc.UserPass(function, before="compute")]` maps a
      Schedule to a Schedule, with a later place, by default the last, a Program to a Program. The result of each is verified.
    - `dispatch`: "inline" runs all devices from one thread, "threads" each from its own, "auto" decides by the time of a cell, and
      stays inline where stages draw random numbers or run Python of the model.
    - `compile_stages`: True compiles every stage with `torch.compile`; a string names the backend.
    - `cuda_graphs`: True captures stages on GPUs, once per micro-batch in flight, and replays them: faster where launching takes
      longer than computing. Python of layers and of the loss runs only during capture. A stage that cannot be captured runs
      uncaptured, and a warning says why. "step" captures the whole step as one graph where all stages share one GPU, on one stream.
      A step that cannot be one graph runs as with True, and a warning says why.
    - `check`: True compares every new recording with the model itself, on the first micro-batch that it runs: outputs, loss,
      gradients, buffers and random draws. A difference raises MismatchError with the first line that differs. Recordings that differ
      from earlier ones in sizes alone are compared three times. The model must fit on one device; nothing of the comparison is
      left, but what its forward prints comes again. "every:N" repeats this every N mini-batches, False turns it off.
    - `cache_size`: number of recordings kept, one per kind of inputs (shapes without the batch, dtypes, plain values) and mode.
      The least recently used recording is dropped first.
    - `progress`: False shows no progress. True shows what takes long, on a terminal and in notebooks: recording, measuring, solving,
      searching, moving. Nothing is written to files and pipes.
    - `init`: initial values of a model built under `torch.device("meta")`; each process allocates what its stages use.
      "reset_parameters" (each module's method, or the model's `_init_weights(module)`), a function of a module, a path (safetensors,
      or a directory of `torch.distributed.checkpoint`), or a list of these, applied in turn. Without `init`, `load_state_dict`
      must supply the values.

    Parameters keep their identity and move in place, so an optimizer built before stays valid. On CPUs with glibc the
    process's heap is set to keep freed memory (`pipecompile/runtime/malloc.py`). Raises InputError, TraceError, PartitionError
    (InfeasibleError if nothing fits), ScheduleError or PlanError before anything moves.
    """
    keywords = {name: value for name, value in locals().items() if name not in _NOT_IN_OPTIONS}
    validate_model(model)
    args, kwargs = example_inputs(example_args, example_kwargs)
    ranks = RankMesh.of(mesh) if _is_on_ranks(mesh, devices) else None
    if ranks is None and cuda_graphs is False:
        devices = parts_of_one_card(devices)
    devices, shards = (devices, 1) if ranks is None else (ranks.devices, ranks.shards)
    with nullcontext() if ranks is None else ranks.as_devices():
        options = Options.of(model, n_stages, devices=devices, shards=shards, **keywords)
    if ranks is not None and options.cuda_graphs == "step":
        why = "the ranks of a step send each other values, in the middle of it"
        raise InputError('cuda_graphs="step" is given on ranks', why=why, hint="cuda_graphs=True")
    if options.compile_stages:
        check_backend(options.compile_stages)
    if options.lost_copies == "continue":
        check_lost_copies(model, ranks)
    pipe = Pipeline(model, options) if ranks is None else _on_ranks(model, options, ranks)
    if (args or kwargs) and not options.split and "microbatches" not in kwargs:
        flatten(model.forward, args, kwargs, options.batch_dims)  # raises before anything changes
    if any(device.type == "cpu" for device in options.devices):
        keep_freed_memory()  # the first change to the process: all arguments are checked
    if args or kwargs:
        pipe.prepare(*args, **kwargs)
    return pipe


def _is_on_ranks(mesh: Any, devices: Any) -> bool:
    """Return whether the pipeline runs on ranks of torch.distributed: those of `mesh`, or all if there are several and no `devices`.

    Raise InputError for a mesh of another type, and for a mesh with `devices`.
    """
    if mesh is None:
        return devices is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not isinstance(mesh, DeviceMesh):
        hint = 'mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))'
        raise refusal("mesh", mesh, "a torch.distributed.device_mesh.DeviceMesh", hint=hint)
    if devices is not None:
        why = "the mesh has a device per rank"
        raise InputError("both devices= and mesh= are set", why=why, hint="compile(..., mesh=mesh)")
    return True


def _on_ranks(model: nn.Module, options: Options, ranks: RankMesh) -> RankPipeline:
    """Return a pipeline on ranks. A rank has a single device, and so a single thread."""
    kind = ContinuingPipeline if options.lost_copies == "continue" else RankPipeline
    return kind(model, replace(options, dispatch="inline"), ranks)
