"""Cases of losses and hooks that read weights of other stages, under schedules that free them, and on other ranks. Run as in cases.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from tests.distributed.meshes import SAMPLES, adam, blocks, distance_of, mesh_of, part_of

Loss = Callable[..., Any]

STEPS = 3


def _frozen(model: nn.Module) -> Loss:
    return lambda y, t: mse_loss(y, t) + (y @ model[0].frozen[:3]).square().mean()  # type: ignore[index]


def _all(model: nn.Module) -> Loss:
    return lambda y, t: mse_loss(y, t) + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


def _without_grad(model: nn.Module) -> Loss:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            norm = model[1].up.weight.norm() + model[0].down.weight.data.norm()  # type: ignore[index]
        return mse_loss(y, t) * norm

    return loss


def _layer(model: nn.Module) -> Loss:
    return lambda y, t: mse_loss(y, t) + model[0](y.repeat(1, 2)).square().mean()  # type: ignore[index]


def _counting(model: nn.Module) -> Loss:
    """Return a loss that changes in each step, so that its shares are measured."""
    calls = [0]

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return mse_loss(y, t) * model[0].frozen.norm()  # type: ignore[index]

    return loss


def _auxiliary(model: nn.Module) -> Loss:
    """Return a loss with a weight of the last stage, which stays as it was, beside it."""
    return lambda y, t: (mse_loss(y, t), (model[4].weight, model[4].weight[0]))  # type: ignore[index]


EQUAL = {"frozen": _frozen, "all": _all, "without grad": _without_grad, "layer": _layer, "counting": _counting}


def _summed(model: nn.Module) -> Loss:
    return lambda y, t: (y - t).square().sum() * model[0].frozen.norm()  # type: ignore[index]


def _item(model: nn.Module) -> Loss:
    return lambda y, t: mse_loss(y, t) * model[0].frozen.norm().item()  # type: ignore[index]


def _hooked(model: nn.Module) -> Loss:
    model[4].weight.register_hook(lambda gradient: gradient * model[0].frozen.norm())  # type: ignore[index]
    return mse_loss


REFUSED = {"summed": _summed, "item": _item, "hook": _hooked}


def equal(name: str) -> dict[str, Any]:
    """Train under a schedule that frees each stage between its blocks, evaluate, and compare to eager on the whole batch."""
    torch.manual_seed(3)
    model, x, y = blocks(), torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double()
    eager, mesh = copy.deepcopy(model), mesh_of((2, 2, 1), "dp", "dp_shard", "pp")
    part, theirs = part_of(mesh), EQUAL[name](eager)
    pipe = _pipe(model, mesh, x[part], EQUAL[name](model))
    optimizers, off = [adam(pipe.parameters()), adam(eager.parameters())], []
    for _ in range(STEPS):
        loss, whole = pipe.step(x[part], target=y[part]), theirs(eager(x), y)
        whole.backward()
        off.append(float(loss - whole))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(eager.named_parameters())
    off += [distance_of(parameter, expected[key]) for key, parameter in pipe.named_parameters()]
    with torch.no_grad():
        off.append(float(pipe.step(x[part], target=y[part]) - theirs(eager(x), y)))
    return {"off": off}


def _pipe(model: nn.Module, mesh: Any, x: torch.Tensor, loss: Loss, **options: Any) -> pc.Pipeline:
    schedule = pc.insert_sharding(pc.build_schedule("looped-bfs", 4, 3, n_devices=1), ahead=0)
    return pc.compile(
        model, 4, mesh=mesh, schedule=schedule, example_args=(x,), loss_fn=loss, cost="analytic", **options
    )


def refused(name: str) -> str:
    """Return the error of a step whose loss, or a hook, reads a weight that is not there."""
    torch.manual_seed(3)
    model, x, y = blocks(), torch.randn(8, 6).double(), torch.randn(8, 3).double()
    options = {"loss_reduction": "sum"} if name == "summed" else {}
    pipe = _pipe(model, mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), x, REFUSED[name](model), **options)
    try:
        return f"loss {pipe.step(x, target=y)}"
    except (pc.InputError, pc.RunError) as error:
        return str(error)


def auxiliary() -> dict[str, float]:
    """Return how far weights that a loss returns beside it are from those of the model."""
    torch.manual_seed(3)
    model, x, y = blocks(), torch.randn(8, 6).double(), torch.randn(8, 3).double()
    expected = model[4].weight.detach().clone()  # type: ignore[index]
    pipe = _pipe(model, mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), x, _auxiliary(model), has_aux=True)
    _, found = pipe.step(x, target=y)
    off = [max((one - expected).abs().max(), (row - expected[0]).abs().max()) for one, row in found]
    return {"off": float(max(off)), "count": len(found)}


def elsewhere() -> list[str]:
    """Return the errors of a step and of an evaluation whose loss reads a trained weight of another rank."""
    errors = []
    for call in ("step", "evaluate"):
        torch.manual_seed(3)
        model, x, y = blocks(), torch.randn(8, 6).double(), torch.randn(8, 3).double()
        loss, mesh = _all(model), mesh_of((2, 2), "dp", "pp")
        pipe = pc.compile(model, 2, mesh=mesh, n_microbatches=2, example_args=(x,), loss_fn=loss, cost="analytic")
        try:
            if call == "step":
                errors.append(f"loss {pipe.step(x, target=y)}")
            else:
                errors.append(str(pipe.evaluate([(x, y)], metric=lambda output, target: (output - target).mean())))
        except (pc.InputError, pc.RunError) as error:
            errors.append(str(error))
    return errors


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center.mul_(0.5).add_(x.detach().mean(0))
        return x


class Centred(nn.Module):
    """A model with a buffer that its first stage writes, and a frozen weight and a buffer that it does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.centre, self.scale = Centre(), nn.Buffer(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.centre(self.first(x) * self.frozen))


def _centred(model: Centred, loss: Loss) -> tuple[pc.Pipeline, torch.Tensor, torch.Tensor]:
    x, y, mesh = torch.randn(8, 6).double(), torch.randn(8, 3).double(), mesh_of((2, 2), "dp", "pp")
    options = {"loss_fn": loss, "cost": "analytic", "split_before": ["last"], "pin": {"centre": 0}}
    return pc.compile(model, 2, mesh=mesh, n_microbatches=2, example_args=(x,), **options), x, y  # type: ignore[arg-type]


def loaded() -> dict[str, Any]:
    """Return how far the losses are from eager's after a state was loaded with other values of what another rank has, the error after a
    part of the state was loaded, and that of a loss that reads what another rank writes.
    """
    torch.manual_seed(3)
    model, off = Centred().double(), []
    eager = copy.deepcopy(model)

    def loss_of(model: Centred) -> Loss:
        return lambda y, t: ((y - t).square() * model.scale).mean() + y.mean() * model.frozen.norm()

    pipe, x, y = _centred(model, loss_of(model))
    for factor in (1.0, 1.5):
        state = {key: factor * value for key, value in pipe.full_state_dict().items()}
        pipe.load_state_dict(state)
        eager.load_state_dict(state)
        with torch.no_grad():
            off.append(float(pipe.step(x, target=y) - loss_of(eager)(eager(x), y)))
    pipe.load_state_dict(pipe.state_dict())
    errors = [_error(pipe, x, y)]
    model = Centred().double()
    pipe, x, y = _centred(model, lambda y, t: (y - t).square().mean() * model.centre.center.norm())
    return {"off": off, "errors": [*errors, _error(pipe, x, y)]}


class Weighed(nn.Module):
    """A loss of two tasks with trained weights of its own."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((2,), start))

    def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        tasks = torch.stack([mse_loss(y, t), y.square().mean()])
        return ((-self.weights).exp() * tasks + self.weights).sum()


def of_its_own() -> dict[str, Any]:
    """Return how far weights of a loss, and losses, are from eager's on the whole batch, and the warnings."""
    torch.manual_seed(3)
    model, x, y = blocks(), torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double()
    mesh = mesh_of((2, 2), "dp", "pp")
    loss, theirs = (Weighed(start).double() for start in (float(mesh.get_local_rank("dp")), 0.0))
    eager, part, off = copy.deepcopy(model), part_of(mesh), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(model, 2, mesh=mesh, n_microbatches=2, example_args=(x[part],), loss_fn=loss, cost="analytic")
        mine = torch.optim.SGD([*pipe.parameters(), *loss.parameters()], 0.1)
        other = torch.optim.SGD([*eager.parameters(), *theirs.parameters()], 0.1)
        for _ in range(STEPS):
            mine.zero_grad()
            other.zero_grad()
            expected = theirs(eager(x), y)
            expected.backward()
            off.append(float(pipe.step(x[part], target=y[part]) - expected))
            mine.step()
            other.step()
    if pipe.needs_targets:
        off.append(distance_of(loss.weights, theirs.weights))
    told = [str(one.message) for one in caught if "the loss has" in str(one.message)]
    return {"off": off, "told": told, "trains": pipe.needs_targets}


class Tempered(Centred):
    """A model with a temperature and a mean for the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.mean = nn.Parameter(torch.ones(3)), nn.Buffer(torch.zeros(3))

    def loss(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        result = ((y - t - self.mean) * self.temperature).square().mean()
        self.mean = self.mean * 0.5 + self.temperature.detach()
        return result


def of_the_loss() -> dict[str, Any]:
    """Return how far losses and state are from eager's where the loss trains and writes what no stage uses, and the error of a loss that
    writes what another rank reads.
    """
    torch.manual_seed(3)
    model = Tempered().double()
    eager, off = copy.deepcopy(model), []
    pipe, x, y = _centred(model, model.loss)
    pipe.reschedule("gpipe", 1)
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (pipe, eager))
    for _ in range(STEPS):
        mine.zero_grad()
        theirs.zero_grad()
        expected = eager.loss(eager(x), y)
        expected.backward()
        off.append(float(pipe.step(x, target=y) - expected))
        mine.step()
        theirs.step()
    state = pipe.full_state_dict()
    off += [float((state[name] - value).abs().max()) for name, value in eager.state_dict().items()]
    other = Tempered().double()
    pipe, x, y = _centred(other, lambda y, t: (y - t).square().mean() + 0 * other.frozen.mul_(2).sum())
    return {"off": off, "error": _error(pipe, x, y)}


def _error(pipe: pc.Pipeline, x: torch.Tensor, y: torch.Tensor) -> str:
    try:
        return f"loss {pipe.step(x, target=y)}"
    except (pc.InputError, pc.RunError) as error:
        return str(error)


CASES: dict[str, Callable[[], Any]] = {
    "losses on sharded weights": lambda: {name: equal(name) for name in ("counting",)},
    "further losses on sharded weights": lambda: {
        name: equal(name) for name in ("all", "frozen", "layer", "without grad")
    },
    "weights beside the loss": auxiliary,
    "weights of other ranks": elsewhere,
    "values of other ranks": loaded,
    "weights of the loss": of_its_own,
    "values of the loss": of_the_loss,
} | {f"refused: {name}": (lambda name=name: refused(name)) for name in REFUSED}
