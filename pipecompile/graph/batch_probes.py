"""Experiments on small random batches: how the result of some calls for a batch follows from those for its two parts.

    inputs    random values for 5 samples, and the same values as 3 + 2 samples
    results   whole(5), part(3), part(2)
    law       whole == cat(parts)           rows stay apart
              whole == part + part          a sum over the batch; likewise mean, maximum, minimum, product, logsumexp ...
              none of these                 computed on the whole mini-batch alone

An identity of functions that holds at random points holds everywhere, but for coincidences of probability zero; integers and
booleans are drawn several times. A call that fails on random values, or is too large, has no law here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import sympy
import torch
from torch import fx, nn

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind, MergeRule, gather
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.merge_laws import RemainingLaws, has_unknown_size
from pipecompile.graph.probe_layers import KeptPiece, probe_layer, randomise
from pipecompile.graph.random_inputs import random_values
from pipecompile.graph.rule_table import MERGED
from pipecompile.graph.special_numbers import SpecialTrials
from pipecompile.torch_private.modes import disable_current_modes
from pipecompile.tracing.node_facts import facts, leaves_of, value_of
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.preserved_run import functions_restored
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["BatchProbes", "Finding", "isolated", "randomise"]

_SIZES = ((3, 2), (1, 4), (4, 1), (5, 3), (8, 5), (17, 12), (40, 24))
"""Samples in the two parts; the first three pairs that the guards of the graph admit, else the first three, are taken in turn. (1,
4) tells the first row from the first two.
"""

_MOST_NUMBERS = 2_000_000
"""Numbers in the inputs of an experiment. More take longer than 20 ms to draw; such calls stay without a law."""

_TRIALS, _DISCRETE_TRIALS = 8, 24
"""Draws of the inputs, if all inputs and results are real numbers, and else."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The law of one value; None if there is none. `is_tested` is False if no experiment could be made."""

    rule: MergeRule | None
    is_tested: bool


Values = dict[fx.Node, Any]
Draw = tuple[Values, tuple[Values, Values]]
"""Values of the inputs for the whole batch, and for its two parts."""


class BatchProbes:
    """Experiments with the calls of one graph."""

    def __init__(self, graph: TracedGraph) -> None:
        self.graph, self.symbol = graph, graph.facts.symbol
        self.splits = self._sizes()
        self.parts = self.splits[0] if self.splits else (3, 2)
        self.layers: dict[str, nn.Module | None] = {}
        self.attributes: dict[str, torch.Tensor] = {}
        self.kept_attributes: tuple[str, ...] = ()

    def _sizes(self) -> list[tuple[int, int]]:
        noted = self.graph.facts
        if noted.batch_size is not None or not any(isinstance(dim, int) for dim in noted.dims):
            return []
        admitted = [pair for pair in _SIZES if all(g.holds(n) for g in noted.guards for n in (*pair, sum(pair)))]
        return (admitted or list(_SIZES))[:3]

    def laws(
        self,
        nodes: Sequence[fx.Node],
        inputs: Mapping[fx.Node, MergeRule],
        outputs: Sequence[tuple[fx.Node, int]],
        trials: int = 0,
    ) -> list[Finding]:
        """Return the law of each of `outputs`, (node, leaf of its value), computed by `nodes` from `inputs` with these rules.

        `trials` is the number of draws, 0 for as many as the kinds of values need.
        """
        if not self.splits or not self.can_run(nodes, inputs):
            return [Finding(None, is_tested=False)] * len(outputs)
        laws = [RemainingLaws(leaves_of(node)[leaf], self.symbol) for node, leaf in outputs]
        ran, special = [], SpecialTrials(nodes, self.graph)
        values = (*map(_leaf_of, outputs), *map(value_of, inputs))
        discrete = any(isinstance(value, torch.Tensor) and not value.is_floating_point() for value in values)
        with isolated(nodes):
            for trial in range(trials or (_DISCRETE_TRIALS if discrete else _TRIALS)):
                if not any(law.rules for law in laws):
                    break
                made = [*special.results(trial, partial(self._trial, nodes, inputs, outputs, trial))]
                ran.append(bool(made))
                for results in made:
                    for law, (whole, *parts) in zip(laws, results, strict=True):
                        law.test(whole, parts, self.parts)
        is_known = any(ran) and special.is_complete
        return [Finding(law.proven(all_ran=all(ran)) if is_known else None, any(ran)) for law in laws]

    # -- one experiment ---------------------------------------------------------------------------------------------

    def _trial(
        self,
        nodes: Sequence[fx.Node],
        inputs: Mapping[fx.Node, MergeRule],
        outputs: Sequence[tuple[fx.Node, int]],
        trial: int,
        special: Sequence[float],
    ) -> list[tuple[Any, Any, Any]] | None:
        """Return (whole, part, part) of each output for one draw of the inputs; None if a call fails, or a result has no finite number.

        NaN and infinity follow from any rule: a CTC loss of random lengths is infinite for the whole batch and for its parts.
        """
        self.attributes.clear()
        self.parts = self.splits[trial % len(self.splits)]
        try:
            whole, parts = self.draw(inputs, trial, special)
            for layer in self._layers_of(nodes):
                randomise(layer)
            made = self.run(nodes, whole, sum(self.parts), outputs)
        except Exception:  # any call may fail on random values: then there is no result
            return None
        try:
            pair = [self.run(nodes, values, size, outputs) for values, size in zip(parts, self.parts, strict=True)]
        except Exception:  # what the whole batch can do and a part cannot has no rule
            return [(None, None, None)] * len(outputs)
        return None if any(map(_has_no_finite_number, made)) else list(zip(made, *pair, strict=True))

    def draw(self, inputs: Mapping[fx.Node, MergeRule], trial: int, special: Sequence[float]) -> Draw:
        """Return random values of inputs with these rules, for the whole batch and for its parts."""
        whole: Values = {}
        parts: tuple[Values, Values] = ({}, {})
        for node, rule in inputs.items():
            fake = value_of(node)

            def draw(size: int, fake: torch.Tensor = fake) -> torch.Tensor:
                return random_values(
                    [_number(length, self.symbol, size) for length in fake.shape], fake.dtype, trial, special
                )

            if rule.kind is MergeKind.JOINED:
                assert rule.dim is not None
                whole[node] = draw(sum(self.parts))
                rows = whole[node].shape[rule.dim] // sum(self.parts)
                pair = torch.split(whole[node], [rows * size for size in self.parts], rule.dim)
            elif rule.kind is MergeKind.SAME:
                whole[node] = draw(1)
                pair = (whole[node], whole[node])
            else:
                pair = (draw(1), draw(1))
                whole[node] = gather(pair, rule, self.parts)
            for values, part in zip(parts, pair, strict=True):
                values[node] = part
        return whole, parts

    def run(
        self, nodes: Sequence[fx.Node], drawn: Values, size: int, outputs: Sequence[tuple[fx.Node, int]]
    ) -> list[Any]:
        """Return the outputs of these calls on these inputs, for a batch of `size` samples."""
        differentiates = any(node.target is torch.autograd.grad for node in nodes)
        values = {
            node: value.clone().requires_grad_(differentiates and _has_gradient(node)) for node, value in drawn.items()
        }
        for node in nodes:
            ambient = facts(node).ambient
            with torch.set_grad_enabled(differentiates and ambient is not None and ambient.grad):
                self._compute(node, values, size)
        return [_without_gradient(flatten_containers(values[node])[0][leaf]) for node, leaf in outputs]

    def values_of(self, nodes: Sequence[fx.Node], drawn: Values, size: int) -> list[Any]:
        """Return the values of nodes after all calls of the graph, with these inputs and `size` samples."""
        values = {node: value.clone() for node, value in drawn.items()}
        for node in compute_nodes(self.graph):
            self._compute(node, values, size)
        return [self._compute(node, values, size) for node in nodes]

    def _compute(self, node: fx.Node, values: Values, size: int) -> Any:
        """Compute the value of a node, and of those that only the batch size enters, at this batch size."""
        if node in values:
            return values[node]
        values[node] = self._value(node, values, size)
        return values[node]

    def _value(self, node: fx.Node, values: Values, size: int) -> Any:
        noted = value_of(node)
        if isinstance(noted, (torch.SymInt, torch.SymFloat, torch.SymBool)) and facts(node).is_size:
            return noted.node.pytype(_substituted(sympy.sympify(noted.node.expr), self.symbol, size))
        if node.op == "get_attr":
            return self._attribute(str(node.target))

        def of(argument: fx.Node) -> Any:
            return self._compute(argument, values, size)

        given: Any = [fx.node.map_aggregate(fx.node.map_arg(one, of), _on_cpu) for one in (node.args, node.kwargs)]
        args, kwargs = given
        if node.op == "call_module":
            layer = self.layer(str(node.target))
            assert layer is not None
            return layer(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _attribute(self, path: str) -> Any:
        """Return an attribute of the graph: random numbers instead of its numbers, the same in one trial."""
        *parents, name = path.split(".")
        held = getattr(self.graph.get_submodule(".".join(parents)), name)
        if not isinstance(held, torch.Tensor):
            return held
        if not held.is_floating_point() or held.numel() > _MOST_NUMBERS or path.startswith(self.kept_attributes):
            return held.detach().cpu().clone()
        if path not in self.attributes:
            self.attributes[path] = random_values(list(held.shape), held.dtype, 0, ())
        return self.attributes[path].clone()

    # -- layers -----------------------------------------------------------------------------------------------------

    def can_run(self, nodes: Sequence[fx.Node], inputs: Mapping[fx.Node, MergeRule]) -> bool:
        """Return whether the calls can run on random inputs that merge: few numbers, no draws, no piece kept whole among several calls."""
        numbers = 0
        for node, rule in inputs.items():
            if rule.kind not in MERGED or has_unknown_size(value_of(node), self.symbol):
                return False
            known = [_number(length, self.symbol, sum(self.parts)) for length in value_of(node).shape]
            numbers += int(sympy.prod(known))
        layers = [self.layer(str(node.target)) for node in nodes if node.op == "call_module"]
        draws = any(facts(node).draws for node in nodes)
        is_mixed = len(nodes) > 1 and any(isinstance(layer, KeptPiece) for layer in layers)
        return numbers <= _MOST_NUMBERS and None not in layers and not draws and not is_mixed

    def layer(self, path: str) -> nn.Module | None:
        """Return what stands for a module in experiments; None if there is nothing."""
        if path not in self.layers:
            self.layers[path] = probe_layer(self.graph.get_submodule(path), _MOST_NUMBERS)
        return self.layers[path]

    def _layers_of(self, nodes: Sequence[fx.Node]) -> Iterator[nn.Module]:
        for node in nodes:
            if node.op == "call_module" and (layer := self.layer(str(node.target))) is not None:
                yield layer


def _leaf_of(output: tuple[fx.Node, int]) -> Any:
    return leaves_of(output[0])[output[1]]


def _has_gradient(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _number(length: Any, symbol: sympy.Symbol, size: int) -> int:
    """Return a length for a batch of `size` samples. Raise TypeError for one that the data decide."""
    return int(_substituted(length.node.expr, symbol, size)) if isinstance(length, torch.SymInt) else int(length)


@lru_cache(maxsize=4096)
def _substituted(expression: sympy.Basic, symbol: sympy.Symbol, size: int) -> sympy.Basic:
    return expression.subs({symbol: size})


def _has_no_finite_number(value: Any) -> bool:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0
    return is_real and not bool(value.isfinite().any())


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


@contextmanager
def isolated(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Run nodes without modes and gradients. Leave the state of the random number generator, and what autograd functions change, as it was."""
    with (
        disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]),
        functions_restored(nodes, tensors=True), output_muted(),
    ):  # fmt: skip
        torch.manual_seed(0)
        yield
