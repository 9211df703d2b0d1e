"""Special numbers of calls: those that may have a meaning among the inputs, and the trials of an experiment that draw them.

    cross_entropy(y, t, ignore_index=-1)     t has classes, and -1; -100 is an error
    l.nanmean()                              l has numbers, and NaN

A special number that makes a call fail is tried alone, and is left out from then on. A law of a loss that ignores a class is known only
if a trial with that class has run.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from pipecompile.graph.random_inputs import has_special
from pipecompile.graph.row_order import word_of
from pipecompile.torch_private import pytree
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["SpecialTrials", "ignored_classes", "special_numbers"]

_IGNORED = -100
"""The class index that losses of torch ignore by default."""

_FAR = 1e6
"""Largest number of a call's arguments that is taken as a value of its inputs."""

_KINDS = 4
"""Kinds of random real numbers, by trial: a call may fail on some kinds alone."""


def ignored_classes(nodes: Sequence[fx.Node], graph: TracedGraph) -> set[int]:
    """Return the class indices that the losses among calls ignore."""
    found = (_ignored_class(node, graph) for node in nodes)
    return {one for one in found if isinstance(one, int)}


def special_numbers(nodes: Sequence[fx.Node], graph: TracedGraph) -> list[float]:
    """Return numbers that may have a meaning among the inputs: those that the calls mention, NaN if a call tells it from numbers, and the
    class that losses of torch ignore by default, unless a loss among the calls ignores another.
    """
    found: list[float] = sorted(ignored_classes(nodes, graph)) or [_IGNORED]
    for node in nodes:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        found += [leaf for leaf in leaves if type(leaf) in (int, float) and abs(leaf) < _FAR]
    nan = [math.nan] if any("nan" in word_of(node) or word_of(node) == "isfinite" for node in nodes) else []
    return [*dict.fromkeys(found), *nan]


def _ignored_class(node: fx.Node, graph: TracedGraph) -> Any:
    """Return the class index that a loss ignores; None for another call."""
    if node.op == "call_module":
        return getattr(graph.get_submodule(str(node.target)), "ignore_index", None)
    place, default = _parameter(node.target) if callable(node.target) else (0, None)
    return node.kwargs.get("ignore_index", node.args[place] if len(node.args) > place > 0 else default)


@lru_cache(maxsize=1024)
def _parameter(function: Callable[..., Any]) -> tuple[int, Any]:
    """Return the place and the default of a function's parameter `ignore_index`; 0 and None if it has none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C++
        return 0, None
    names = list(parameters)
    return (names.index("ignore_index"), parameters["ignore_index"].default) if "ignore_index" in names else (0, None)


class SpecialTrials:
    """The special numbers of the calls of one experiment, and which of them have been drawn in a trial that ran."""

    def __init__(self, nodes: Sequence[fx.Node], graph: TracedGraph) -> None:
        self.numbers = special_numbers(nodes, graph)
        self._wanted = ignored_classes(nodes, graph)
        self._failed: defaultdict[int, list[float]] = defaultdict(list)

    @property
    def is_complete(self) -> bool:
        """Whether trials have run with every class that a loss ignores."""
        return not self._wanted

    def results(self, trial: int, attempt: Callable[[Sequence[float]], Any]) -> Iterator[Any]:
        """Yield the results of a trial: `attempt` with all special numbers, or if that is None, with each alone."""
        failed = self._failed[trial % _KINDS]
        numbers = [one for one in self.numbers if not any(one is other for other in failed)]
        if (result := attempt(numbers)) is not None:
            yield self._noted(trial, numbers, result)
            return
        for number in numbers if has_special(trial) else ():
            with torch.random.fork_rng(devices=[]):  # later trials draw as if this one had not been repeated
                result = attempt([number])
            if result is None:
                failed.append(number)
            else:
                yield self._noted(trial, [number], result)

    def _noted(self, trial: int, numbers: Sequence[float], result: Any) -> Any:
        """Return a result, and note that a trial has run with these numbers."""
        if has_special(trial):
            self._wanted -= set(numbers)
        return result
