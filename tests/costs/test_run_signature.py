"""Nodes of equal signature launch equal kernels: costs are those of a walk that records every node, in less of the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import DenseNet, VisionTransformer

import pipecompile as pc
from pipecompile.costs import analytic
from pipecompile.costs.analytic import node_work
from pipecompile.costs.graph_walk import MethodCall
from pipecompile.costs.node_run import NodeRun, SavedLedger
from pipecompile.costs.run_signature import run_signature
from pipecompile.torch_private.modes import FakeTensorMode


class Alike(nn.Module):
    """Calls that look alike: frozen and trained, tied, transposed, of one tensor twice, under autocast and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.layers[3].weight = self.layers[0].weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.norms[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x)
        x = self.norms[1](self.norms[0](x)) + self.norms[0](x)
        x = x + x.t().reshape(8, 8) * x.t() + x * x + x * x.clone()
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[0](x) + self.layers[0](x) + self.layers[2](x)
        with torch.no_grad():
            scale = self.layers[2](x.float())
        x = x.float().mul_(2).relu() * scale
        y = first.mul(2).relu()
        return torch.cat([x, y, y], 1) + F.dropout(torch.cat([x, x, y], 1), 0.5, training=False)


class Hooked(nn.Module):
    """Equal layers, one of which does more in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.register_forward_hook(lambda _layer, _inputs, output: output.exp())
        own = self.c.forward
        self.c.forward = lambda x: own(own(x))  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "alike": (Alike, (8, 8)),
    "hooked": (Hooked, (8, 8)),
    "transformer": (lambda: VisionTransformer(32, 16, 2, 4, 32, 64), (2, 3, 32, 32)),
    "dense": (lambda: DenseNet(4, (2, 2), 8), (2, 3, 64, 64)),
}


def recorded_each(graph: Any, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(analytic, "run_signature", lambda _run: None)
        return node_work(graph, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_recording_every_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = MODELS[name]
    x = torch.randn(shape)
    graph = pc.trace(make(), x)
    assert node_work(graph, [x]) == recorded_each(graph, [x], monkeypatch)


def test_without_gradients_costs_are_those_of_recording_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 8)
    with torch.no_grad():
        graph = pc.trace(Alike(), x)
        assert node_work(graph, [x]) == recorded_each(graph, [x], monkeypatch)


def test_models_with_trouble_cost_the_same(zoo: nn.Module, unet: nn.Module, tokens: Tensor, monkeypatch: Any) -> None:
    for model, x in ((zoo, tokens), (unet, torch.randn(2, 3, 16, 16))):
        graph = pc.trace(model, x)
        assert node_work(graph, [x]) == recorded_each(graph, [x], monkeypatch)


def test_repeated_blocks_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures: list[Any] = []

    def noted(run: NodeRun) -> Any:
        signatures.append(run_signature(run))
        return signatures[-1]

    monkeypatch.setattr(analytic, "run_signature", noted)
    x = torch.randn(4, 8, requires_grad=True)
    node_work(pc.trace(nn.Sequential(*[nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)] * 5), x), [x])
    assert len(signatures) == 15
    assert None not in signatures
    assert len(set(signatures)) == 3


def signature(call: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = tuple(call.parameters()) if isinstance(call, nn.Module) else ()
    return run_signature(NodeRun(call, args, kwargs, parameters, SavedLedger(())))


def test_all_that_decides_the_kernels_is_in_the_signature() -> None:
    with FakeTensorMode():
        layer, x, other = nn.Linear(4, 4), torch.empty(4, 4), torch.empty(4, 4)
        signatures = [
            signature(layer, x), signature(nn.Linear(4, 4, bias=False), x), signature(nn.Linear(4, 4).eval(), x),
            signature(nn.Linear(4, 4).requires_grad_(False), x), signature(layer, torch.empty(2, 4)),
            signature(layer, x.t()), signature(layer, x.double()), signature(layer, torch.empty(4, 4).requires_grad_()),
            signature(nn.Linear(4, 4, dtype=torch.float64), x), signature(nn.Identity(), x), signature(nn.Dropout(0.1), x),
            signature(nn.Dropout(0.2), x), signature(torch.add, x, other), signature(torch.add, x, x),
            signature(torch.add, x, x.detach()), signature(torch.add, x, 1), signature(torch.add, x, 1.0),
            signature(torch.add, x, True), signature(torch.add, x, other, alpha=2), signature(torch.mul, x, other),
            signature(MethodCall("add"), x, other), signature(torch.cat, [x, other], 0), signature(torch.cat, (x, other), 0),
            signature(torch.add, x, nn.Parameter(other)), signature(torch.add, x, nn.Parameter(other, requires_grad=False)),
        ]  # fmt: skip
        assert None not in signatures
        with torch.no_grad():
            signatures.append(signature(layer, x))
        with torch.inference_mode():
            signatures.append(signature(layer, x))
        assert len(set(signatures)) == len(signatures)
        assert signature(nn.Linear(4, 4), other) == signature(layer, x)


def test_what_may_depend_on_more_has_no_signature() -> None:
    def own(x: Tensor) -> Tensor:
        return x * 2

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()

    with FakeTensorMode():
        x = torch.empty(4, 4)
        assert signature(own, x) is None
        assert signature(Own(4, 4), x) is None
        assert signature(nn.Sequential(Own(4, 4)), x) is None
        assert signature(torch.func.vmap, own, x) is None
        assert signature(Hooked().b, x) is None
        assert signature(Hooked().c, x) is None
        with torch.autocast("cpu"):
            assert signature(nn.Linear(4, 4), x) is None
    assert signature(torch.add, torch.empty(4), 1) is None
