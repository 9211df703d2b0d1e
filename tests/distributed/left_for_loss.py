"""Ranks whose loss reads tensors that stages on other ranks leave on the model: how far a step is from that of one process."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import init_device_mesh

import pipecompile as pc
from tests.distributed.faults import FORK

N, SAMPLES = 2, 5


class Gated(nn.Module):
    """Leaves a term that balances its gates, and in a dict the features of which the loss takes another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 6), nn.Linear(6, 3)
        self.aux: Any = None
        self.info: dict[str, Any] = {}
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        self.aux = gates.mean(0).square().sum()
        self.info = {"features": x.tanh()}
        self.seen.append(gates.amax())
        return self.layer(x).tanh() * gates[:, :1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Gated() for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attributes(model: Net) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + sum(block.aux for block in model.blocks)


def dicts(model: Net) -> Any:
    return lambda output, target: (
        F.cross_entropy(output, target) + sum(block.info["features"].square().mean() for block in model.blocks)
    )


def lists(model: Net) -> Any:
    return lambda output, target: F.cross_entropy(output, target) * model.blocks[0].seen[-1]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "1f1b": (attributes, {}),
    "zb-h1": (attributes, {"schedule": "zb-h1"}),
    "interleaved": (attributes, {"n_stages": 4, "schedule": "interleaved"}),
    "recomputed": (attributes, {"schedule": "gpipe", "checkpoint": "always"}),
    "dicts": (dicts, {}),
    "dicts, interleaved": (dicts, {"n_stages": 4, "schedule": "interleaved", "checkpoint": "always"}),
}


def _trained(case: str) -> dict[str, Any]:
    """Return how far loss and gradients of two steps are from those of one process, and what the loss has left after a call."""
    torch.manual_seed(0)
    make_loss, options = CASES[case]
    model = Net().double()
    twin = copy.deepcopy(model)
    loss_fn, eager = make_loss(model), make_loss(twin)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    settings = {"n_stages": 2, "n_microbatches": N, "cost": "analytic", "mesh": mesh, "loss_fn": loss_fn} | options
    apart = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(model, **settings)
        for _ in range(2):
            x, target = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(3, (SAMPLES,))
            expected = 0.0
            for part, its_target in zip(x.tensor_split(N), target.tensor_split(N), strict=True):
                loss = eager(twin(part), its_target) * len(part) / SAMPLES
                loss.backward()
                expected += loss.item()
            apart.append(abs(pipe.step(x, target=target).item() - expected))
    names = dict(twin.named_parameters())
    apart += [
        (own.grad - names[name].grad).abs().max().item()
        for name, own in model.named_parameters()
        if own.grad is not None
    ]
    texts = [str(one.message) for one in caught if "on objects that the loss reads" in str(one.message)]
    left, wanted = (None if one.blocks[0].aux is None else one.blocks[0].aux.item() for one in (model, twin))
    return {"apart": max(apart), "gradients": len(apart) - 2, "warned": texts, "left": left, "wanted": wanted}


def _warned() -> list[str]:
    """Return the warnings of a loss that reads a list of another rank."""
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model.blocks[0].seen.append(torch.ones(()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(model, 2, mesh=mesh, loss_fn=lists(model), n_microbatches=N, cost="analytic")
        pipe.step(torch.randn(4, 6), target=torch.randint(3, (4,)))
    return [str(one.message) for one in caught if "on objects that the loss reads" in str(one.message)]


def main() -> None:
    """Fork both ranks, which write to a folder."""
    ranks = [FORK.Process(target=run, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks), [process.exitcode for process in ranks]


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said = {case: _trained(case) for case in CASES} | {"lists": _warned()}
    Path(f"{folder}/{rank}").write_text(json.dumps(said))
    dist.destroy_process_group()
