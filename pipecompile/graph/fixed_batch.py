"""Merge rules of recordings that are for one batch size alone: compared with a recording of twice as many samples.

A dimension that doubles is the batch. A number is what the numbers of the two halves give, by an experiment: both recordings run on
the same random samples, with the same random parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_probes import BatchProbes, isolated
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.merge_laws import is_close, reductions_for, rule_holds
from pipecompile.graph.probe_layers import randomise
from pipecompile.graph.special_numbers import SpecialTrials
from pipecompile.torch_private import pytree
from pipecompile.tracing.emit.value_nodes import CONSTANT
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["UNPROVEN", "fixed_rules"]

UNPROVEN = "taken from its size alone"
"""Reason of a rule that no experiment has shown."""

_TRIALS = 6

_LISTED, _SAME = MergeRule(MergeKind.LISTED), MergeRule(MergeKind.SAME)


def fixed_rules(graph: TracedGraph, other: TracedGraph | None) -> tuple[MergeRule, ...]:
    """Return one rule per leaf of the output of a graph; `other` is the recording of more samples, None if there is none."""
    values = value_of(graph.graph.output_node())
    if other is None:
        return tuple(_by_length(value, graph) for value in values)
    is_listed = _is_listed(graph) and _is_listed(other)
    if not is_listed and other.facts.out_spec != graph.facts.out_spec:
        return _of_lists(graph.facts.out_spec, other.facts.out_spec)
    trials = _trials(graph, other)
    if is_listed:
        is_right = all(_is_same_list(whole, parts) for whole, parts in trials)
        return ((_LISTED if is_right else _refused(_MEETING)),) * len(values)
    others = value_of(other.graph.output_node())
    columns = [[(whole[i], [part[i] for part in parts]) for whole, parts in trials] for i in range(len(values))]
    return tuple(_rule(*one) for one in zip(values, others, columns, strict=True))


_MEETING = "a sample's part of it depends on other samples"


def _refused(why: str) -> MergeRule:
    return MergeRule(MergeKind.REFUSED, reason=why)


def _of_lists(spec: pytree.TreeSpec, other: pytree.TreeSpec) -> tuple[MergeRule, ...]:
    """Return a refusal per leaf of a structure that depends on the batch size, with a reason for those in the list that does."""
    in_list = list(_in_changed_part(spec, other))
    has_culprit = any(in_list)
    reason = "it is in a list whose length depends on the batch size"
    return tuple(_refused(reason if is_in or not has_culprit else "") for is_in in in_list)


def _in_changed_part(spec: pytree.TreeSpec, other: pytree.TreeSpec) -> Iterator[bool]:
    """Yield, per leaf of `spec`, whether it is in the innermost container whose length or keys differ from those in `other`."""
    children, others = pytree.children_of_spec(spec), pytree.children_of_spec(other)
    is_alike = (spec.type, spec.context, len(children)) == (other.type, other.context, len(others))
    if spec == other or not is_alike:
        yield from [not is_alike] * spec.num_leaves
        return
    for child, its_other in zip(children, others, strict=True):
        yield from _in_changed_part(child, its_other)


def _is_listed(graph: TracedGraph) -> bool:
    """Return whether the output is a list with one entry per sample."""
    spec = graph.facts.out_spec
    return spec.type is list and spec.num_children == graph.facts.batch_size


def _by_length(value: Any, graph: TracedGraph) -> MergeRule:
    """Return the rule without another recording: the first dimension as long as the batch counts as the batch."""
    if not isinstance(value, torch.Tensor):
        return _SAME
    lengths = [
        length if isinstance(length, int) else 0 for length in _sizes(value, graph)
    ]  # the data decide the others
    dim = next((dim for dim, length in enumerate(lengths) if length == graph.facts.batch_size), None)
    return _refused("it has no dimension as long as the batch") if dim is None else MergeRule(MergeKind.JOINED, dim)


def _sizes(value: torch.Tensor, graph: TracedGraph) -> list[Any]:
    """Return the sizes of a tensor of a graph for one batch size, as numbers but for those that the data decide.

    Where the forward checks the batch size last, the sizes before are still symbols.
    """
    symbols = {graph.facts.symbol: graph.facts.batch_size}
    known = (size if isinstance(size, int) else size.node.expr.subs(symbols) for size in value.shape)
    return [
        int(one) if one.is_number else size for one, size in zip(map(sympy.sympify, known), value.shape, strict=True)
    ]


def _rule(value: Any, other: Any, trials: Sequence[tuple[Any, Sequence[Any]]]) -> MergeRule:
    if not isinstance(value, torch.Tensor):
        return _SAME if value == other else _refused("it is a number that depends on the batch size")
    if value.dim() != other.dim():
        return _refused("its number of dimensions depends on the batch size")
    sizes = list(zip(value.shape, other.shape, strict=True))
    changed = [dim for dim, pair in enumerate(sizes) if _decided_by_data(pair) or pair[0] != pair[1]]
    if len(changed) > 1 or any(not _may_be_double(sizes[dim]) for dim in changed):
        return _refused("its size is not a multiple of the batch size in one dimension")
    rules = [MergeRule(MergeKind.JOINED, dim) for dim in changed] or reductions_for(value)
    if not trials:
        return replace(rules[0] if changed else MergeRule(MergeKind.AVERAGED), reason=UNPROVEN)
    right = (rule for rule in rules if all(rule_holds(rule, whole, parts, (1, 1)) for whole, parts in trials))
    return next(right, _refused(_MEETING))


def _decided_by_data(sizes: tuple[Any, Any]) -> bool:
    """Return whether the values of a tensor decide one of the sizes: such sizes have no number, and no truth when compared."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _may_be_double(sizes: tuple[Any, Any]) -> bool:
    """Return whether the second size is twice the first, or may be."""
    return _decided_by_data(sizes) or sizes[1] == 2 * sizes[0]


def _is_same_list(whole: Sequence[Any], parts: Sequence[Sequence[Any]]) -> bool:
    flat = [leaf for part in parts for leaf in part]
    pairs = list(zip(whole, flat, strict=False))
    return len(whole) == len(flat) and all(is_close(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


# -- experiments ------------------------------------------------------------------------------------------------------


def _trials(graph: TracedGraph, other: TracedGraph) -> list[Trial]:
    """Return the outputs (of the whole, of each half) for random samples; none if the graphs cannot run on these."""
    half, double = BatchProbes(graph), BatchProbes(other)
    double.layers, double.attributes = half.layers, half.attributes  # a parameter has the same values in both
    half.kept_attributes = double.kept_attributes = (CONSTANT,)  # recordings count their constants each for itself
    inputs, twice = _inputs(graph), _inputs(other)
    is_double = other.facts.batch_size == 2 * (graph.facts.batch_size or 0)
    if not is_double or not (
        half.can_run(compute_nodes(graph), dict(inputs)) and double.can_run(compute_nodes(other), dict(twice))
    ):
        return []
    found: list[Trial] = []
    special = SpecialTrials(compute_nodes(other), other)
    with isolated([*graph.graph.nodes, *other.graph.nodes]):
        for trial in range(_TRIALS):
            found += special.results(trial, partial(_attempt, half, double, trial))
    return found if special.is_complete else []


def _inputs(graph: TracedGraph) -> list[tuple[fx.Node, MergeRule]]:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [(node, MergeRule(MergeKind.SAME)) for node in placeholders if isinstance(value_of(node), torch.Tensor)]


Trial = tuple[list[Any], list[list[Any]]]
"""The outputs of the whole, and of each half."""


def _attempt(half: BatchProbes, double: BatchProbes, trial: int, special: Sequence[float]) -> Trial | None:
    """Return a trial that draws the special numbers in all inputs, or else in one: the ignored class is not a token; None if all fail."""
    nodes = [node for node, _ in _inputs(double.graph)]
    for chosen in (nodes, *([node] for node in nodes if len(nodes) > 1 and special)):
        with suppress(Exception):  # any call may fail on random values
            return _trial(half, double, trial, {node: special if node in chosen else () for node in nodes})
    return None


def _trial(half: BatchProbes, double: BatchProbes, trial: int, special: Mapping[fx.Node, Sequence[float]]) -> Trial:
    """Return the outputs on random values, which have these special numbers in each input."""
    for layer in half.layers.values():
        if layer is not None:
            randomise(layer)
    half.attributes.clear()
    drawn = {node: double.draw({node: rule}, trial, special[node])[0][node] for node, rule in _inputs(double.graph)}
    whole = _outputs(double, list(drawn.values()))
    named = dict(zip(_tensor_names(double.graph), drawn.values(), strict=True))
    return whole, [_outputs(half, _half_of(half.graph, named, m)) for m in range(2)]


def _half_of(graph: TracedGraph, whole: Mapping[str, torch.Tensor], m: int) -> list[torch.Tensor]:
    """Return half `m` of the inputs: a half of each batch, the entries of each list, and what all samples share."""
    size, names = graph.facts.batch_size or 1, set(_tensor_names(graph))
    found = []
    for name, dim, node in zip(graph.facts.names, graph.facts.dims, _placeholders(graph), strict=True):
        if not _is_tensor(node):
            continue
        if dim is list:
            found.append(whole[name if m == 0 else _name_of_entry(name, size, names, whole)])
        else:
            found.append(whole[name].chunk(2, dim)[m] if isinstance(dim, int) else whole[name])
    return found


def _name_of_entry(name: str, size: int, names: set[str], whole: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the entry `size` places behind the entry `name` of a list."""
    moved = (f"{name[: n.start()]}{int(n[0]) + size}{name[n.end() :]}" for n in re.finditer(r"\d+", name))
    return next(other for other in moved if other in whole and other not in names)


def _tensor_names(graph: TracedGraph) -> list[str]:
    named = zip(graph.facts.names, _placeholders(graph), strict=True)
    return [name for name, node in named if _is_tensor(node)]


def _placeholders(graph: TracedGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _outputs(probes: BatchProbes, values: Sequence[torch.Tensor]) -> list[Any]:
    """Return the leaves of the output of a graph on these tensors."""
    graph = probes.graph
    given = dict(zip(filter(_is_tensor, _placeholders(graph)), values, strict=True))
    arguments: Any = graph.graph.output_node().args[0]
    nodes = [argument for argument in arguments if isinstance(argument, fx.Node)]
    made = dict(zip(nodes, probes.values_of(nodes, given, graph.facts.batch_size or 1), strict=True))
    return [made[argument] if isinstance(argument, fx.Node) else argument for argument in arguments]
