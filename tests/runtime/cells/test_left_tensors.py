"""A loss that reads, with gradients, what stages before the last have left in attributes, lists and dicts: gradients are the loop's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")


class Layer(nn.Module):
    """Leaves a tensor as recorded code does, or as a piece kept whole does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate, self.inner = kind, nn.Linear(8, 4), nn.Linear(8, 8)
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        if self.kind == "kept whole" and hidden.sum() > 1e9:
            hidden = hidden * 2
        gates = self.gate(x).softmax(-1)
        x = x + hidden.tanh() * gates[:, :1]
        if self.kind in ("recorded", "kept whole"):
            self.aux = gates.square().sum(1).mean() + x.square().mean()
        return x


class Stack(nn.Module):
    """Layers whose hooks, in some kinds, leave features in a dict or a list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.head = kind, nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.features: dict[int, Any] = {}
        self.listed: list[Any] = []
        for number, layer in enumerate(self.layers):
            if kind == "hook, dict":
                layer.inner.register_forward_hook(lambda _m, _i, o, n=number: self.features.__setitem__(n, (o, None)))
            elif kind == "hook, list":
                layer.inner.register_forward_hook(lambda _m, _i, o: self.listed.append(o))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A loss with what the layers have left."""
        left = [layer.aux for layer in self.layers if layer.aux is not None]
        left += [feature.square().mean() for feature, _ in self.features.values()]
        left += [feature.square().mean() for feature in self.listed]
        self.listed.clear()
        return F.cross_entropy(output, target) + 10 * torch.stack(left).sum()


KINDS = ("recorded", "kept whole", "hook, dict", "hook, list")

RUNS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {},
    "zb-h1": {"schedule": "zb-h1"},
    "offload": {"offload": True},
    "always": {"checkpoint": "always"},
    "gpipe always": {"schedule": "gpipe", "checkpoint": "always"},
    "zb-h1 except_last": {"schedule": "zb-h1", "checkpoint": "except_last"},
    "interleaved": {"schedule": "interleaved", "devices": ["cpu"] * 2},
    "zbv": {"schedule": "zbv", "devices": ["cpu"] * 2},
    "threads": {"dispatch": "threads"},
    "chimera": {"schedule": "chimera"},
    "chimera always": {"schedule": "chimera", "checkpoint": "always"},
    "chimera threads": {"schedule": "chimera", "dispatch": "threads"},
}


def compiled(model: Stack, **options: Any) -> pc.Pipeline:
    settings: dict[str, Any] = {"devices": ["cpu"] * 4, "n_microbatches": 3, "cost": "analytic", "check": False}
    cuts = ["layers.1", "layers.2", "head"] if model.kind == "kept whole" else [f"layers.{n}.gate" for n in range(3)]
    return pc.compile(model, 4, loss_fn=model.loss, split_before=cuts, **(settings | options))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_gradients_go_back_to_the_stages(kind: str, run: str) -> None:
    if kind == "hook, list" and run in (
        "interleaved",
        "zbv",
        "threads",
        "chimera",
        "chimera always",
        "chimera threads",
    ):
        pytest.skip("a list has items of micro-batches that are ahead; a warning says so")
    torch.manual_seed(0)
    model, x, y = Stack(kind), torch.randn(7, 8), torch.randint(3, (7,))
    twin = Stack(kind)
    twin.load_state_dict(model.state_dict())
    pipe = compiled(model, **RUNS[run])
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, target=y), accumulate(twin, x, 3, twin.loss, y))
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_the_very_tensors_are_there_after_the_step() -> None:
    model, x, y = Stack("recorded"), torch.randn(6, 8), torch.randint(3, (6,))
    twin = copy.deepcopy(model)
    compiled(model).step(x, target=y)
    accumulate(twin, x, 3, twin.loss, y)
    for own, expected in zip(model.layers, twin.layers, strict=True):
        assert own.aux.grad_fn is not None
        torch.testing.assert_close(own.aux.detach(), expected.aux.detach())


@pytest.mark.smoke
def test_a_step_without_gradients_reads_them_too() -> None:
    model, x, y = Stack("kept whole"), torch.randn(6, 8), torch.randint(3, (6,))
    pipe = compiled(model, n_microbatches=1)
    with torch.no_grad():
        torch.testing.assert_close(pipe.step(x, target=y), model.loss(model(x), y))


@pytest.mark.smoke
def test_a_list_of_micro_batches_has_the_same_gradients() -> None:
    model, x, y = Stack("hook, dict"), torch.randn(6, 8), torch.randint(3, (6,))
    twin = Stack("hook, dict")
    twin.load_state_dict(model.state_dict())
    parts = [pc.Microbatch(one, target=target) for one, target in zip(x.split(2), y.split(2), strict=True)]
    torch.testing.assert_close(compiled(model).step(microbatches=parts), accumulate(twin, x, 3, twin.loss, y))
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-5, atol=1e-6)
