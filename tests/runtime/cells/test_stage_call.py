"""Layers are called by their forward, and yet every hook and every change of a layer after compile counts, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import pipecompile as pc
from pipecompile.runtime.cells.stage_call import StageCode


class Gate(nn.Module):
    """Python decides by a value here."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"one": torch.ones(6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales.one if x.sum() > 0 else x / 2


class Tied(nn.Module):
    """A layer that is called, and whose weight is read as well; and one that is kept whole, of which a part is read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6)))
        self.head, self.gate = nn.Linear(6, 6, bias=False), Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.head(self.body(x)) @ self.head.weight) + self.gate.scales.one


def piped(model: nn.Module, x: torch.Tensor, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 2, example_args=(x,), n_microbatches=2, loss_fn=torch.mean, cost="analytic", devices=["cpu"] * 2,
        **options,
    )  # fmt: skip


def shifted(layer: nn.Module) -> Callable[[], None]:
    return layer.register_forward_hook(lambda _module, _inputs, made: made + 1).remove


def shifted_before(layer: nn.Module) -> Callable[[], None]:
    return layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,)).remove


def tripled_behind(layer: nn.Module) -> Callable[[], None]:
    return layer.register_full_backward_hook(lambda _module, gradients, _: (3 * gradients[0],)).remove


def everywhere(layer: nn.Module) -> Callable[[], None]:
    return register_module_forward_hook(lambda module, _inputs, made: made * 2 if module is layer else None).remove


def another_forward(layer: nn.Module) -> Callable[[], None]:
    own = layer.forward
    layer.forward = lambda x: own(x) * 3  # type: ignore[method-assign]
    return lambda: layer.__dict__.pop("forward")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("change", [shifted, shifted_before, tripled_behind, everywhere, another_forward])
def test_what_is_changed_on_a_layer_between_steps_counts(
    change: Callable[[nn.Module], Callable[[], None]], dispatch: str
) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    pipe = piped(model, x, dispatch=dispatch)
    seen = []
    for turn in range(3):
        for one in (model, plain):
            one.zero_grad()
            undo = change(one.body[1][1]) if turn == 1 else lambda: None
            if one is model:
                loss = pipe.step(x)
            else:
                for part in x.chunk(2):
                    (one(part).mean() / 2).backward()
            undo()
        seen.append(loss)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(seen[0], seen[2])


def test_layers_of_their_own_kind_of_call_are_called() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), Doubled(6, 6)), torch.randn(4, 6)
    wanted = copy.deepcopy(model)(x)
    torch.testing.assert_close(piped(model, x)(x), wanted)


def test_a_stage_module_stays_as_it_is() -> None:
    model, x = Tied(), torch.randn(4, 6)
    pipe = piped(model, x, split_before=["body.1.0"])
    pipe.step(x)
    calls: list[int] = []
    model.body[0].register_forward_hook(lambda *_: calls.append(1))
    pipe.stages[0].module(x)
    assert calls == [1]
    found = {name for stage in pipe.stages for _, name, _ in StageCode.of(stage.module).layers}
    assert found == {"0", "1"}, "of the head and the gate something is read, so they are called as they are"
