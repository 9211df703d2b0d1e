"""Tables that grow with the length of sequences: what a pipeline computes, and leaves on the model, is what eager does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, square_loss

SIZE = 4


def positions(length: int) -> torch.Tensor:
    """Return a table whose rows depend on the length: that of a longer sequence does not begin with that of a shorter one."""
    return torch.linspace(0, 1, length, dtype=torch.float64)[:, None] * torch.ones(SIZE, dtype=torch.float64)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cos: Any = None

    def table(self, n: int) -> torch.Tensor:
        if self.cos is None or self.cos.shape[0] < n:
            self.cos = positions(n)
        return self.cos[:n]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(x.shape[1])


class Noted(Attribute):
    """As the dynamic rotary embeddings of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_len_cached = 0
        self.register_buffer("frequencies", torch.arange(1.0, 1 + SIZE))

    def table(self, n: int) -> torch.Tensor:
        if n > self.max_seq_len_cached:
            self.max_seq_len_cached = n
            self.cos, self.sin = positions(n) * self.frequencies, -positions(n)
        return self.cos[:n] + self.sin[-n:]


class Entry(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[Any, Any] = {}

    def table(self, n: int) -> torch.Tensor:
        if "cos" not in self.cache or self.cache["cos"].shape[0] < n:
            self.cache["cos"] = positions(n)
        return self.cache["cos"][:n]


class Keyed(Entry):
    def table(self, n: int) -> torch.Tensor:
        key = n, torch.device("cpu")
        if key not in self.cache:
            self.cache[key] = positions(n)
        return self.cache[key]


class Pair(Attribute):
    def table(self, n: int) -> torch.Tensor:
        if self.cos is None or self.cos[0] < n:
            self.cos = n, positions(n)
        return self.cos[1][:n]


class Replaced(Attribute):
    """As the mask of the word language model among the examples of PyTorch."""

    def table(self, n: int) -> torch.Tensor:
        if self.cos is None or self.cos.shape[0] != n:
            self.cos = positions(n)
        return self.cos


class Layered(Attribute):
    """Computes its table by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def table(self, n: int) -> torch.Tensor:
        if self.training:
            return self.layer(positions(n))
        return super().table(n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and (self.cos is None or self.cos.shape[0] < x.shape[1]):
            self.cos = self.layer(positions(x.shape[1]))
        return x + self.table(x.shape[1])


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(SIZE, SIZE), kind(), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def as_root(kind: type[Any]) -> nn.Module:
    """Return a model whose root has the table."""

    class Rooted(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(super().forward(self.first(x)))

    return Rooted()


def compiled(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return a pipeline of the model, and a copy for eager."""
    model.double()
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=square_loss, cost="analytic")
    return pipe, eager


def inputs(length: int) -> torch.Tensor:
    return torch.randn(4, length, SIZE, dtype=torch.float64)


def called_alike(pipe: Any, eager: nn.Module, length: int) -> bool:
    x = inputs(length)
    with torch.no_grad():
        return torch.equal(pipe(x), torch.cat([eager(part) for part in x.chunk(2)]))


ORDERS = [(6, 4, 6), (4, 6, 4), (4, 6, 8, 6, 4, 5)]
GROWING: list[Any] = [Attribute, Noted, Entry, Keyed, Pair]


@pytest.mark.filterwarnings("ignore::pipecompile.errors.RecordingWarning")  # the model is recorded anew
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("kind", GROWING)
def test_tables_that_grow_are_those_of_eager(kind: Any, is_root: bool, lengths: tuple[int, ...]) -> None:
    """A shorter sequence was computed with a table of its own, where eager reads rows of the longer one."""
    torch.manual_seed(0)
    model = as_root(kind) if is_root else Net(kind)
    pipe, eager = compiled(model)
    for length in lengths:
        x = inputs(length)
        model.zero_grad()
        eager.zero_grad()
        torch.testing.assert_close(pipe.step(x), accumulate(eager, x, 2), rtol=1e-12, atol=0)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
        assert called_alike(pipe, eager, length)
    inner, other = (model, eager) if is_root else (model.inner, eager.inner)
    for name in ("cos", "sin", "cache", "max_seq_len_cached"):
        assert repr(getattr(inner, name, None)) == repr(getattr(other, name, None))


@pytest.mark.filterwarnings("ignore::pipecompile.errors.RecordingWarning")  # the model is recorded anew
@pytest.mark.parametrize("kind", [*GROWING, Layered, Replaced])
def test_tables_are_those_of_eager_in_evaluation(kind: Any) -> None:
    model = Net(kind)
    pipe, eager = compiled(model)
    model.eval()
    eager.eval()
    assert all(called_alike(pipe, eager, length) for length in (4, 6, 4, 8, 6, 5, 4))


@pytest.mark.parametrize(("kind", "traces"), [(Attribute, 1), (Keyed, 1), (Noted, 1), (Replaced, 1)])
def test_a_table_that_is_left_needs_no_other_recording(kind: Any, traces: int) -> None:
    pipe, eager = compiled(Net(kind))
    assert all(called_alike(pipe, eager, 4) for _ in range(3))
    assert pipe._cache.traces == traces


@pytest.mark.parametrize(("kind", "traces"), [(Attribute, 4), (Keyed, 2), (Replaced, 4)])
def test_signatures_that_alternate_are_recorded_twice_at_most(kind: Any, traces: int) -> None:
    pipe, eager = compiled(Net(kind))
    assert all(called_alike(pipe, eager, length) for length in (4, 6) * 4)
    assert pipe._cache.traces == traces


def test_a_table_that_the_user_clears_is_left_again() -> None:
    model = Net(Attribute)
    pipe, eager = compiled(model)
    for length in (4, 4, 6, 4):
        model.inner.cos = eager.inner.cos = None
        assert called_alike(pipe, eager, length)
        assert torch.equal(model.inner.cos, eager.inner.cos)
    assert pipe._cache.traces == 2


def test_a_table_that_the_user_writes_is_read() -> None:
    model = Net(Attribute)
    pipe, eager = compiled(model)
    assert called_alike(pipe, eager, 4)
    model.inner.cos.mul_(2)
    eager.inner.cos.mul_(2)
    assert called_alike(pipe, eager, 4)
    model.inner.cos, eager.inner.cos = (torch.ones(4, SIZE, dtype=torch.float64) for _ in range(2))
    assert called_alike(pipe, eager, 4)


def test_a_table_stays_what_it_is_when_the_buffer_behind_it_changes() -> None:
    """It was computed again from the new numbers, where eager reads the table of before."""
    model = Net(Noted)
    pipe, eager = compiled(model)
    assert called_alike(pipe, eager, 4)
    model.inner.frequencies.mul_(3)
    eager.inner.frequencies.mul_(3)
    assert called_alike(pipe, eager, 4)


@pytest.mark.parametrize("kind", GROWING)
def test_prepare_leaves_no_table(kind: Any) -> None:
    model = Net(kind)
    pipe, eager = compiled(model)
    pipe.prepare(inputs(4))
    assert model.inner.cos is None
    assert called_alike(pipe, eager, 6)
    assert called_alike(pipe, eager, 4)


def test_a_table_with_gradients_is_not_left_and_a_warning_says_so() -> None:
    model = Net(Layered)
    pipe, _ = compiled(model)
    model.eval()
    pipe(inputs(6))
    assert model.inner.cos is None
    with pytest.warns(pc.RecordingWarning, match=r"inner\.cos, computed at .*, is not left on the model"):
        pipe(inputs(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(inputs(5))


class Sized(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.make = positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos is None or self.cos.shape[0] < len(x):
            self.cos = self.make(len(x))
        return x + self.cos[: len(x), None]


def zeros(length: int) -> torch.Tensor:
    return torch.zeros(length, SIZE, dtype=torch.float64)


@pytest.mark.parametrize(("make", "is_warned"), [(positions, True), (zeros, False)])
def test_a_table_of_the_size_of_the_batch_gets_a_warning_if_its_rows_depend_on_the_size(
    make: Any, is_warned: bool
) -> None:
    model = Net(Sized)
    model.inner.make = make
    pipe, _ = compiled(model)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe.step(inputs(4))
        pipe.step(inputs(4)[:2])
    assert [str(one.message) for one in given if "is not left on the model" in str(one.message)][1:] == []
    assert is_warned == any("cos, computed at" in str(one.message) for one in given)


@pytest.mark.filterwarnings("ignore::pipecompile.errors.RecordingWarning")  # the model is recorded anew
@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("lengths", [(6, 4), (4, 6), (6, 4, 6)], ids=str)
def test_later_micro_batches_of_a_list_read_the_tables_of_earlier_ones(kind: Any, lengths: tuple[int, ...]) -> None:
    model = Net(kind)
    pipe, eager = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            parts = [inputs(length)[:2] for length in lengths]
            outputs = pipe(microbatches=[(part,) for part in parts])
            for mine, part in zip(outputs, parts, strict=True):
                torch.testing.assert_close(mine, eager(part), rtol=0, atol=0)


def test_a_table_that_grows_within_a_list_gets_a_warning() -> None:
    """The second micro-batch of length 4 is computed as the first, where eager reads the table of the one between."""
    pipe, _ = compiled(Net(Attribute))
    parts = [(inputs(length)[:2],) for length in (4, 6, 4)]
    with torch.no_grad(), pytest.warns(pc.RecordingWarning, match="for each list of micro-batches"):
        pipe(microbatches=parts)
