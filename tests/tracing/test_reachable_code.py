from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing import reachable_code
from pipecompile.tracing.reachable_code import closure_tensors, reachable, searches_kept


def deep(x):
    return x


@functools.cache
def cached(x):
    return deep(x)


def unrelated(x):
    return x


class Helper:
    def help(self, x):
        return cached(x)


class Inner(nn.Module):
    @torch.no_grad()
    def decorated(self, x):
        return x

    @property
    def scale(self):
        return 1

    def forward(self, x):
        return self.decorated(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.helper = Inner(), Helper()
        self.register_forward_hook(hook)

    def forward(self, x):
        return self.inner(self.helper.help(x))


def hook(module, args, output):
    return output


def test_methods_helpers_hooks_and_what_they_name_are_found():
    found = {function.__name__ for function in reachable(Model()).functions}
    assert {"forward", "decorated", "scale", "help", "deep", "hook"} <= found
    assert "unrelated" not in found
    assert [cache.name for cache in reachable(Model()).caches] == ["cached"]
    assert not {f for f in reachable(nn.Sequential(nn.Linear(2, 2))).functions if f.__module__.startswith("torch")}


def test_a_kept_search_is_made_again_where_something_is_another_object(monkeypatch):
    """A method, a global that a function names, a global that is new, an attribute, a hook."""
    model = Model()
    with searches_kept():
        first = reachable(model)
        assert reachable(model) is first
        model.other = torch.sin  # nothing that is followed
        found = [reachable(model)]
        monkeypatch.setattr(Inner, "forward", lambda self, x: unrelated(x))
        found.append(reachable(model))
        monkeypatch.setitem(globals(), "deep", lambda x: x)
        found.append(reachable(model))
        monkeypatch.setitem(globals(), "made_by_the_first_forward", torch.Generator())
        found.append(reachable(model))
        model.inner.register_forward_pre_hook(lambda *_: None)
        found.append(reachable(model))
        assert reachable(model) is found[-1]
    assert len({id(each) for each in (first, *found)}) == 6
    assert unrelated in found[1].functions
    assert unrelated not in first.functions
    assert reachable(model) is not found[-1]


def test_tensors_in_closures_are_found():
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    inner = functools.partial(lambda a, b: a + b, z)

    def function(a, default=y):
        return inner(a) + x + default

    assert {id(tensor) for tensor in closure_tensors(function)} == {id(x), id(y)}
    assert not list(closure_tensors(torch.sin))
    assert not list(closure_tensors(deep))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


TERMS, REGISTRY = [doubled], {str(i): doubled for i in range(50)}


class OfTerms(nn.Module):
    """Calls the functions in a global list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for term in TERMS:
            x = term(x)
        return x


class OfRegistry(nn.Module):
    """Looks a function up in a large table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return REGISTRY["7"](x)


def test_functions_in_small_containers_are_found():
    assert doubled in reachable(OfTerms()).functions
    assert doubled not in reachable(OfRegistry()).functions


class Branching(OfTerms):
    """Has a branch that is kept whole, in several trials."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.branch(x)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_recording_searches_once(monkeypatch: pytest.MonkeyPatch):
    searched, run = [], reachable_code._CodeSearch.run

    def counted(search: Any, most: int | None) -> None:
        searched.append(most)
        run(search, most)

    monkeypatch.setattr(reachable_code._CodeSearch, "run", counted)
    pc.trace(Branching(), torch.ones(2, 3))
    assert searched.count(None) == 1
