"""What a call leaves on a model, written by nodes at every run, or by none."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.state.effect_nodes import effect_function, effects_muted
from pipecompile.tracing.state.leftover_state import StateWatch


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.latest, self.recent = 0, [], None, deque([1, 2], maxlen=2)
        self.register_buffer("mean", torch.zeros(2))


def test_items_of_a_list_are_replaced_or_added_and_anything_else_is_no_node() -> None:
    model = Leaving()
    a, b, c = torch.ones(1), torch.zeros(1), torch.ones(2)
    model.seen = [a, b]

    def change(*now: torch.Tensor) -> list[tuple[object, bool]]:
        watch = StateWatch(model)
        model.seen[:] = now
        found = [(found.key, effect_function(found, found.value, model) is not None) for found in watch.changes()]
        model.seen[:] = [a, b]
        return found

    assert change(a, c) == [(1, True)]
    assert change(a, b, c) == [(None, True)]
    assert change(c, b, c) == [(0, True), (None, True)]
    assert change(b, c) == [(None, False)]
    assert change(a) == [(None, False)]


@pytest.mark.parametrize(("later", "written"), [(2, True), (4, False)])
def test_a_count_is_advanced_when_every_call_advances_it_alike(later: int, written: bool) -> None:
    model = Leaving()
    watch = StateWatch(model)
    model.calls = 1
    (change,) = watch.changes()
    advance = effect_function(change, later, model)
    assert (advance is not None) == written
    if written:
        advance()
        assert model.calls == 2
        with effects_muted():
            advance()
        assert model.calls == 2


def test_a_number_that_each_call_sets_is_kept() -> None:
    model = Leaving()
    watch = StateWatch(model)
    model.calls = 5
    (change,) = watch.changes()
    keep = effect_function(change, 5, model)
    model.calls = 0
    keep(5)
    assert (keep.__name__, model.calls) == ("keep", 5)


@pytest.mark.parametrize(
    ("later", "is_made"), [(None, True), ("x", True), ("xx", False), (("x",), False), (torch.ones(2), False)]
)
def test_a_plain_value_is_kept_only_if_each_call_leaves_the_same(later: object, is_made: bool) -> None:
    model = Leaving()
    watch = StateWatch(model)
    model.latest = "x"
    (change,) = watch.changes()
    assert (effect_function(change, later, model) is not None) == is_made


class Logging(nn.Module):
    """Writes down what each call is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.calls = nn.Linear(4, 4), kind, 0
        self.log: list[Any] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.widths: set[int] = set()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        getattr(self, self.kind)(x)
        return self.layer(x)

    def numbers(self, x: torch.Tensor) -> None:
        self.log.append(self.calls)
        self.recent.append(self.calls)

    def once(self, x: torch.Tensor) -> None:
        if not self.log:
            self.log.append("seen")

    def seen(self, x: torch.Tensor) -> None:
        self.widths.add(self.calls)

    def items(self, x: torch.Tensor) -> None:
        self.log.append((self.calls, x.detach()))

    def pair(self, x: torch.Tensor) -> None:
        self.last = {"call": self.calls, "input": x.detach()}

    def width(self, x: torch.Tensor) -> None:
        self.widths.add(x.shape[-1])
        self.log.append(("width", x.shape[-1]))


def trained(kind: str, *, in_pipe: bool) -> list[Any]:
    """Return what three steps leave on a model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Logging(kind), nn.Linear(4, 4)), torch.randn(4, 4)
    if in_pipe:
        pipe = pc.compile(
            model, 2, n_microbatches=2, loss_fn=torch.mean, cost="analytic", devices=["cpu"] * 2, checkpoint="always"
        )
    for _ in range(3):
        if in_pipe:
            pipe.step(x)
        else:
            for part in x.split(2):
                (model(part).mean() / 2).backward()
    logging = vars(model[1])
    return [logging[name] for name in ("log", "recent", "widths", "last")]


@pytest.mark.parametrize("kind", ["items", "pair", "width"])
def test_what_each_call_leaves_is_left_as_in_eager(kind: str) -> None:
    assert str(trained(kind, in_pipe=True)) == str(trained(kind, in_pipe=False))


@pytest.mark.parametrize("kind", ["numbers", "once", "seen"])
def test_a_warning_names_what_each_call_leaves_otherwise(kind: str) -> None:
    with pytest.warns(RecordingWarning, match=r"forward changes .*1\.(log|widths).* in a way that a graph cannot"):
        made = trained(kind, in_pipe=True)
    assert made[:3] == [[], deque(), set()]


class Caching(nn.Module):
    """Registers a table at its first call, beside what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        return self.layer(x + self.table)  # type: ignore[no-any-return]


def test_a_buffer_that_a_call_registers_beside_what_is_saved_is_not_saved(recwarn: pytest.WarningsRecorder) -> None:
    model, x = nn.Sequential(Caching(), Caching()), torch.randn(4, 4)
    saved = list(model.state_dict())
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=torch.mean, cost="analytic", devices=["cpu"] * 2)
    for _ in range(2):
        pipe.step(x)
    assert [name for name, _ in model.named_buffers()] == ["0.table", "1.table"]
    assert list(pipe.state_dict()) == list(model.state_dict()) == saved
    assert not [one for one in recwarn if issubclass(one.category, RecordingWarning)]


def test_a_number_that_is_kept_by_the_batch_size_has_a_number_as_its_key() -> None:
    """The key was the symbol of the recording, which has no hash in a run."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.scales: dict[int, float] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) not in self.scales:
                self.scales[len(x)] = len(x) ** -0.5
            return super().forward(x) * self.scales[len(x)]

    model, x = Scaled(), torch.randn(8, 3)
    pipe = pc.compile(model, 1, n_microbatches=2, cost="analytic", devices=["cpu"], loss_fn=lambda y: y.square().mean())
    expected = torch.stack([(model(part)).square().mean() for part in x.chunk(2)]).mean().item()
    model.scales.clear()
    for _ in range(2):
        assert pipe.step(x).item() == pytest.approx(expected)
