"""Calls of int, float and type are redirected in the named functions alone, and caches store nothing of a recording."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.tracing import trace
from pipecompile.tracing.interception import user_functions
from pipecompile.tracing.interception.user_functions import builtin_calls_redirected


def calls(x):
    inner = lambda: float(2)  # noqa: E731
    return int(x), [int(y) for y in [1.5]], inner()


def mentions(x):
    return type(x) is float, isinstance(x, float), list(map(int, [1.5])), {int: 1}[int]


SUBSTITUTES = {"int": lambda x: ("int", x), "float": lambda x: ("float", x), "type": lambda x: float}


def test_calls_are_led_elsewhere_and_nothing_else_is():
    with builtin_calls_redirected(SUBSTITUTES, [calls, mentions]):
        assert calls(2.5) == (("int", 2.5), [("int", 1.5)], ("float", 2))
        assert mentions(2.5) == (True, True, [1], 1)
        assert int(2.5) == 2, "this function was not named"
    assert calls(2.5) == (2, [1], 2.0)


def test_the_functions_are_put_back_after_a_failure():
    code = calls.__code__
    with pytest.raises(ZeroDivisionError), builtin_calls_redirected({"int": lambda x: 1 / 0}, [calls]):
        calls(1)
    assert calls.__code__ is code


def test_a_function_with_too_many_names_is_left_alone():
    names = " + ".join(f"name_{i}" for i in range(200))
    space = {f"name_{i}": i for i in range(200)}
    exec(f"def many(x): return {names} + int(x)", space)
    with builtin_calls_redirected(SUBSTITUTES, [space["many"]]):
        assert space["many"](1.5) == sum(range(200)) + 1


@pytest.mark.parametrize("room", [None, 8])
def test_function_caches_forget_fake_tensors(room):
    @functools.lru_cache(maxsize=room)
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, size).triu()

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) @ mask(4)

    model, x = Cached(), torch.randn(3, 4)
    graph = trace(model, x)
    assert type(mask(4)) is torch.Tensor
    assert torch.equal(graph(x), model(x))
    assert torch.equal(trace(model, x)(x), model(x)), "what the cache knew before is a constant"


def test_a_cache_that_earlier_recordings_left_alone_is_purged_later():
    @functools.lru_cache
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + ones(4)

    assert type(ones(2)) is torch.Tensor
    trace(nn.Linear(4, 4), torch.randn(3, 4))
    assert ones.cache_info().currsize == 1
    trace(Cached(), torch.randn(3, 4))
    assert type(ones(4)) is torch.Tensor


def test_other_caches_are_left_alone():
    @functools.cache
    def square(n: int) -> int:
        return n * n

    square(3)
    trace(nn.Linear(4, 4), torch.randn(2, 4))
    assert square.cache_info().currsize == 1


@functools.lru_cache(maxsize=8)
def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * 2, shape[1] // 2)


class Reshaper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    @functools.lru_cache(maxsize=8)  # noqa: B019 as people write it
    def scale(self, size: int) -> float:
        return 1 / size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).reshape(halves(tuple(x.shape))) * self.scale(x.shape[0])


def test_function_caches_leave_the_batch_size_free_and_learn_no_symbol():
    model, x = Reshaper(), torch.randn(3, 4)
    halves((3, 4))
    graph = trace(model, x)
    assert graph.facts.guards == ()
    assert (halves.cache_info().currsize, Reshaper.scale.cache_info().currsize) == (1, 0)
    for size in (3, 5):
        y = torch.randn(size, 4)
        assert torch.equal(graph(y), model(y))
    assert type(halves((5, 4))[0]) is int


def cached_method(function: Any) -> Any:
    """Keep a cache in a closure, as `compile_compatible_method_lru_cache` of transformers does."""
    with_cache = functools.lru_cache(maxsize=8)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return with_cache(*args)

    return wrapper


class Positioned(nn.Module):
    """Adds a table that is cached by the shape of the batch, as the position embeddings of DETR are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.ones = nn.Linear(4, 4), cached_method(lambda shape: torch.ones(shape))

    @cached_method
    def table(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.arange(shape[1], dtype=torch.float32).expand(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.table(tuple(x.shape)) * self.ones(tuple(x.shape))


def test_caches_in_closures_leave_the_batch_size_free() -> None:
    model, before = Positioned(), Positioned.table
    graph = trace(model, torch.randn(3, 4))
    assert graph.facts.guards == ()
    for size in (3, 5):
        y = torch.randn(size, 4)
        assert torch.equal(graph(y), model(y))
    assert Positioned.table is before
    assert type(before.__closure__[-1].cell_contents) is type(halves)


def test_live_objects_are_looked_through_only_when_there_is_a_new_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes longer than the recording of a small model. A cache that takes the place of another is new, too."""
    looks: list[object] = []
    referrers = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: looks.append(of) or referrers(*of))
    census = user_functions._Census()
    first = functools.lru_cache(abs)
    assert first in census.alive()
    assert first in census.alive()
    assert len(looks) == 1
    del first
    census.alive()
    assert len(looks) == 1
    second = functools.lru_cache(abs)
    assert second in census.alive()
    del second
    third = functools.lru_cache(abs)
    assert third in census.alive()
    assert len(looks) == 3


class WatchesGradient(nn.Module):
    """Notes the norm of a gradient by a hook, and so calls `float` in a function made while the model was recorded."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.norms = nn.Linear(4, 4), nn.Linear(4, 2), []

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: self.norms.append(float(g.norm())))
        return self.last(h)


def test_functions_made_in_a_recording_call_the_builtins_afterwards():
    model = WatchesGradient()
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=mse_loss, devices=["cpu"] * 2, cost="analytic")
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert [type(norm) for norm in model.norms] == [float, float]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(4, 4), 1.0

    @functools.lru_cache  # noqa: B019
    def scale(self) -> float:
        return 2 * self.rate

    def forward(self, x):
        return self.layer(x) * self.scale()


def test_what_a_cached_function_reads_is_noticed_after_cache_clear():
    model, x = Scaled(), torch.randn(2, 4)
    model(x)
    pipe = pc.compile(model, 1, n_microbatches=1, cost="analytic")
    for step in range(5):
        model.rate = 1.0 + step
        Scaled.scale.cache_clear()
        expected = model(x)  # the cache has the result when the model is recorded
        assert torch.equal(pipe(x), expected)


def test_a_cache_with_an_old_number_is_used_as_it_is_and_warned_of():
    model, x = Scaled(), torch.randn(2, 4)
    model(x)
    pipe = pc.compile(model, 1, n_microbatches=1, cost="analytic")
    model.rate = 2.0
    with pytest.warns(pc.RecordingWarning, match=r"Scaled.scale returns another number from its cache"):
        assert torch.equal(pipe(x), model(x))
