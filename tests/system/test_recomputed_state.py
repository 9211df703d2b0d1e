"""State that forwards, hooks and losses change, with several micro-batches in flight and with recomputation: it is that of the plain loop."""

from __future__ import annotations

import copy
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Kept(nn.Module):
    """Branches on a value, and is kept whole. `n` has counts in several kinds of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.set_up()

    def set_up(self) -> None:
        """Make the state."""

    def forward(self, x):
        return self.run(x) if x.sum() < 1e9 else x


class Counter(Kept):
    def set_up(self) -> None:
        self.calls, self.config, self.kinds = 0, SimpleNamespace(calls=0), {}

    def run(self, x):
        self.calls += 1
        self.config.calls += 1
        kind = bool(x.sum() > 0)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return self.layer(x) * (1 + self.calls % 2) + self.config.calls + self.kinds[kind]


class Memory(Kept):
    """Reads what earlier micro-batches left."""

    def set_up(self) -> None:
        self.hidden, self.queue = None, deque(maxlen=2)

    def run(self, x):
        y = self.layer(x)
        for old in self.queue:
            y = y + old.mean(0)
        y = y if self.hidden is None else y + self.hidden.mean(0)
        self.hidden = y.detach()
        self.queue.append(x.detach())
        return y


class Averages(Kept):
    """Writes an attribute, a buffer and a parameter in place and uses what it wrote. Autograd saves it."""

    def set_up(self) -> None:
        self.plain, self.teacher = torch.ones(8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("replaced", torch.ones(8))

    def run(self, x):
        with torch.no_grad():
            for tensor in (self.plain, self.scale, self.teacher.bias, self.teacher.weight):
                tensor.mul_(0.5).add_(x.abs().mean(0))
        self.replaced = self.replaced * 0.5 + x.detach().mean(0)
        return self.teacher(self.layer(x * self.plain / self.scale)) * self.replaced


class Sometimes(Kept):
    """Changes its state in some micro-batches alone."""

    def set_up(self) -> None:
        self.calls, self.total = 0, torch.zeros(8)

    def run(self, x):
        if x.mean() > 0:
            self.calls += 1
            self.total += x.detach().mean(0)
        return self.layer(x) * (1 + self.calls) + self.total


class Around(nn.Module):
    def __init__(self, kept: nn.Module) -> None:
        super().__init__()
        self.a, self.kept, self.b, self.o = nn.Linear(8, 8), kept, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.o(self.b(self.kept(self.a(x))))


class Method(nn.Module):
    """A method and a statement of the model, kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.calls, self.history, self.hits = 0, [], []

    def middle(self, x):
        self.calls += 1
        if x.sum() > 0:
            self.history.append(self.calls)
        return self.b(x) * (1 + self.calls % 2)

    def forward(self, x):
        x = self.middle(self.a(x))
        if x.mean() > 0:
            self.hits.append("positive")
            x = self.c(x) * len(self.hits)
        return self.o(x)


class Scaled(nn.Module):
    """Is recorded: a buffer is written and then used. Autograd saves it, and later micro-batches write it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        x = self.a(x)
        self.scale.copy_(self.scale * 0.5 + x.detach().abs().mean(0))
        return self.o(self.b(x / self.scale))


class Frozen(nn.Module):
    """Normalises by running statistics in evaluation mode, and updates them in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.a(x)
        self.norm.eval()
        fixed = self.norm(x)
        self.norm.train()
        return self.o(self.b(fixed * self.norm(x)))


class Hook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + self.calls % 3)


def hooked() -> nn.Module:
    model = Around(nn.Linear(8, 8))
    model.kept.register_forward_hook(Hook())
    return model


class Loss(nn.Module):
    """Counts, keeps an average in a buffer, and replaces a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean, self.seen = 0, 1.0, []
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, output, target):
        self.calls += 1
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        loss = (output - target - self.centre).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.seen.append(self.calls)
        return loss / self.mean * self.calls


def square(output, target):
    return (output - target).square().mean()


CASES = {
    "counter": (lambda: Around(Counter()), lambda: square),
    "memory": (lambda: Around(Memory()), lambda: square),
    "averages": (lambda: Around(Averages()), lambda: square),
    "sometimes": (lambda: Around(Sometimes()), lambda: square),
    "method": (Method, lambda: square),
    "scaled": (Scaled, lambda: square),
    "frozen": (Frozen, lambda: square),
    "hook": (hooked, lambda: square),
    "loss": (lambda: Around(nn.Linear(8, 8)), Loss),
    "memory and loss": (lambda: Around(Memory()), Loss),
}


def plain(value: Any) -> Any:
    """Return the state of modules, hooks and losses in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (list, tuple, deque)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if not str(key).startswith("_backward")}
    return plain(vars(value)) if isinstance(value, (nn.Module, Hook, SimpleNamespace)) else repr(value)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", [False, True, False]])
@pytest.mark.parametrize("run", [{}, {"schedule": "gpipe"}, {"schedule": "gpipe", "dispatch": "threads"}], ids=str)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.sampled(5)
def test_state_is_that_of_the_loop(kind: str, run: dict[str, str], checkpoint: Any) -> None:
    torch.manual_seed(0)
    checkpoint = "always" if kind == "averages" and checkpoint not in ("always", "except_last") else checkpoint
    make_model, make_loss = CASES[kind]
    model, loss_fn = make_model(), make_loss()
    eager, eager_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    pipe = pc.compile(model, 3, n_microbatches=4, loss_fn=loss_fn, cost="analytic", checkpoint=checkpoint, **run)
    for scale in (1.0, 0.3, 2.0):
        x, target = scale * torch.randn(16, 8), torch.randn(16, 8)
        expected = 0.0
        for part, its_target in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = eager_loss(eager(part), its_target) / 4
            loss.backward()
            expected += loss.item()
        assert pipe.step(x, target=target).item() == pytest.approx(expected, rel=1e-5)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
        assert plain(model) == plain(eager)
        assert plain(loss_fn) == plain(eager_loss)
        model.zero_grad()
        eager.zero_grad()


def test_an_attribute_that_later_micro_batches_overwrite_is_an_error_with_a_way_out() -> None:
    pipe = pc.compile(Around(Averages()), 2, n_microbatches=4, loss_fn=square, cost="analytic")
    with pytest.raises(pc.RunError, match=r'(?s)inplace operation.*later micro-batch.*try +checkpoint="always"'):
        pipe.step(torch.randn(16, 8), target=torch.randn(16, 8))


class Slow(Sometimes):
    """Takes 5 ms forward, so that the next stage is not behind, and 20 ms backward."""

    def run(self, x):
        time.sleep(0.005)
        y = super().run(x)
        y.register_hook(lambda _gradient: time.sleep(0.02))
        return y


class SlowAgain(Kept):
    """Takes 15 ms when it is recomputed: the recomputation of micro-batch 2 begins in the backward of `Slow`, and ends after it."""

    def run(self, x):
        time.sleep(0.015 if pc.is_recomputing() else 0)
        return self.layer(x)


def test_a_backward_in_threads_is_not_seen_by_the_recomputation_of_another_stage() -> None:
    """The backward finds the attributes of its own micro-batch. The recomputation would put them back for good."""
    torch.manual_seed(0)
    model = Around(Slow())
    model.b = SlowAgain()
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, n_microbatches=4, loss_fn=square, cost="analytic", checkpoint="always", schedule="gpipe", dispatch="threads"
    )  # fmt: skip
    for _ in range(5):
        x = torch.randn(16, 8)
        for part in x.chunk(4):
            eager(part)
        pipe.step(x, target=torch.randn(16, 8))
        assert (model.kept.calls, plain(model.kept.total)) == (eager.kept.calls, plain(eager.kept.total))
