"""Cases of values of all kinds that cross a cut with a gradient: results of collectives under way, subclasses, many dimensions. Run on four
ranks, as in cases.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipecompile as pc
from tests.distributed.cases import mesh_of
from tests.distributed.direct import between_devices, on_emulated_streams
from tests.distributed.meshes import distance_of


class Marked(Tensor):
    """A kind of tensor that no header describes."""


class KeptWhole(nn.Module):
    """A layer that cannot be recorded, since its Python decides by values; `form` makes its result."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.form = nn.Linear(6, 6), form

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if float(y.detach().abs().max()) > 1e9:
            y = y * 0
        return self.form(y)


class Formed(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = KeptWhole(form), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1
        return self.last(y.as_subclass(Tensor).reshape(-1, 6))


def of_form(form: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return how far a step is off where a value of this form goes to the next rank."""
    mesh = mesh_of((2, 2), "dp", "pp")
    torch.manual_seed(5)
    model = Formed(form).double()
    return compared(model, copy.deepcopy(model), mesh, {"first": 0, "last": 1})


def behind_collective() -> dict[str, float]:
    """Return how far a step is off where the cut is behind a layer whose result is the sum of an all-reduce that is under way."""
    mesh = mesh_of((2, 2), "pp", "tp")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6), nn.Linear(6, 6)).double()
    eager = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return compared(model, eager, mesh, {"2": 0, "3": 1})


def compared(model: nn.Module, eager: nn.Module, mesh: DeviceMesh, pin: dict[str, int]) -> dict[str, float]:
    """Return how far loss, gradients and outputs are off those of `eager`, at worst in three steps."""
    x = torch.linspace(-1, 1, 48).double().reshape(8, 6)
    pipe = pc.compile(
        model, 2, mesh=mesh, loss_fn=nn.functional.mse_loss, n_microbatches=2, pin=pin, cost="analytic",
        example_args=(x,),
    )  # fmt: skip
    loss = nn.functional.mse_loss(eager(x), x)
    loss.backward()
    expected, worst = dict(eager.named_parameters()), {"loss": 0.0, "worst": 0.0, "output": 0.0}
    for _ in range(3):
        pipe.zero_grad()
        off = {"loss": abs(pipe.step(x, target=x).item() - loss.item())}
        off["worst"] = max(distance_of(one.grad, expected[name].grad) for name, one in pipe.named_parameters())
        with torch.no_grad():
            off["output"] = distance_of(pipe(x), eager(x))
        worst = {name: max(value, off[name]) for name, value in worst.items()}
    return worst


CASES: dict[str, Callable[[], Any]] = {
    "behind a collective": behind_collective,
    "direct behind a collective": between_devices(behind_collective),
    "emulated behind a collective": on_emulated_streams(behind_collective),
    "a subclass": lambda: of_form(lambda y: y.as_subclass(Marked)),
    "many dimensions": lambda: of_form(lambda y: y.reshape(-1, 3, 2, *[1] * 10)),
}
"""Cases by name, in the order in which ranks run them."""
