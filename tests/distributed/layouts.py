"""Cases of models built on `meta`, and of checkpoints that go from layout to layout."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
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
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.pipeline import Pipeline

from .cases import SAMPLES, Example, alike, gpt2, mean_square, merged, pair_mesh, state_of, unet

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS: dict[str, Any] = {"loss_fn": mean_square, "n_microbatches": 4, "cost": "analytic", "tied": "apart"}


def llama() -> Example:
    """With a buffer that its constructor computes and `state_dict` does not have."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(40, (SAMPLES, 8))}


def on_meta(make: Callable[[], Example]) -> Example:
    torch.manual_seed(1)
    inputs = make()[1]
    with torch.device("meta"):
        return make()[0], inputs


# -- built on meta --------------------------------------------------------------------------------------------------


def born(make: Callable[[], Example]) -> Any:
    """Four ranks, each with its stage alone, against one process, which is on meta as well: the same weights and steps. Then
    a checkpoint of it on a pair.
    """
    model, inputs = on_meta(make)
    torch.manual_seed(dist.get_rank())
    pipe = pc.compile(model, 4, example_kwargs=inputs, init="reset_parameters", **OPTIONS)
    losses = [step(pipe, adam(pipe), inputs) for _ in range(2)]
    found = merged({name: value for name, value in state_of(pipe).items() if value is None or not value.is_meta})
    here = {id(value) for value in (*pipe.parameters(), *pipe.buffers())}
    real = [value for value in (*model.parameters(), *model.buffers()) if not value.is_meta]
    result: dict[str, Any] = {"losses": losses, "copies": sum(id(value) not in here for value in real),
                              "real": sum(value.numel() for value in real)}  # fmt: skip
    torch.manual_seed(0)
    whole, _ = on_meta(make)
    torch.manual_seed(0)
    alone = pc.compile(whole, 4, devices=["cpu"] * 4, plan=pipe.plan, example_kwargs=inputs, dispatch="inline",
                       init="reset_parameters", **OPTIONS)  # fmt: skip
    result["expected"] = [step(alone, adam(alone), inputs) for _ in range(2)]
    if found is not None:
        result["differ"] = alike(
            found, {key: value for key, value in state_of(alone).items() if value is None or not value.is_meta}
        )
        result["numbers"] = sum(value.numel() for value in alone.parameters())
    return result | {"again": _again(make, pipe, inputs), "next": pipe.step(**inputs).item()}


def _again(make: Callable[[], Example], pipe: Pipeline, inputs: dict[str, Any]) -> float:
    directory = Path(os.environ["CASES_OUT"]) / f"born-{make.__name__}"
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=directory)
    model, _ = on_meta(make)
    two = pc.compile(
        model, 2, mesh=pair_mesh()["pp"], example_kwargs=inputs, init=["reset_parameters", directory], **OPTIONS
    )
    return two.step(**inputs).item()


def nameless() -> Any:
    """Nobody gives values: all ranks name what has none, of all of them."""
    model, inputs = on_meta(llama)
    pipe = pc.compile(model, 4, example_kwargs=inputs, **OPTIONS)
    try:
        pipe.step(**inputs)
    except pc.InputError as error:
        return str(error)
    return ""


def measured() -> Any:
    """What is on meta cannot be measured; only the first rank would."""
    model, inputs = on_meta(unet)
    try:
        pc.compile(model, 4, example_kwargs=inputs, **OPTIONS | {"cost": "profile"})
    except (pc.InputError, pc.RunError) as error:
        return str(error)
    return ""


# -- from layout to layout ------------------------------------------------------------------------------------------


def adam(pipe: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which a checkpoint has to know which parameter was in which."""
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
    """A loop over micro-batches without this library."""
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


def state(model: nn.Module, pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": pipe.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}


def resumed(model: nn.Module, pipe: nn.Module, path: Path, *, alone: bool = False) -> torch.optim.Optimizer:
    optimizer = adam(pipe)
    held = state(model, pipe, optimizer)
    dcp.load(held, checkpoint_id=path, no_dist=alone)
    pipe.load_state_dict(held["model"])
    set_optimizer_state_dict(model, optimizer, held["optimizer"], options=FLAT)
    return optimizer


def carried(make: Callable[[], Example]) -> Any:
    """Six steps of four ranks, saved after two; others go on from there, each in another layout, and from each other."""
    torch.manual_seed(5)
    model, inputs = make()
    first = Path(os.environ["CASES_OUT"]) / f"carried-{make.__name__}"
    other = first.with_name(f"{first.name}-other")
    pipe = pc.compile(model, 4, example_kwargs=inputs, **OPTIONS)
    optimizer = adam(pipe)
    losses = [step(pipe, optimizer, inputs) for _ in range(2)]
    dcp.save(state(model, pipe, optimizer), checkpoint_id=first)
    losses += [step(pipe, optimizer, inputs) for _ in range(4)]
    found: dict[str, Any] = {"losses": losses}
    for name, layout in (("pair", pair_mesh()["pp"]), ("square", pair_mesh())):
        went = _of_two(copy.deepcopy(model), layout, inputs, first, other if name == "square" else None)
        found[name] = [next(went) for _ in range(2)]
    dist.barrier()
    if dist.get_rank() == 0:
        found |= _alone(copy.deepcopy(model), inputs, first, other)
    dist.barrier()
    return found


def _of_two(
    model: nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], path: Path, save: Path | None
) -> Iterator[float]:
    """Two stages; with copies, each gets its half of the batch. Saved after two steps."""
    if mesh.ndim > 1:
        inputs = {name: value.tensor_split(2)[mesh.get_local_rank("dp")] for name, value in inputs.items()}
    pipe = pc.compile(model, 2, mesh=mesh, example_kwargs=inputs, **OPTIONS)
    optimizer = resumed(model, pipe, path)
    yield step(pipe, optimizer, inputs)
    yield_second = step(pipe, optimizer, inputs)
    if save is not None:
        dcp.save(state(model, pipe, optimizer), checkpoint_id=save)
    yield yield_second


def _alone(model: nn.Module, inputs: dict[str, Any], first: Path, other: Path) -> dict[str, list[float]]:
    """One process in three stages, then plain eager; from the checkpoint of four ranks, and from that of two times two."""
    found = {}
    for path in (first, other):
        pipe = pc.compile(model, 3, devices=["cpu"] * 3, dispatch="inline", example_kwargs=inputs, **OPTIONS)
        optimizer = resumed(model, pipe, path, alone=True)
        found[f"alone from {path.name}"] = [step(pipe, optimizer, inputs)]
        dcp.save(state(model, pipe, optimizer), checkpoint_id=path.with_name("alone"), no_dist=True)
        optimizer = resumed(model, model, path.with_name("alone"), alone=True)
        found[f"alone from {path.name}"] += [step(model, optimizer, inputs)]
    return found


CASES: dict[str, Callable[[], Any]] = {
    "born llama": lambda: born(llama),
    "born gpt2": lambda: born(gpt2),
    "nameless": nameless,
    "measured": measured,
    "carried unet": lambda: carried(unet),
    "carried gpt2": lambda: carried(gpt2),
}
