"""Tensors that a piece kept whole leaves in attributes, read by the code around it: they are results of its call."""

from __future__ import annotations

import copy
from time import sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import remove_weight_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile.tracing.opaque.left_attributes import NOTHING_LEFT, AttributeWatch, LeftAttributes, OutsideNames
from tests.support.eager import accumulate

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Experts(nn.Module):
    """A mixture of experts, kept whole, which leaves losses of balance in a tensor, a dict and a list."""

    def __init__(self, before: Any = None) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3, bias=False), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.aux, self.losses, self.gates = before, {}, []
        self.unread: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        weight, chosen = gates.max(-1)
        made = torch.zeros_like(x)
        for number, count in enumerate(torch.bincount(chosen, minlength=3).tolist()):
            if count:
                rows = (chosen == number).nonzero().squeeze(1)
                made = made.index_add(0, rows, self.experts[number](x[rows]) * weight[rows, None])
        self.aux = gates.mean(0).square().sum()
        self.losses = {"z": self.gate(x).logsumexp(-1).square().mean(), "kind": "z"}
        self.gates = [gates]
        self.unread = gates
        return x + made


class Root(nn.Module):
    """Reads what its layers have left."""

    def __init__(self, before: Any = None, n: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(Experts(before) for _ in range(n))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, total = self.first(x), 0.0
        for layer in self.layers:
            h = self.run(layer, h)
            total = total + layer.aux + layer.losses["z"] + layer.gates[0].square().mean()
        return self.head(h), total


class Recomputed(Root):
    """Runs its layers in regions of the user's own checkpointing, without a read inside."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = self.run(layer, h)
        return self.head(h), h.square().mean()


class Shared(Root):
    """Calls one layer twice, and reads it after each call."""

    def __init__(self) -> None:
        super().__init__(n=1)
        self.layers.append(self.layers[0])


def loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], target) + output[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"dispatch": "threads"}], ids=str
)
@pytest.mark.parametrize("make", [Root, lambda: Root(0.0), lambda: Root(torch.zeros(())), Shared, Recomputed])
def test_steps_are_those_of_the_loop(make: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(7, 4), torch.randint(2, (7,))
    twin = copy.deepcopy(model)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=3, cost="analytic", loss_fn=loss, **options)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, target=y), accumulate(twin, x, 3, loss, y))
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
    for own, expected in zip(model.layers, twin.layers, strict=True):
        assert_same_left(own, expected)


def assert_same_left(own: Any, expected: Any) -> None:
    torch.testing.assert_close(own.aux, expected.aux)
    torch.testing.assert_close(own.unread, expected.unread)
    assert own.losses.keys() == expected.losses.keys()


def test_state_that_is_read_before_the_call_is_refused() -> None:
    """All micro-batches read the value from before the step, with a warning."""

    class Before(Root):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, earlier = self.first(x), self.layers[0].aux
            h = self.layers[0](h)
            return self.head(h if earlier is None else h + earlier.detach())

    with pytest.raises(pc.TraceError, match="PC114"):
        pc.compile(Before(), 2, example_args=(torch.randn(4, 4),), n_microbatches=2, cost="analytic")


def test_only_changed_tensors_that_code_outside_names_are_left() -> None:
    model = Root(n=1)
    watch = AttributeWatch(model.layers[0], OutsideNames(model))
    assert watch.left() == NOTHING_LEFT
    model.layers[0](torch.randn(4, 8))
    assert watch.left() == LeftAttributes((("", "aux"), ("", "gates"), ("", "losses")))


def test_what_is_left_is_joined_to_the_result_and_separated_again() -> None:
    owner, left = nn.Sequential(nn.Linear(2, 2)), LeftAttributes((("0", "kept"),))
    left.separated(owner, ("result", [3]))
    assert owner[0].kept == 3
    assert left.joined(owner, "other") == ("other", [3])
    assert NOTHING_LEFT.joined(owner, "other") == NOTHING_LEFT.separated(owner, "other") == "other"


def test_no_node_leaves_what_the_piece_leaves_itself() -> None:
    """A node would write the attribute in the thread of another stage, while the piece runs on the next micro-batch."""
    graph = pc.trace(Root(), torch.randn(4, 4))
    assert not [node.name for node in graph.graph.nodes if node.name.startswith("keep")]


class Cleared(Root):
    """Clears what the first layer has left."""

    def after(self, total: torch.Tensor) -> Any:
        return None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, total = super().forward(x)
        self.layers[0].aux = self.after(total)
        return h, total


class Replaced(Cleared):
    """Puts a tensor of a later stage in its place."""

    def after(self, total: torch.Tensor) -> Any:
        return total * 2


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("make", [Cleared, Replaced])
def test_code_outside_may_write_what_a_piece_left(
    make: type[Cleared], dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of a piece and the read of what it left, the thread of another stage has time to write."""
    joined = LeftAttributes.joined

    def late(self: LeftAttributes, owner: nn.Module, result: Any) -> Any:
        if self.names:
            sleep(0.01)
        return joined(self, owner, result)

    torch.manual_seed(0)
    model, x, y = make(), torch.randn(6, 4), torch.randint(2, (6,))
    twin = copy.deepcopy(model)
    options: Any = {"n_microbatches": 6, "cost": "analytic", "loss_fn": loss, "dispatch": dispatch}
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, example_args=(x,), **options)
    monkeypatch.setattr(LeftAttributes, "joined", late)
    losses = [pipe.step(x, target=y) for _ in range(3)]
    for one in losses:
        torch.testing.assert_close(one, accumulate(twin, x, 6, loss, y))
    torch.testing.assert_close(model.layers[0].aux, twin.layers[0].aux)
    torch.testing.assert_close(model.layers[1].aux, twin.layers[1].aux)


class Normed(nn.Module):
    """A layer with a weight that a hook computes, kept whole for what it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        return self.inner(x) if x.max() < 1e9 else -x


class TiedToNormed(nn.Module):
    """Names `weight`, as the layer that is kept whole leaves one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(4, 4), Normed(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.kept(self.first(x))) + self.last.weight.sum()


@pytest.mark.parametrize("change", [lambda m: remove_weight_norm(m.kept.inner), lambda m: setattr(m.kept, "inner", nn.Linear(4, 4))])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_parameter_in_place_of_what_a_piece_left_is_recorded_anew(change: Any) -> None:
    model, x, y = TiedToNormed(), torch.randn(4, 4), torch.randn(4, 2)
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=F.mse_loss, devices=["cpu"] * 2, cost="analytic")
    pipe.step(x, target=y)
    change(model)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.zero_grad()
    accumulate(twin, x, 2, F.mse_loss, y)
    pipe.step(x, target=y)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
