"""Cases of models built on `meta`, and of checkpoints that are loaded in another layout. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pipecompile as pc
from pipecompile.distributed.rank_pipeline import RankPipeline
from pipecompile.pipeline import Pipeline
from tests.distributed.case_models import LANGUAGE, SAMPLES, Example, mean_square, unet
from tests.distributed.cases import differing, merged, pair_mesh, state_of

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS: dict[str, Any] = {
    "loss_fn": mean_square, "n_microbatches": 4, "cost": "analytic", "tied": "apart", "time_limit": 0.5,
}  # fmt: skip


def llama() -> Example:
    """Return a LLaMA, whose constructor computes a buffer that `state_dict` does not have."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(40, (SAMPLES, 8))}


class Turned(nn.Module):
    """Layers, and a buffer outside `state_dict` that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.register_buffer("frequencies", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.frequencies
        return x


def turned() -> Example:
    return Turned(), {"x": torch.randn(SAMPLES, 6)}


def on_meta(make: Callable[[], Example]) -> Example:
    torch.manual_seed(1)
    inputs = make()[1]
    with torch.device("meta"):
        return make()[0], inputs


# -- built on meta --------------------------------------------------------------------------------------------------


def initialised(make: Callable[[], Example]) -> Any:
    """Initialise a model from `meta` on four ranks, each its own stage, and in one process; compare weights and steps.

    Then load a checkpoint of it on two ranks. `copies` counts the numbers of tied tensors on ranks that are not their home.
    """
    model, inputs = on_meta(make)
    torch.manual_seed(dist.get_rank())
    pipe = pc.compile(model, 4, example_kwargs=inputs, init="reset_parameters", **OPTIONS)
    losses = [step(pipe, adam(pipe), inputs) for _ in range(2)]
    state = merged(with_values(pipe))
    here = {id(value) for value in (*pipe.parameters(), *pipe.buffers())}
    real = [value for value in (*model.parameters(), *model.buffers()) if not value.is_meta]
    copies = sum(value.numel() for value in real if id(value) not in here)
    result: dict[str, Any] = {"losses": losses, "copies": copies, "real": sum(value.numel() for value in real)}
    if state is not None:
        result |= _in_one_process(make, pipe, inputs, state)
    result |= {"again": _loaded_by_a_pair(make, pipe, inputs), "next": pipe.step(**inputs).item()}
    return result | {"output": predicted(pipe, inputs)}


def predicted(pipe: Pipeline, inputs: dict[str, Any]) -> float:
    """Return the sum of the outputs in eval mode. The model is recorded again, now that a part of it has values."""
    with torch.no_grad():
        output = pipe.eval()(**inputs)
        return getattr(output, "logits", output).double().sum().item()


def _in_one_process(
    make: Callable[[], Example], pipe: Pipeline, inputs: dict[str, Any], state: dict[str, Any]
) -> dict[str, Any]:
    whole, _ = on_meta(make)
    torch.manual_seed(0)
    alone = pc.compile(whole, 4, devices=["cpu"] * 4, plan=pipe.plan, example_kwargs=inputs, dispatch="inline",
                       init="reset_parameters", **OPTIONS)  # fmt: skip
    losses = [step(alone, adam(alone), inputs) for _ in range(2)]
    differ, numbers = differing(state, with_values(alone)), sum(value.numel() for value in state.values())
    alone.step(**inputs)
    return {"expected": losses, "differ": differ, "numbers": numbers, "expected output": predicted(alone, inputs)}


def _loaded_by_a_pair(make: Callable[[], Example], pipe: Pipeline, inputs: dict[str, Any]) -> float:
    directory = Path(os.environ["CASES_OUT"]) / f"initialised-{make.__name__}"
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=directory)
    model, _ = on_meta(make)
    two = pc.compile(
        model, 2, mesh=pair_mesh()["pp"], example_kwargs=inputs, init=["reset_parameters", directory], **OPTIONS
    )
    return two.step(**inputs).item()


def copied() -> Any:
    """Initialise two copies of a pipeline, each rank with a seed of its own, by `init` and by hand; return the sums of all tensors."""
    sums, x = [], torch.ones(4, 6)
    for init in ("reset_parameters", None):
        torch.manual_seed(dist.get_rank())
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        pipe = pc.compile(
            model, 2, mesh=pair_mesh(), loss_fn=mean_square, cost="analytic", example_args=(x,), init=init
        )
        if init is None:
            pipe.apply(lambda layer: layer.reset_parameters() if isinstance(layer, nn.Linear) else None)
        pipe.step(x)
        sums.append({name: value.double().sum().item() for name, value in pipe.state_dict().items()})
    return sums


def uninitialised() -> Any:
    """Return the error of a step of a model without values: every rank names tensors of all ranks.

    A slow rank learns it from the failure of another rank.
    """
    model, inputs = on_meta(turned)
    pipe = pc.compile(model, 4, example_kwargs=inputs, **OPTIONS)
    try:
        pipe.step(**inputs)
    except (pc.InputError, pc.RunError) as error:
        return str(error)
    return ""


def measured() -> Any:
    """Return the error of measuring a model on meta, which only the first rank does."""
    model, inputs = on_meta(unet)
    try:
        pc.compile(model, 4, example_kwargs=inputs, **OPTIONS | {"cost": "profile"})
    except (pc.InputError, pc.RunError) as error:
        return str(error)
    return ""


def with_values(pipe: Pipeline) -> dict[str, torch.Tensor | None]:
    """Return weights and buffers that have values. A tensor that is still on meta is used by no stage."""
    tensors = {
        name: value for name, value in state_of(pipe).items() if value is not None and not name.endswith(".grad")
    }
    return {name: value for name, value in tensors.items() if not value.is_meta}


# -- from layout to layout ------------------------------------------------------------------------------------------


def adam(pipe: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups of parameters, which a checkpoint has to tell apart."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in pipe.parameters():
        groups.setdefault(parameter.dim() > 1, []).append(parameter)
    return torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * wide} for wide, group in groups.items()], lr=1e-2)


def step(pipe: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = pipe.step(**inputs) if isinstance(pipe, Pipeline) else by_hand(pipe, inputs)
    optimizer.step()
    return loss.item()


def by_hand(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run a loop over micro-batches without this library; return the loss."""
    parts = [
        dict(zip(inputs, each, strict=True)) for each in zip(*(v.tensor_split(4) for v in inputs.values()), strict=True)
    ]
    total = torch.zeros(())
    for part in parts:
        share = len(next(iter(part.values()))) / SAMPLES
        loss = mean_square(model(**part)) * share
        loss.backward()
        total += loss.detach()
    return total


def state(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of model and optimizer, in eager as PyTorch writes it."""
    if isinstance(pipe, Pipeline):
        return {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
    return {"model": pipe.state_dict(), "optimizer": get_optimizer_state_dict(pipe, optimizer, options=FLAT)}


def resumed(pipe: nn.Module, path: Path, *, alone: bool = False) -> torch.optim.Optimizer:
    optimizer = adam(pipe)
    entries = state(pipe, optimizer)
    dcp.load(entries, checkpoint_id=path, no_dist=alone)
    pipe.load_state_dict(entries["model"])
    if isinstance(pipe, Pipeline):
        pipe.load_optimizer_state_dict(optimizer, entries["optimizer"])
    else:
        set_optimizer_state_dict(pipe, optimizer, entries["optimizer"], options=FLAT)
    return optimizer


def resumed_in_other_layouts(make: Callable[[], Example]) -> Any:
    """Run six steps on four ranks and save after two; resume in other layouts, two steps each. Return all losses."""
    torch.manual_seed(5)
    model, inputs = make()
    saved = Path(os.environ["CASES_OUT"]) / f"resumed-{make.__name__}"
    pipe = pc.compile(copy.deepcopy(model), 4, example_kwargs=inputs, **OPTIONS)
    optimizer = adam(pipe)
    losses = [step(pipe, optimizer, inputs) for _ in range(2)]
    dcp.save(state(pipe, optimizer), checkpoint_id=saved)
    losses += [step(pipe, optimizer, inputs) for _ in range(4)]
    result = {"losses": losses, "pair": _resumed_steps(copy.deepcopy(model), inputs, 2, saved, mesh=pair_mesh()["pp"])}
    if make is LANGUAGE:  # BatchNorm would normalise over other samples
        mesh, square = pair_mesh(), saved.with_name("square")
        half = {name: value.tensor_split(2)[mesh.get_local_rank("dp")] for name, value in inputs.items()}
        result["square"] = _resumed_steps(copy.deepcopy(model), half, 2, saved, square, mesh=mesh)
    if dist.get_rank() == 0:
        alone, devices = saved.with_name("alone"), ["cpu"] * 3
        result["alone"] = _resumed_steps(copy.deepcopy(model), inputs, 3, saved, alone, devices=devices)
        result["eager"] = _stepped(copy.deepcopy(model), None, inputs, alone)
        if make is LANGUAGE:
            result["alone from a square"] = _resumed_steps(copy.deepcopy(model), inputs, 3, square, devices=devices)
    dist.barrier()
    return result


def saved_by_some() -> Any:
    """Save a pipeline of the first two ranks without the others, and load it; then make a group of all ranks."""
    mesh, found = pair_mesh()["pp"], list[Any]()
    if dist.get_rank() < 2:
        model, inputs = turned()
        pipe = pc.compile(model, 2, example_kwargs=inputs, mesh=mesh, **OPTIONS)
        optimizer, folder, group = adam(pipe), Path(os.environ["CASES_OUT"]) / "some", pipe.copies.group
        step(pipe, optimizer, inputs)
        for number in (1, 2, 3):
            options: dict[str, Any] = {"keep": 2, "asynchronous": number == 2, "process_group": group}
            pc.save_checkpoint(state(pipe, optimizer), folder, number, **options).result()
        loss = step(pipe, optimizer, inputs)
        entries = state(pipe, optimizer)
        dcp.load(entries, checkpoint_id=pc.latest_checkpoint(folder), process_group=group)
        pipe.load_state_dict(entries["model"])
        pipe.load_optimizer_state_dict(optimizer, entries["optimizer"])
        found = [sorted(path.name for path in folder.glob("0*")), step(pipe, optimizer, inputs) == loss]
    dist.barrier(group=dist.new_group())
    return found


def _resumed_steps(
    model: nn.Module, inputs: dict[str, Any], n_stages: int, path: Path, save: Path | None = None, **where: Any
) -> list[float]:
    return _stepped(model, pc.compile(model, n_stages, example_kwargs=inputs, **where, **OPTIONS), inputs, path, save)


def _stepped(
    model: nn.Module, pipe: Pipeline | None, inputs: dict[str, Any], path: Path, save: Path | None = None
) -> list[float]:
    """Run two steps from a checkpoint, in eager if there is no pipeline, and save again; return the losses."""
    run, alone = pipe or model, not isinstance(pipe, RankPipeline)
    optimizer = resumed(run, path, alone=alone)
    losses = [step(run, optimizer, inputs) for _ in range(2)]
    if save is not None:
        dcp.save(state(run, optimizer), checkpoint_id=save, no_dist=alone)
    return losses


CASES: dict[str, Callable[[], Any]] = {
    "initialised llama": lambda: initialised(llama),
    "initialised tied": lambda: initialised(LANGUAGE),
    "copied": copied,
    "uninitialised": uninitialised,
    "measured": measured,
    "saved by some": saved_by_some,
    "resumed unet": lambda: resumed_in_other_layouts(unet),
    "resumed tied": lambda: resumed_in_other_layouts(LANGUAGE),
}
