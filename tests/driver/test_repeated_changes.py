"""State that every micro-batch of `pipe(x)` changes is named in a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

import pipecompile as pc
from pipecompile.driver.repeated_changes import repeated_changes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.change(h)
        return self.second(h)

    def change(self, h: torch.Tensor) -> None:
        """Change state."""


class Counts(Net):
    def change(self, h: torch.Tensor) -> None:
        self.calls += 1


class Decays(Net):
    def change(self, h: torch.Tensor) -> None:
        self.second.weight.data.mul_(0.9)


class Branches(Net):
    def change(self, h: torch.Tensor) -> None:
        if float(self.second.weight.detach().amax()) > 0:
            self.second.weight.data.mul_(0.9)


class Clamps(Net):
    def change(self, h: torch.Tensor) -> None:
        self.second.weight.data.clamp_(-0.1, 0.1)


class Spread(Net):
    def change(self, h: torch.Tensor) -> None:
        self.spread = h.detach().std()


class Queue(Net):
    """Takes a position out of a buffer, in statements that are kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("queue", torch.zeros(4, 12))

    def change(self, h: torch.Tensor) -> None:
        self.shown = self.queue.sum()
        first = int(self.place)
        self.queue[:, first : first + len(h)] = h.detach().T
        self.place[0] = (first + len(h)) % 12


class Carries(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(4)

    def change(self, h: torch.Tensor) -> None:
        self.state = (h + self.state).detach().mean(0)


def messages(model: nn.Module, **options: Any) -> list[str]:
    pipe = pc.compile(model, 1, n_microbatches=2, cost="analytic", devices=["cpu"], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(torch.randn(6, 4))
    return [str(one.message) for one in caught if issubclass(one.category, pc.RecordingWarning)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, "calls"),
        (Decays, "second.weight"),
        (Branches, "second.weight"),
        (Queue, "place, queue"),
        (Carries, "state"),
    ],
)
def test_a_change_in_place_is_warned_of(kind: type[Net], name: str) -> None:
    assert any(
        one.startswith(f"forward changes {name}: in pipe(x) once for each micro-batch") for one in messages(kind())
    )


class Normed(Net):
    """Advances a vector of its own in each call, by torch's own layer or hook."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.first)


class NormedByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.first)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_pre_hook(self.scale)

    def scale(self, layer: nn.Linear, args: Any) -> None:
        layer.weight.data.mul_(0.9)


class Exchanged(Hooked):
    def scale(self, layer: nn.Linear, args: Any) -> None:
        layer.weight.data = layer.weight.data * 0.9


class OfAnother(Hooked):
    def scale(self, layer: nn.Linear, args: Any) -> None:
        self.second.weight.data.mul_(0.9)


class NormedInPiece(Normed):
    """Keeps a submodule whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(_Decides())


class _Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        return h if float(h.detach().abs().sum()) > 0 else -h


_FIRST = "first.parametrizations.weight.0"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Normed, f"{_FIRST}._u, {_FIRST}._v"),
        (NormedByHook, "first.weight_u, first.weight_v"),
        (Hooked, "first.weight"),
        (Exchanged, "first.weight"),
        (OfAnother, "second.weight"),
        (NormedInPiece, "first.0.layer.parametrizations.weight.0._u, first.0.layer.parametrizations.weight.0._v"),
    ],
)
def test_what_layers_and_their_hooks_write_is_warned_of(kind: type[Net], names: str) -> None:
    """They advanced once for each micro-batch, without a word."""
    assert any(one.startswith(f"forward changes {names}: in pipe(x) once") for one in messages(kind()))


class Renormalised(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 5, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(index))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_table_with_a_greatest_norm_is_warned_of_if_something_else_reads_it(is_tied: bool) -> None:
    """A micro-batch scales the rows that it reads, as the mini-batch does; a head reads them all."""
    model = Renormalised(is_tied=is_tied)
    graph = pc.trace(model, torch.randint(5, (4, 3)))
    assert repeated_changes(graph, model) == ["table.weight"] * is_tied


@pytest.mark.parametrize("layer", [nn.InstanceNorm1d(4, track_running_stats=True), orthogonal(nn.Linear(4, 4))])
def test_layers_that_write_nothing_of_their_own_are_not(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    assert repeated_changes(pc.trace(model, torch.randn(3, 4, 4)), model) == []


def test_what_cannot_be_merged_is_warned_of() -> None:
    assert any("what forward leaves in 'spread' cannot be put together" in one for one in messages(Spread()))


def test_a_change_that_repeats_nothing_is_not() -> None:
    model = Clamps()
    assert repeated_changes(pc.trace(model, torch.randn(4, 4)), model) == []
    assert messages(model) == []


class _NormAct(nn.BatchNorm1d):
    """A BatchNorm layer with a forward of its own, as those of timm are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        mean, variance = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, variance, self.weight, self.bias, True, 0.1).relu()


class Normalises(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), _NormAct(4))


@pytest.mark.parametrize("batch_norm", [None, "each", "deferred"])
def test_batch_norm_has_a_warning_of_its_own(batch_norm: str | None) -> None:
    """Every model of timm got a second one, with `batch_norm="each"` too, by which users say that they know."""
    found = messages(Normalises(), batch_norm=batch_norm)
    assert len(found) == (batch_norm is None)
    assert all("running statistics once per micro-batch" in one for one in found)


class Decides(Net):
    """Is recorded for each batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.latest = 0, torch.zeros(1)

    def change(self, h: torch.Tensor) -> None:
        self.scale = torch.ones(3) if len(h) == 3 else torch.zeros(3)


class LeavesFeatures(Decides):
    def change(self, h: torch.Tensor) -> None:
        super().change(h)
        self.latest = h.detach()


class CountsCalls(Decides):
    def change(self, h: torch.Tensor) -> None:
        super().change(h)
        self.seen += 1


@pytest.mark.parametrize(("kind", "name"), [(Decides, ""), (LeavesFeatures, "latest"), (CountsCalls, "seen")])
def test_what_a_recording_for_one_batch_size_leaves_is_warned_of(kind: type[Net], name: str) -> None:
    """It was that of the last micro-batch, or of all, without a word."""
    found = [one for one in messages(kind()) if "cannot be put together" in one]
    assert len(found) == bool(name)
    assert all(one.startswith(f"what forward leaves in {name!r} ") for one in found)


class Stores(Hooked):
    def scale(self, layer: nn.Linear, args: Any) -> None:
        layer.seen = args[0]


class Looks(Hooked):
    def scale(self, layer: nn.Linear, args: Any) -> None:
        assert len(args) == 1


class KeepsInPiece(Net):
    def change(self, h: torch.Tensor) -> None:
        if float(h.detach().sum()) < 1e9:
            self.kept = h.detach()


@pytest.mark.parametrize(
    ("kind", "name"), [(Stores, "first.seen"), (Looks, ""), (NormedByHook, ""), (KeepsInPiece, "kept")]
)
def test_what_hooks_and_pieces_leave_is_warned_of(kind: type[Net], name: str) -> None:
    """Lists had an item for each micro-batch, and attributes what the last one left, without a word."""
    found = [one for one in messages(kind()) if "pieces kept whole, leave" in one]
    assert len(found) == bool(name)
    assert all(f" leave {name}: in pipe(x) once" in one for one in found)
