"""Hooks and backwards of autograd functions read what the forward of their micro-batch left, not what a later one has."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.backward_reads import BackwardReads
from pipecompile.runtime.registers import Frame

N, WIDTH = 4, 6


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.owner.scale, None


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.scale = self.measured(x.detach())
        return self.used(self.inner(x))

    def measured(self, x) -> Any:
        return x.abs()

    def used(self, x):
        return Scaled.apply(x, self)


class NumberOfFunction(Middle):
    def measured(self, x):
        return float(x.abs().max())


class TensorOfHook(Middle):
    def used(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.scale)
        return x


class NumberOfHook(TensorOfHook):
    def measured(self, x):
        return float(x.abs().max())


class OfLayerHook(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * self.scale,))

    def used(self, x):
        return x


class OfWeightHook(NumberOfFunction):
    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.register_hook(lambda gradient: gradient * self.scale)

    def used(self, x):
        return x


class InDict(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def measured(self, x):
        self.kept["scale"] = x.abs()
        return 1.0

    def used(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.kept["scale"])
        return x


class SeedOfRegion(Middle):
    """Draws its dropout again with the seed of its forward, as the layers of Reformer do."""

    def measured(self, _x):
        return int(torch.randint(1000, ()))

    def used(self, x):
        return checkpoint(self.dropped, x, use_reentrant=False)

    def dropped(self, x):
        torch.manual_seed(self.scale)
        return nn.functional.dropout(x, 0.5)


def _net(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), kind(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).double()


def _loss(output):
    return output.sin().mean()


def _eager(kind: type[nn.Module], x: torch.Tensor, steps: int) -> tuple[list[Any], Any]:
    net = _net(kind)
    for step in range(steps):
        torch.manual_seed(step)
        for part in x.chunk(N):
            (_loss(net(part)) / N).backward()
    return [parameter.grad for parameter in net.parameters()], getattr(net[2], "scale", None)


KINDS = [
    Middle,
    NumberOfFunction,
    TensorOfHook,
    NumberOfHook,
    OfLayerHook,
    OfWeightHook,
    InDict,
    SeedOfRegion,
]


THREADS = {"dispatch": "threads"}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"checkpoint": "always"}, {"schedule": "gpipe"}, THREADS, {"schedule": "gpipe", **THREADS},
        {"checkpoint": "always", **THREADS},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_reads_what_its_own_forward_left(kind: type[nn.Module], options: dict[str, Any]):
    x, net = torch.randn(2 * N, WIDTH, dtype=torch.float64), _net(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pc.compile(
            net, 3, example_args=(x,), n_microbatches=N, loss_fn=_loss, cost="analytic", devices=["cpu"] * 3,
            **({"dispatch": "inline"} | options),
        )  # fmt: skip
        for step in range(2):
            torch.manual_seed(step)
            pipe.step(x)
    wanted, left = _eager(kind, x, 2)
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)
    if kind is not SeedOfRegion:  # the order of draws is the schedule's
        torch.testing.assert_close(net[2].scale, left)


class Lazy(OrderedDict[str, Any]):
    """Imports its values when it is asked for them, and fails, as a table of models for which a library is missing."""

    def __getitem__(self, key):
        raise ImportError(key)

    def items(self):
        return [(key, self[key]) for key in self]


class BesideLazyMapping(NumberOfFunction):
    def __init__(self) -> None:
        super().__init__()
        self.table = Lazy(first="somewhere")

    def measured(self, x):
        return float(x.abs().max()) if x.sum() > -1e9 and self.table else 0.0


def test_items_of_a_lazy_mapping_are_not_asked_for():
    x, net = torch.randn(2 * N, WIDTH, dtype=torch.float64), _net(BesideLazyMapping)
    pipe = pc.compile(
        net, 3, example_args=(x,), n_microbatches=N, loss_fn=_loss, cost="analytic", devices=["cpu"] * 3, dispatch="inline"
    )  # fmt: skip
    pipe.step(x)
    for parameter, gradient in zip(net.parameters(), _eager(BesideLazyMapping, x, 1)[0], strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_value_that_the_user_or_a_backward_has_put_there_is_left():
    dicts = {"scale": 0}
    keys = _Keys([dicts])
    reads, frame, seen = BackwardReads({0: keys}), Frame([], []), []  # type: ignore[dict-item]
    for microbatch in range(2):
        reads.around(
            lambda _frame: dicts.update(scale=object()), Action(kind=Kind.FORWARD, stage=0, microbatch=microbatch)
        )(frame)
    last = dicts["scale"]
    first = frame.kept[0, 0][0, "scale"][1]
    backward = reads.around(
        lambda _frame: seen.append(dicts["scale"]), Action(kind=Kind.INPUT_GRAD, stage=0, microbatch=0)
    )
    backward(frame)
    assert seen == [first]
    assert dicts["scale"] is last
    dicts["scale"] = "the user's"
    backward(frame)
    assert seen[-1] == dicts["scale"] == "the user's"
    dicts["scale"] = last
    reads.around(
        lambda _frame: dicts.update(scale="the backward's"), Action(kind=Kind.BACKWARD, stage=0, microbatch=0)
    )(frame)
    assert dicts["scale"] == "the backward's"
    assert (0, 0) not in frame.kept


def test_a_backward_finds_its_own_value_after_a_later_micro_batch_is_done():
    dicts = {"scale": 0}
    reads, frame, seen = BackwardReads({0: _Keys([dicts])}), Frame([], []), []  # type: ignore[dict-item]
    for microbatch, value in enumerate("ab"):
        forward = Action(kind=Kind.FORWARD, stage=0, microbatch=microbatch)
        reads.around(lambda _frame, value=value: dicts.update(scale=value), forward)(frame)
    for microbatch in (1, 0):
        backward = Action(kind=Kind.BACKWARD, stage=0, microbatch=microbatch)
        reads.around(lambda _frame: seen.append(dicts["scale"]), backward)(frame)
    assert seen == ["b", "a"]


def test_a_value_that_another_thread_replaces_for_its_backward_is_remembered():
    dicts = {"scale": ""}
    reads, frame, seen = BackwardReads({0: _Keys([dicts])}, {0}, threaded=True), Frame([], []), []  # type: ignore[dict-item]
    for microbatch, value in enumerate("abc"):
        forward = Action(kind=Kind.FORWARD, stage=0, microbatch=microbatch)
        reads.around(lambda _frame, value=value: dicts.update(scale=value), forward)(frame)
    of_last = reads.around(lambda _frame: None, Action(kind=Kind.BACKWARD, stage=1, microbatch=2))
    backwards = [Action(kind=Kind.BACKWARD, stage=0, microbatch=microbatch) for microbatch in range(2)]
    # While 0B0 has exchanged the value, the backward of micro-batch 2 ends in another thread: "c" comes back, and is not a user's value.
    reads.around(lambda frame: (seen.append(dicts["scale"]), of_last(frame)), backwards[0])(frame)
    reads.around(lambda _frame: seen.append(dicts["scale"]), backwards[1])(frame)
    assert (seen, dicts["scale"]) == (["a", "b"], "c")


class _Keys:
    """Dicts of a stage, all of whose keys its forward replaces."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        self._dicts = dicts

    def contents(self) -> list[dict[Any, Any]]:
        return [dict(one) for one in self._dicts]

    def note(self, before: list[dict[Any, Any]]) -> None:
        assert len(before) == len(self._dicts)

    def values(self) -> dict[Any, Any]:
        return {(0, name): (held, value) for held in self._dicts for name, value in held.items()}
