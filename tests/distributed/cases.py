"""What the ranks of the tests do. Each case is called on every rank at the same time and returns what is to be JSON.

Ranks 0 and 1 are one pair, 2 and 3 another; pairs run different models at the same time.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pipecompile as pc
from pipecompile.distributed.clock_sync import read_clocks
from pipecompile.driver.specialization import Build
from pipecompile.errors import PlanError
from pipecompile.pipeline import Pipeline
from pipecompile.runtime.cells import split_backward as divided
from pipecompile.schedules import CATALOGUE
from tests.distributed import torch_cases
from tests.support.eager import looped, off
from tests.support.models import ZOO, UNet, deterministic

warnings.simplefilter("ignore")
divided.WORTH["cpu"] = 0.0  # every weight is worth a W
Build.memories = property(lambda build: build.plan.placement)  # one process with a memory per device

COUNT, SAMPLES = 5, 13
FULL = "CASES_FULL" in os.environ
TRAINING = [name for name in CATALOGUE if name != "forward"]

Example = tuple[nn.Module, dict[str, Any]]


def mean_square(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def resnet18() -> Example:
    make, size = ZOO["resnet18"]
    return deterministic(make()), {"x": torch.randn(SAMPLES, 3, size, size)}


def unet() -> Example:
    return UNet(depth=2, width=4), {"x": torch.randn(SAMPLES, 3, 8, 8)}


def gpt2() -> Example:
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(40, (SAMPLES, 8))}


def t5() -> Example:
    """Its word embeddings are those of the encoder, of the decoder, and the head; the encoder's output goes to every decoder layer."""
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    inputs = {name: torch.randint(40, (SAMPLES, width)) for name, width in (("input_ids", 8), ("labels", 6))}
    return transformers.T5ForConditionalGeneration(config), inputs


class Mixed(nn.Module):
    """Hands on integers, a transposed tensor, one without a gradient, and a number that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        turned, shifted = self.first(x).t(), index + 1
        constant, chosen = torch.relu(x), x[index > 1]
        y = self.second(turned.t()) + turned.t() * shifted[:, None]
        return self.third(y) * constant.sum() + turned.t() * (shifted % 2)[:, None] + chosen.sum()


def mixed() -> Example:
    return Mixed(), {"x": torch.randn(SAMPLES, 6), "index": torch.arange(SAMPLES) % 4}


def pair_mesh() -> DeviceMesh:
    return _MESHES.setdefault("pairs", DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "pp")))


_MESHES: dict[str, DeviceMesh] = {}


def merged(own: dict[str, torch.Tensor | None], group: dist.ProcessGroup | None = None) -> dict[str, Any] | None:
    """What all ranks of a pipeline have, on its first rank. A name on two ranks is a mistake."""
    size = dist.get_world_size(group)
    found: list[Any] | None = [None] * size if dist.get_rank(group) == 0 else None
    dist.gather_object(own, found, group=group, group_dst=0)
    if found is None:
        return None
    assert sum(map(len, found)) == len({name for part in found for name in part})
    return {name: tensor for part in found for name, tensor in part.items()}


def state_of(pipe: nn.Module) -> dict[str, torch.Tensor | None]:
    gradients = {f"{name}.grad": parameter.grad for name, parameter in pipe.named_parameters()}
    return gradients | dict(pipe.named_buffers()) | dict(pipe.named_parameters())


def alike(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The names that differ in any bit."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return [name for name, value in left.items() if not _equal(value, right[name])]


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def compare(
    make: Callable[[], Example], mesh: DeviceMesh, schedules: Sequence[str], **options: Any
) -> dict[str, dict[str, Any]]:
    """A step of an optimizer under each schedule in turn, on ranks and in one process; the losses, and what differs."""
    torch.manual_seed(1)
    model, inputs = make()
    reference, eager, n_stages = *map(copy.deepcopy, (model, model)), stages_of(schedules[0], mesh.size())
    options = {"n_microbatches": COUNT, "loss_fn": mean_square, "cost": "analytic", "tied": "apart"} | options
    options |= {"example_kwargs": inputs, "schedule": schedules[0]}
    pipe = pc.compile(model, n_stages, mesh=mesh, **options)
    steps = [(loss, merged(state_of(pipe), mesh.get_group())) for loss in _losses(pipe, inputs, schedules)]
    results = {schedule: {"loss": loss} for schedule, (loss, _) in zip(schedules, steps, strict=True)}
    if steps[0][1] is not None:
        alone = pc.compile(
            reference, n_stages, devices=["cpu"] * mesh.size(), plan=pipe.plan, dispatch="inline", **options
        )
        expected = zip(schedules, steps, _losses(alone, inputs, schedules), strict=True)
        for schedule, (_, found), loss in expected:
            results[schedule] |= {
                "expected": loss,
                "differ": alike(found, state_of(alone)),
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
    mesh = _MESHES.setdefault("all", init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)))
    return compare(make, mesh, schedules, **options)


def disagreeing() -> Any:
    """Rank 2 has one layer more; then rank 1 another number of micro-batches; then all the same."""
    rank, said = dist.get_rank(), []
    x = torch.randn(8, 4)
    for layers, count in ((5 if rank == 2 else 4, 4), (4, 2 if rank == 1 else 4)):
        pipe = pc.compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]), 4, n_microbatches=count,
                          loss_fn=mean_square, cost="analytic")  # fmt: skip
        try:
            pipe.step(x)
        except PlanError as error:
            said.append(str(error))
    return said


def replicated() -> Any:
    """2 x 2: each pipeline has its part of the batch, of 8 and of 5 samples; one step, added to gradients that are there."""
    torch.manual_seed(3)
    model, x = (
        nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double(),
        torch.randn(13, 6).double(),
    )
    eager, y = copy.deepcopy(model), torch.randn(13, 6).double()
    if dist.get_rank() > 1:  # the second copy begins with other weights
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


def saved_and_loaded(directory: Path) -> Any:
    """Saved by four ranks in four stages, loaded by a pair in two, and by one process: the next loss is the same."""
    torch.manual_seed(5)
    model, inputs = unet()
    options: dict[str, Any] = {"loss_fn": mean_square, "n_microbatches": 2, "cost": "analytic"}
    pipe = pc.compile(model, 4, example_kwargs=inputs, **options)
    list(_losses(pipe, inputs, ("1f1b",)))
    keys, full = sorted(pipe.state_dict()), pipe.full_state_dict()
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=directory)
    expected = pipe.step(**inputs).item()

    two = pc.compile(UNet(depth=2, width=4), 2, mesh=pair_mesh()["pp"], example_kwargs=inputs, **options)
    state = {"model": two.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    two.load_state_dict(state["model"])
    plain = UNet(depth=2, width=4)
    plain.load_state_dict(full)
    alone = pc.compile(plain, 2, devices=["cpu"] * 2, example_kwargs=inputs, **options)
    losses = [two.step(**inputs).item(), alone.step(**inputs).item()]
    return {"keys": keys, "all": sorted(plain.state_dict()), "expected": expected, "losses": losses}


def predicted() -> Any:
    """`pipe(x)` without gradients gives the output on every rank; with them it is refused."""
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


def gathered() -> Any:
    """A step of four ranks on one clock; and clocks that are hours apart."""
    pipe = pc.compile(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), 4, n_microbatches=4, loss_fn=mean_square,
                      schedule="1f1b", cost="analytic")  # fmt: skip
    assert pipe.gathered() is None
    for _ in range(2):
        pipe.step(torch.randn(16, 64))
    own, whole, again = pipe.measured, pipe.gathered(), pipe.gathered()
    if dist.get_rank() == 0:
        pipe.dump(Path(os.environ["CASES_OUT"]) / "dump")
    pipe.communicator.begin()
    shift = 5000.0 * dist.get_rank()
    clocks = read_clocks(pipe.communicator, lambda: perf_counter() + shift)
    begun = {(span.device, span.name): (span.start, span.end) for span in whole.spans}
    early = [pipe.clock_error + begun[stage, f"{stage}F{m}"][0] - begun[stage - 1, f"{stage - 1}F{m}"][1]
             for stage in range(1, 4) for m in range(4)]  # fmt: skip
    return {"own": len(own.spans), "whole": len(whole.spans), "kept": pipe.measured == again and len(again.spans),
            "early": min(early), "error": pipe.clock_error, "makespan": whole.makespan,
            "clocks": [(clock.ahead, clock.error) for clock in clocks]}  # fmt: skip


def fail() -> None:
    """Only rank 2 raises, in its stage, at the second micro-batch. Never returns."""
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

CASES: dict[str, Callable[[], Any]] = {
    "plain": lambda: by_pairs(unet, gpt2, *PLAIN),
    "looped": lambda: by_pairs(unet, gpt2, *LOOPED),
    "vee": lambda: by_pairs(unet, gpt2, *VEE),
    "deep plain": lambda: by_pairs(t5, resnet18, *PLAIN),
    "deep looped": lambda: by_pairs(t5, resnet18 if FULL else mixed, *LOOPED),
    "deep vee": lambda: by_pairs(t5, resnet18 if FULL else mixed, *VEE),
    "mixed": lambda: by_pairs(mixed, mixed, "1f1b", "zb-h1"),
    "tied on four": lambda: by_all(gpt2, "gpipe", "zb-h1"),
    "skips on four": lambda: by_all(unet, "1f1b", "zb-h2"),
    "always": lambda: by_pairs(unet, gpt2, "1f1b", checkpoint="always", batch_norm="deferred"),
    "except_last": lambda: by_pairs(unet, gpt2, "interleaved", checkpoint="except_last"),
    "disagreeing": disagreeing,
    "replicated": replicated,
    "saved": lambda: saved_and_loaded(Path(os.environ["CASES_OUT"]) / "checkpoint"),
    "predicted": predicted,
    "elsewhere": elsewhere,
    "gathered": gathered,
    "bridged": lambda: torch_cases.bridged(pair_mesh()["pp"]),
    "refused": lambda: torch_cases.refused(pair_mesh()["pp"]),
    "theirs": lambda: torch_cases.theirs(pair_mesh()["pp"]),
}
"""In this order; `fail` comes after them."""
