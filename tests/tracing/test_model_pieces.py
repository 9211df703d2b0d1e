"""Candidates are the pieces that an exception passed through; routed calls reach the handler once and in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.model_pieces import (
    Piece,
    add_candidate,
    candidates,
    piece_calls_intercepted,
    same_class_pieces,
)


class Part(nn.Module):
    def step(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise ZeroDivisionError
        return x + 1

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        return self.step(x, fails)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), nn.Sequential(Part())

    def finish(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        return self.second[0](x, fails)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        return self.finish(self.first(x), fails)


def test_candidates_come_with_the_smallest_first_and_without_the_whole_model() -> None:
    model = Model()
    with pytest.raises(ZeroDivisionError) as caught:
        model(torch.ones(2), fails=True)
    call = Piece("", "exp", "model.py:3 in forward")
    add_candidate(caught.value, call)
    add_candidate(caught.value, Piece("", "log", "model.py:4 in forward"))
    expected = [Piece("second.0", "step"), Piece("second.0"), Piece("", "finish"), call]
    assert list(candidates(caught.value, model, "PC199")) == expected
    assert [piece.name for piece in expected] == ["second.0.step", "second.0", "finish", "exp"]


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.sum() > 1 / 0:
                x = layer(x)
        return x


def test_blocks_of_a_loop_come_before_a_module_that_is_most_of_the_model() -> None:
    model = nn.Sequential(Looped(), nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError) as caught:
        model(torch.ones(1, 2))
    found = [piece.text for piece in candidates(caught.value, model, "PC101")]
    first = Looped.forward.__code__.co_firstlineno
    assert found[:2] == [f"0.forward, lines {first + 2} to {first + 3}", f"0.forward, lines {first + 1} to {first + 3}"]
    assert found[-1] == "0"
    assert [piece.text for piece in candidates(caught.value, model, "PC103")] == ["0"]
    with pytest.raises(ZeroDivisionError) as caught:
        nn.Sequential(model[0])(torch.ones(1, 2))
    assert [piece.text for piece in candidates(caught.value, nn.Sequential(model[0]), "PC103")] == found


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 2:
            x = x / x.abs().max()
        return self.layers(x)


class Selecting(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        return h[x > 0].square().mean()


class Wrapper(nn.Module):
    """Has the model as most of itself, and a module whose failures concern a small part."""

    def __init__(self, model: nn.Module, small: nn.Module) -> None:
        super().__init__()
        self.model, self.small = model, small

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.small(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if float(x.sum()) > 0 else x


@pytest.mark.parametrize("kind", [Branching, Selecting])
def test_the_model_in_a_wrapper_is_cut_as_the_model_itself(kind: type[nn.Module]) -> None:
    x = torch.randn(4, 4)
    alone, wrapped = (pc.trace(model, x) for model in (kind(), Wrapper(kind(), nn.Identity())))
    assert len(wrapped.graph.nodes) >= len(alone.graph.nodes)
    assert [reason.piece.path for reason in wrapped.facts.kept if reason.piece.is_module] == []
    small = pc.trace(Wrapper(kind(), Small()), x)
    assert Piece("small") in [reason.piece for reason in small.facts.kept]


def test_pieces_of_the_same_class() -> None:
    assert same_class_pieces(Piece("first", "step"), Model()) == (Piece("first", "step"), Piece("second.0", "step"))


def test_calls_are_routed_but_not_those_inside_them() -> None:
    model, seen = Model(), []
    original = nn.Module.__call__, Part.step

    def handle(piece: Piece, run: Any, args: Any, kwargs: Any) -> Any:
        seen.append(piece)
        return run(*args, **kwargs) * 10

    pieces = [Piece("first"), Piece("first", "step"), Piece("second.0", "step")]
    with piece_calls_intercepted(model, pieces, handle):
        made = model(torch.zeros(1))
    assert seen == [Piece("first"), Piece("second.0", "step")]
    assert made.item() == 110
    assert (nn.Module.__call__, Part.step) == original
    assert model(torch.zeros(1)).item() == 2


def test_methods_are_put_back_after_a_failure() -> None:
    model, original = Model(), Part.step
    with pytest.raises(ZeroDivisionError), piece_calls_intercepted(model, [Piece("first", "step")], lambda *_: 1 / 0):
        model(torch.zeros(1))
    assert Part.step is original


def _renamed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * (2 if x.sum().item() > 0 else 3)


def _of_instance() -> nn.Module:
    part = nn.Tanh()
    part.forward = lambda x: x.tanh() * (2 if x.sum().item() > 0 else 3)  # type: ignore[method-assign]
    return part


def _hooked() -> nn.Module:
    part = nn.Tanh()
    part.register_forward_hook(lambda *call: call[2] * (2 if call[2].sum().item() > 0 else 3))
    return part


CALLED = {
    "a forward of another name": lambda: type("Renamed", (nn.Module,), {"forward": _renamed})(),
    "a forward of the instance": _of_instance,
    "a hook": _hooked,
}


@pytest.mark.parametrize("case", CALLED)
def test_a_module_is_a_piece_whatever_its_call_runs(case: str) -> None:
    model = nn.Sequential(nn.Linear(2, 9), nn.Linear(9, 2), CALLED[case](), nn.Linear(2, 2))
    assert [part.name for part in pc.explain(model, torch.randn(4, 2)).kept_whole] == ["2"]
    pipe, x = pc.compile(model, 2, n_microbatches=1, cost="analytic"), torch.randn(4, 2)
    torch.testing.assert_close(pipe(x), model(x))
