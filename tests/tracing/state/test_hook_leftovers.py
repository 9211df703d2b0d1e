"""What hooks leave and the forward takes away: a run of the recording leaves on the model what eager leaves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())


class Extractor(nn.Module):
    """Collects the outputs of two layers by hooks. `make` is a layer of torch, which is one node, or a block, which is recorded through."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(*(make() for _ in range(3)))
        self.seen: Any = {}
        for place in (0, 2):
            self.body[place].register_forward_hook(self.hook(place))

    def hook(self, place: int) -> Any:
        def note(_layer: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if isinstance(self.seen, list):
                self.seen.append(output)
            else:
                self.seen[place] = output

        return note


class Replaced(Extractor):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs, self.seen = self.seen, {}
        return [*outputs.values()]


class Cleared(Extractor):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs = [*self.seen.values()]
        self.seen.clear()
        return outputs


class Popped(Extractor):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        return [self.seen.pop(0), self.seen.pop(2)]


class Listed(Extractor):
    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.seen = []


class ListReplaced(Listed):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs, self.seen = self.seen, []
        return outputs


class ListCleared(Listed):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs = [*self.seen]
        self.seen.clear()
        return outputs


class ListClearedFirst(Listed):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.seen.clear()
        self.body(x)
        return [*self.seen]


class ListShared(Listed):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.seen.clear()
        self.seen.append(2 * x)
        self.body(x)
        return self.seen[1:]


class ByDevice(Extractor):
    """As `FeatureHookNet` of timm does."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.seen = defaultdict(OrderedDict)

    def hook(self, place: int) -> Any:
        def note(_layer: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.seen[output.device][place] = output

        return note

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs, self.seen[x.device] = self.seen[x.device], OrderedDict()
        return [*outputs.values()]


class InAttributes(Extractor):
    def hook(self, place: int) -> Any:
        return lambda _layer, _args, output: setattr(self, f"seen{place}", output)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.body(x)
        outputs = [self.seen0, self.seen2]
        self.seen0 = None
        del self.seen2
        return outputs


def left_on(model: Extractor) -> list[Any]:
    """Return what hooks have left in attributes, with shapes for tensors."""
    return [shapes(vars(model).get(name)) for name in ("seen", "seen0", "seen2")]


def shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [*map(shapes, value)] if isinstance(value, list) else getattr(value, "shape", value)


KINDS = (Replaced, Cleared, Popped, ListReplaced, ListCleared, ListClearedFirst, ListShared, ByDevice, InAttributes)


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0].square().mean() + outputs[1].mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), Block])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_leaves_is_what_the_loop_leaves(kind: type[Extractor], make: Any, is_called: bool) -> None:
    x, models = torch.randn(4, 4), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(make))
        if is_called:
            models[-1](x)
    model, eager = models
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, example_args=(x,), n_microbatches=2, loss_fn=loss_of, cost="analytic"
    )
    for _ in range(2):
        loss = pipe.step(x)
        assert torch.equal(loss, sum(loss_of(eager(part)) for part in x.chunk(2)) / 2)
        assert left_on(model) == left_on(eager)
    with torch.no_grad():
        wanted = [torch.cat(parts) for parts in zip(*map(eager, x.chunk(2)), strict=True)]
        assert all(map(torch.equal, pipe(x), wanted))
        eager(x)
    assert left_on(model) == left_on(eager)


class Doubling(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        outputs, self.seen = self.seen, []
        return x + sum(outputs)


def test_a_layer_that_is_recorded_through_is_guarded() -> None:
    x, models = torch.randn(4, 4), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Doubling(lambda: nn.LayerNorm(4)))
    model, eager = models
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, example_args=(x,), n_microbatches=2, cost="analytic")
    assert torch.equal(pipe(x), eager(x))
    for one in models:
        one.body[2].eps = 0.5
    assert torch.equal(pipe(x), eager(x))
    for one in models:
        one.body[2].register_forward_hook(lambda _layer, _args, output: 2 * output)
    assert torch.equal(pipe(x), eager(x))


class Scaling(nn.Module):
    """Leaves a number, a tensor and a buffer that a hook of a later layer reads in the same forward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.what, self.held = what, {"scale": 1.0}
        self.register_buffer("moved", torch.ones(1))
        self.scale = 1.0
        self.second.register_forward_pre_hook(self.scaled)

    def scaled(self, layer, inputs):
        factor = {"buffer": self.moved, "dict": self.held["scale"]}.get(self.what, self.scale)
        return (inputs[0] * factor,)

    def forward(self, x):
        h = self.first(x)
        if self.what == "buffer":
            self.moved = 2 * torch.ones(1)
        elif self.what == "dict":
            self.held["scale"] = 3.0
        else:
            self.scale = 2.0 if self.what == "number" else h.detach().abs().amax(1, keepdim=True)
        return self.last(self.second(h).relu())


@pytest.mark.parametrize("what", ["number", "tensor", "buffer", "dict"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_reads_what_the_same_forward_has_left(what, count):
    model, eager = Scaling(what), Scaling(what)
    eager.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, n_microbatches=count, loss_fn=nn.functional.mse_loss, cost="analytic")
    for _ in range(2):
        x = torch.randn(2 * count, 4)
        pipe.step(x, target=x)
        for part in x.chunk(count):
            (nn.functional.mse_loss(eager(part), part) / count).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
