"""State outside of the model that a loss or a hook changes: it changes once a call of a step, as in the plain loop, wherever it is."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import random
import threading
import types
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.runtime import dispatch
from tests.support.eager import square_loss

COUNT = 0
LAST: ContextVar[int] = ContextVar("LAST", default=0)


class OfClass:
    count = 0


class Meta(type):
    count = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


ITEMS, ARRAY, COUNTER, QUEUE = [0], np.zeros(1), collections.Counter[str](), collections.deque([0])
OBJECT, SLOTTED, MODULE, THREAD = (
    types.SimpleNamespace(count=0),
    Slotted(),
    types.ModuleType("settings"),
    threading.local(),
)
TORCH, PYTHON, NUMPY = torch.Generator(), random.Random(), np.random.default_rng()
STEPS: Any = itertools.count()
WEIGHTS: Any = None


def of_class() -> float:
    OfClass.count += 1
    return OfClass.count


def of_metaclass() -> float:
    Meta.count += 1
    return Meta.count


def of_global() -> float:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return COUNT


def of_containers() -> float:
    ITEMS[0] += 1
    ARRAY[0] += 1
    COUNTER["calls"] += 1
    QUEUE[0] += 1
    return float(ITEMS[0] + ARRAY[0] + COUNTER["calls"] + QUEUE[0])


def of_objects() -> float:
    OBJECT.count += 1
    SLOTTED.count += 1
    MODULE.count += 1  # type: ignore[attr-defined]
    return float(OBJECT.count + SLOTTED.count + MODULE.count)  # type: ignore[attr-defined]


def of_function() -> float:
    of_function.count += 1  # type: ignore[attr-defined]
    return float(of_function.count)  # type: ignore[attr-defined]


def of_context() -> float:
    LAST.set(LAST.get() + 1)
    return LAST.get()


def of_thread() -> float:
    THREAD.count = getattr(THREAD, "count", 0) + 1
    return float(THREAD.count)


def of_generators() -> float:
    return float(torch.rand((), generator=TORCH)) + PYTHON.random() + NUMPY.random()


def of_iterators() -> float:
    return float(next(STEPS) + next(WEIGHTS))


KINDS: list[Callable[[], float]] = [
    of_class, of_metaclass, of_global, of_containers, of_objects, of_function, of_context, of_thread, of_generators, of_iterators,
]  # fmt: skip


def begin() -> None:
    """Set all state to its begin."""
    global COUNT, STEPS, WEIGHTS, NUMPY  # noqa: PLW0603
    COUNT = OfClass.count = Meta.count = ITEMS[0] = QUEUE[0] = OBJECT.count = SLOTTED.count = THREAD.count = 0
    MODULE.count = of_function.count = 0  # type: ignore[attr-defined]
    ARRAY[0] = 0
    COUNTER.clear()
    LAST.set(0)
    TORCH.manual_seed(0)
    PYTHON.seed(0)
    NUMPY = np.random.default_rng(0)
    STEPS, WEIGHTS = itertools.count(1), (i * i for i in range(1000))


class Loss:
    """Scaled by a value per kind; `seen` has those of each call."""

    def __init__(self, kinds: list[Callable[[], float]], *, branches: bool) -> None:
        self.kinds, self.branches, self.seen = kinds, branches, list[list[float]]()

    def __call__(self, made: Tensor, target: Tensor) -> Tensor:
        self.seen.append([kind() for kind in self.kinds])
        loss = F.cross_entropy(made, target) * (1 + 0.01 * sum(self.seen[-1]))
        if self.branches and loss.item() > 1e6:
            raise ValueError
        return loss


def layers(*hooks: Callable[..., Any]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for hook in hooks:
        model[0].register_forward_hook(hook)
    return model


def trained(model: nn.Module, loss: Any, options: dict[str, Any] | None) -> list[float]:
    """Return the losses of three steps, of a pipeline or of the plain loop."""
    torch.manual_seed(1)
    x, target = torch.randn(8, 8), torch.randint(4, (8,))
    begin()
    if options is None:
        parts = [(x[i : i + 2], target[i : i + 2]) for i in range(0, 8, 2)]
        return [sum(float(loss(model(one), label).detach()) / 4 for one, label in parts) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pc.compile(model, n_stages=2, n_microbatches=4, loss_fn=loss, **options)
        return [float(pipe.step(x, target=target)) for _ in range(3)]


RECOMPUTED = {"schedule": "gpipe", "checkpoint": "always"}


@pytest.mark.parametrize("branches", [False, True], ids=["recorded", "measured"])
@pytest.mark.parametrize("options", [{"dispatch": "inline"}, {"dispatch": "threads"}, RECOMPUTED], ids=str)
def test_a_loss_changes_state_once_a_call(options: dict[str, Any], branches: bool) -> None:
    left_out = {"threads": [of_thread], "inline": []}.get(options.get("dispatch", ""), [of_iterators])
    kinds = [kind for kind in KINDS if kind not in left_out]
    wanted, loss = Loss(kinds, branches=branches), Loss(kinds, branches=branches)
    expected = trained(layers(), wanted, None)
    assert trained(layers(), loss, options) == pytest.approx(expected, rel=1e-5)
    assert loss.seen == wanted.seen


def test_a_loss_that_reads_a_local_of_its_thread_stays_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long cells took the third step to other threads, where a `threading.local` begins anew."""
    monkeypatch.setattr(dispatch, "THREAD_SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    wanted, loss = Loss([of_thread], branches=False), Loss([of_thread], branches=False)
    expected = trained(layers(), wanted, None)
    assert trained(layers(), loss, {}) == pytest.approx(expected, rel=1e-5)
    assert loss.seen == wanted.seen


def test_threads_that_are_asked_for_warn_of_a_local_of_a_thread() -> None:
    pipe = pc.compile(layers(), 2, n_microbatches=4, loss_fn=Loss([of_thread], branches=False), dispatch="threads")
    with pytest.warns(
        pc.RecordingWarning, match=r"Loss reads a threading.local, .* Try dispatch='inline', or a contextvars"
    ):
        pipe.step(torch.randn(8, 8), target=torch.randint(4, (8,)))


@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=str)
def test_hooks_of_layers_change_state_once_a_call(options: dict[str, Any]) -> None:
    kinds = [kind for kind in KINDS if kind not in (of_generators, of_iterators)]
    seen: list[list[float]] = []

    def hook(_layer: nn.Module, _inputs: Any, made: Tensor) -> Tensor:
        seen.append([kind() for kind in kinds])
        return made * (1 + 0.01 * sum(seen[-1]))

    expected = trained(layers(hook), F.cross_entropy, None)
    wanted = [*seen]
    seen.clear()
    assert trained(layers(hook), F.cross_entropy, options) == pytest.approx(expected, rel=1e-5)
    assert seen == wanted


class Scaled(nn.Module):
    """Changes what is outside in its forward."""

    def __init__(self, kind: Callable[[], float]) -> None:
        super().__init__()
        self.kind, self.inner, self.head = kind, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) * (1 + 0.01 * self.kind()))


@pytest.mark.parametrize("kind", [one for one in KINDS if one not in (of_generators, of_iterators)])
def test_a_forward_that_changes_it_is_warned_of_and_leaves_it(kind: Callable[[], float]) -> None:
    begin()
    pipe = pc.compile(Scaled(kind), n_stages=2, n_microbatches=4, loss_fn=F.cross_entropy)
    with pytest.warns(pc.RecordingWarning, match="is not part of the model: a pipeline leaves it as it is"):
        pipe.step(torch.randn(8, 8), target=torch.randint(4, (8,)))
    before = kind()
    begin()
    assert kind() == before


@pytest.mark.parametrize("options", [{"dispatch": "inline"}, {"dispatch": "threads"}], ids=str)
def test_what_a_loss_and_hooks_print_is_printed_once_a_call(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def loss(made: Tensor, target: Tensor) -> Tensor:
        lost = F.cross_entropy(made, target)
        print(f"{lost.item():.4f}")
        logging.getLogger("training").warning("%.4f", lost.item())
        return lost

    trained(layers(), loss, None)
    wanted, logged = capsys.readouterr().out, [record.getMessage() for record in caplog.records]
    caplog.clear()
    trained(layers(), loss, options)
    assert capsys.readouterr().out == wanted
    assert [record.getMessage() for record in caplog.records if record.name == "training"] == logged


CALLS = {"forward": 0, "backward": 0}


class Halved(torch.autograd.Function):
    """Counts its calls in a global and on its class."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS["forward"] += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        CALLS["backward"] += 1
        Halved.calls += 1
        return gradient / 2


class Halving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Halved.apply(x)


@pytest.mark.parametrize("cost", ["analytic", "profile"])
def test_measurements_leave_no_trace_of_autograd_functions(cost: str) -> None:
    CALLS.update(forward=0, backward=0)
    Halved.calls = 0
    pipe = pc.compile(
        nn.Sequential(nn.Linear(4, 4), Halving(), nn.Linear(4, 4)), 2, n_microbatches=2, loss_fn=square_loss, cost=cost
    )
    pipe.step(torch.randn(4, 4))
    assert (CALLS, Halved.calls) == ({"forward": 2, "backward": 2}, 2)
    pipe(torch.randn(4, 4)).sum().backward()
    assert (CALLS, Halved.calls) == ({"forward": 4, "backward": 4}, 4)
