"""The cases that the ranks of the tests run. Every rank calls each case at the same time; its result is written as JSON.

There are four ranks. Ranks 0 and 1 are one pair, ranks 2 and 3 another; the pairs run different models at the same time.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.distributed.messages.clock_sync import read_clocks
from pipecompile.driver.backend import Backend
from pipecompile.errors import PlanError
from pipecompile.graph import backward_split as divided
from pipecompile.pipeline import Pipeline
from pipecompile.schedules import CATALOGUE, compared_names
from tests.distributed import torch_cases
from tests.distributed.case_models import (
    CONVOLUTIONAL,
    FULL,
    LANGUAGE,
    Example,
    Shift,
    codebook,
    distance,
    gpt2,
    mean_square,
    mixed,
    t5,
    towers,
    unet,
)
from tests.support.eager import looped, off

warnings.simplefilter("ignore")
divided.MIN_WEIGHT_FLOPS["cpu"] = 0.0  # every weight is worth a W
Backend.memories = lambda _, devices, placement: placement  # one process with a memory per device

COUNT = 5
TRAINING = compared_names()


def mesh_of(shape: Sequence[int], *names: str) -> DeviceMesh:
    """Return the mesh of this shape. Cases share it until a pipeline fails: each group has threads, which wake often."""
    key = str((shape, names))
    if key not in MESHES:
        MESHES[key] = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(*shape), mesh_dim_names=names)
    return MESHES[key]


def pair_mesh() -> DeviceMesh:
    return mesh_of((2, 2), "dp", "pp")


MESHES: dict[str, DeviceMesh] = {}
"""The meshes of the cases since the last failure."""


def merged(own: dict[str, torch.Tensor | None], group: dist.ProcessGroup | None = None) -> dict[str, Any] | None:
    """Return, on the first rank of a pipeline, the tensors of all its ranks. No name may be on two ranks."""
    size = dist.get_world_size(group)
    parts: list[Any] | None = [None] * size if dist.get_rank(group) == 0 else None
    dist.gather_object(own, parts, group=group, group_dst=0)
    if parts is None:
        return None
    assert sum(map(len, parts)) == len({name for part in parts for name in part})
    return {name: tensor for part in parts for name, tensor in part.items()}


def state_of(pipe: nn.Module) -> dict[str, torch.Tensor | None]:
    gradients = {f"{name}.grad": parameter.grad for name, parameter in pipe.named_parameters()}
    return gradients | dict(pipe.named_buffers()) | dict(pipe.named_parameters())


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the names of the values that differ in any bit."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return [name for name, value in left.items() if not _equal(value, right[name])]


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def compare(
    make: Callable[[], Example], mesh: DeviceMesh, schedules: Sequence[str], **options: Any
) -> dict[str, dict[str, Any]]:
    """Run a step of an optimizer under each schedule, on ranks and in one process; return losses and the names that differ."""
    torch.manual_seed(1)
    model, inputs = make()
    reference, eager, n_stages = *map(copy.deepcopy, (model, model)), stages_of(schedules[0], mesh.size())
    usual = {"n_microbatches": COUNT, "loss_fn": mean_square, "cost": "analytic", "tied": "apart", "time_limit": 0.5}
    options = usual | options | {"example_kwargs": inputs, "schedule": schedules[0]}
    pipe = pc.compile(model, n_stages, mesh=mesh, **options)
    steps = [(loss, merged(state_of(pipe), mesh.get_group())) for loss in _losses(pipe, inputs, schedules)]
    results = {schedule: {"loss": loss} for schedule, (loss, _) in zip(schedules, steps, strict=True)}
    if steps[0][1] is not None:
        options.pop("pin", None)  # the plan has it
        one_process = pc.compile(
            reference, n_stages, devices=["cpu"] * mesh.size(), plan=pipe.plan, dispatch="inline", **options
        )
        expected = zip(schedules, steps, _losses(one_process, inputs, schedules), strict=True)
        for schedule, (_, state), loss in expected:
            results[schedule] |= {
                "expected": loss,
                "differ": differing(state, state_of(one_process)),
                "cut": len(set(pipe.plan.stage_of.values())),
            }
        results[schedules[0]]["off"] = off(steps[0][1], looped(eager, inputs, COUNT, mean_square))
    return results


def _losses(pipe: Pipeline, inputs: dict[str, Any], schedules: Sequence[str]) -> Iterator[float]:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for schedule in schedules:
        optimizer.zero_grad()
        yield pipe.reschedule(schedule).step(**inputs).item()
        optimizer.step()


def stages_of(schedule: str, n_devices: int) -> int:
    chunks = CATALOGUE[schedule].chunks or (2 if schedule.startswith(("interleaved", "looped")) else 1)
    return chunks * n_devices


def by_pairs(make: Callable[[], Example], other: Callable[[], Example], *schedules: str, **options: Any) -> Any:
    return compare(make if dist.get_rank() < 2 else other, pair_mesh()["pp"], schedules, **options)


def by_all(make: Callable[[], Example], *schedules: str, **options: Any) -> Any:
    mesh = mesh_of((4,), "pp")
    return compare(make, mesh, schedules, **options)


OTHER_PAIR = "of the other pair"


def by_first_pair(case: Callable[[DeviceMesh], Any]) -> Any:
    """Run a case on ranks 0 and 1 alone: both pairs would do the same. It must make no process group: all ranks count them."""
    mesh = pair_mesh()["pp"]
    return case(mesh) if dist.get_rank() < 2 else OTHER_PAIR


def disagreeing() -> Any:
    """Return the two errors: rank 2 has one layer more; then rank 1 has another number of micro-batches."""
    rank, errors = dist.get_rank(), []
    x = torch.randn(8, 4)
    for layers, count in ((5 if rank == 2 else 4, 4), (4, 2 if rank == 1 else 4)):
        pipe = pc.compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]), 4, n_microbatches=count,
                          loss_fn=mean_square, cost="analytic")  # fmt: skip
        try:
            pipe.step(x)
        except PlanError as error:
            errors.append(str(error))
    return errors


def replicated() -> Any:
    """Run two steps of two copies of a pipeline, with 8 and 5 samples, and compare the added gradients to eager on all 13."""
    torch.manual_seed(3)
    model, x = (
        nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double(),
        torch.randn(13, 6).double(),
    )
    eager, y = copy.deepcopy(model), torch.randn(13, 6).double()
    if dist.get_rank() > 1:  # the first copy's weights overwrite these
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    mesh = pair_mesh()
    part = slice(0, 8) if mesh.get_local_rank("dp") == 0 else slice(8, 13)
    pipe = pc.compile(model, 2, mesh=mesh, loss_fn=distance, n_microbatches=3, cost="analytic")
    for _ in range(2):
        loss = pipe.step(x[part], target=y[part])
        whole = distance(eager(x), y)
        whole.backward()
    expected = dict(eager.named_parameters())
    worst = max(float((p.grad - expected[name].grad).abs().max()) for name, p in pipe.named_parameters())
    return {"loss": abs(loss.item() - whole.item()), "worst": worst, "reductions": pipe.replicas.reductions,
            "own": len(list(pipe.parameters()))}  # fmt: skip


def mesh_and_part() -> list[float]:
    """Step pipelines of a mesh and of a part of it in turns, and return the differences of their losses from eager."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    x, y, mesh = torch.randn(8, 6).double(), torch.randn(8, 6).double(), pair_mesh()
    expected = distance(layers(x), y).item()
    parts = {mesh: slice(0, 5) if mesh.get_local_rank("dp") == 0 else slice(5, 8), mesh["pp"]: slice(0, 8)}
    options: dict[str, Any] = {"loss_fn": distance, "n_microbatches": 2, "cost": "analytic"}
    pipes = [
        (pc.compile(copy.deepcopy(layers), 2, mesh=each, **options), part)
        for each, part in [*parts.items(), *reversed(parts.items())]
    ]
    return [
        abs(pipe.step(x[part], target=y[part]).item() - expected) for pipe, part in (*pipes, *pipes, *reversed(pipes))
    ]


def saved_and_loaded(directory: Path) -> Any:
    """Save on four ranks in four stages; load on two ranks and in one process, and return the losses of the next step."""
    torch.manual_seed(5)
    model, inputs = unet()
    options: dict[str, Any] = {"loss_fn": mean_square, "n_microbatches": 2, "cost": "analytic"}
    pipe = pc.compile(model, 4, example_kwargs=inputs, **options)
    list(_losses(pipe, inputs, ("1f1b",)))
    keys, full = sorted(pipe.state_dict()), pipe.full_state_dict()
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=directory)
    expected = pipe.step(**inputs).item()

    two = pc.compile(unet()[0], 2, mesh=pair_mesh()["pp"], example_kwargs=inputs, **options)
    state = {"model": two.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    two.load_state_dict(state["model"])
    plain = unet()[0]
    plain.load_state_dict(full)
    losses = [two.step(**inputs).item()]
    if dist.get_rank() == 0:
        alone = pc.compile(plain, 2, devices=["cpu"] * 2, example_kwargs=inputs, **options)
        losses.append(alone.step(**inputs).item())
    return {"keys": keys, "all": sorted(plain.state_dict()), "expected": expected, "losses": losses}


def predicted() -> Any:
    """Compare `pipe(x)` without gradients to eager, and return the error of a call with gradients."""
    torch.manual_seed(7)
    model, inputs = unet()
    eager = copy.deepcopy(model).eval()
    pipe = pc.compile(model.eval(), 4, n_microbatches=3, cost="analytic")
    with torch.no_grad():
        worst = float((pipe(**inputs) - eager(**inputs)).abs().max())
    try:
        pipe(**inputs)
    except pc.InputError as error:
        return {"worst": worst, "refused": str(error)}
    return {"worst": worst}


def elsewhere() -> str:
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.randn(8, 4)
    pipe = pc.compile(model, 4, mesh=pair_mesh()["pp"], schedule="interleaved", loss_fn=mean_square, cost="analytic")
    pipe.step(x)
    try:
        pipe.reschedule("zbv").step(x)
    except pc.ScheduleError as error:
        return str(error)
    return ""


def written_meanwhile() -> Any:
    """Return the warnings of a step in which a hook of a weight writes a buffer that the first stage reads."""
    model = nn.Sequential(nn.Linear(4, 4), Shift(), *[nn.Linear(4, 4) for _ in range(4)])
    model[0].weight.register_hook(lambda gradient: (model[1].shift.add_(gradient.abs().mean()), None)[1])
    pipe = pc.compile(model, 4, n_microbatches=4, loss_fn=mean_square, schedule="1f1b", cost="analytic",
                      pin={"0": 0, "1": 0})  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pc.RecordingWarning)
        pipe.step(torch.randn(8, 4))
    return [str(one.message) for one in caught]


def gathered() -> Any:
    """Gather a step of four ranks on one clock; then read clocks that are hours apart."""
    pipe = pc.compile(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), 4, n_microbatches=4, loss_fn=mean_square,
                      schedule="1f1b", cost="analytic")  # fmt: skip
    assert pipe.gathered() is None
    for _ in range(2):
        pipe.step(torch.randn(16, 64))
    own, whole, again = pipe.measured, pipe.gathered(), pipe.gathered()
    if dist.get_rank() == 0:
        pipe.dump(Path(os.environ["CASES_OUT"]) / "dump")
    pipe._communicator.begin()
    shift = 5000.0 * dist.get_rank()
    clocks = read_clocks(pipe._communicator, lambda: perf_counter() + shift)
    times = {(span.device, span.name): (span.start, span.end) for span in whole.spans}
    early = [pipe.clock_error + times[stage, f"{stage}F{m}"][0] - times[stage - 1, f"{stage - 1}F{m}"][1]
             for stage in range(1, 4) for m in range(4)]  # fmt: skip
    return {"own": len(own.spans), "whole": len(whole.spans), "kept": pipe.measured == again and len(again.spans),
            "early": min(early), "error": pipe.clock_error, "makespan": whole.makespan,
            "clocks": [(clock.ahead, clock.error) for clock in clocks]}  # fmt: skip


def fail() -> None:
    """Raise on rank 2, in its stage, at the second micro-batch. Never returns on any rank."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.randn(8, 4)
    pipe = pc.compile(
        model, 4, example_args=(x,), n_microbatches=4, loss_fn=mean_square, cost="analytic", balance=[1] * 4
    )
    calls = []

    def raising(*_: Any) -> None:
        calls.append(1)
        if dist.get_rank() == 2 and len(calls) == 2:
            raise ValueError("the data are wrong")

    model[2].register_forward_pre_hook(raising)
    pipe.step(x)


PLAIN, LOOPED, VEE = (
    [name for name in TRAINING if stages_of(name, 2) == count and (CATALOGUE[name].chunks == 2) == is_vee]
    for count, is_vee in ((2, False), (4, False), (4, True))
)


def some(schedules: list[str]) -> list[str]:
    """Return every second schedule, or with `--full` all."""
    return schedules if FULL else schedules[::2]


CASES: dict[str, Callable[[], Any]] = {
    "plain": lambda: by_pairs(unet, gpt2, *PLAIN),
    "looped": lambda: by_pairs(unet, LANGUAGE, *LOOPED),
    "vee": lambda: by_pairs(unet, LANGUAGE, *VEE),
    "deep plain": lambda: by_pairs(t5, CONVOLUTIONAL, *PLAIN),
    "deep looped": lambda: by_pairs(t5, CONVOLUTIONAL, *LOOPED),
    "deep vee": lambda: by_pairs(t5, CONVOLUTIONAL, *VEE),
    "mixed": lambda: by_first_pair(lambda mesh: compare(mixed, mesh, ("1f1b", "zb-h1"))),
    "kept whole": lambda: by_first_pair(lambda mesh: compare(codebook, mesh, ("1f1b", "gpipe"), checkpoint="always")),
    "tied on four": lambda: by_all(LANGUAGE, "gpipe", "zb-h1"),
    "skips on four": lambda: by_all(unet, "1f1b", "zb-h2"),
    "sums on four": lambda: by_all(t5, "interleaved", gradient_sums="device"),
    "towers on four": lambda: by_all(
        towers, "1f1b", "zb-h1", "eager-1f1b", pin={"towers.0": 0, "towers.1": 1, "join": 2, "head.2": 3}
    ),
    "always": lambda: by_pairs(unet, LANGUAGE, "1f1b", checkpoint="always", batch_norm="deferred"),
    "except_last": lambda: by_pairs(unet, LANGUAGE, "interleaved", checkpoint="except_last"),
    "disagreeing": disagreeing,
    "replicated": replicated,
    "mesh and part": mesh_and_part,
    "saved": lambda: saved_and_loaded(Path(os.environ["CASES_OUT"]) / "checkpoint"),
    "predicted": predicted,
    "elsewhere": elsewhere,
    "written meanwhile": written_meanwhile,
    "gathered": gathered,
    "stages under torch": lambda: by_first_pair(torch_cases.stages_under_torch),
    "refused": lambda: by_first_pair(torch_cases.refused),
    "torch alone": lambda: torch_cases.torch_alone(pair_mesh()["pp"]),
}
"""Cases by name, in the order in which ranks run them; `fail` runs last."""
