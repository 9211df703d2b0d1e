"""The node-by-node walk that every cost model shares: run the graph once, and let a meter run each node as it likes.

A value is dropped as soon as its last user has run (`torch.fx.Interpreter` sees to it). Model inputs are copied first,
because a node may write into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef

from pipecompile.costs.node_cost import CostError
from pipecompile.costs.node_run import NodeRun, map_tensors, settled, tensors_in
from pipecompile.costs.saved_bytes import SavedLedger
from pipecompile.errors import InputError
from pipecompile.torch_private.fx_graphs import target_text
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.state.preserved_run import state_tensors

__all__ = ["COMPUTE_OPS", "Visit", "naming", "walk"]

T = TypeVar("T")

COMPUTE_OPS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Visit(Generic[T]):
    """What was learnt at one node: the meter's reading, and what every cost model reports of its bytes (`NodeCost`)."""

    reading: T
    saved_bytes: int
    output_bytes: int
    saves: frozenset[str] = frozenset()


def walk(graph: GraphModule, inputs: Sequence[object], meter: Callable[[NodeRun], T]) -> dict[str, Visit[T]]:
    """Visit every compute node in order. The meter is given the node's cell and must call `first` on it.

    Raises InputError when the inputs are not one per placeholder, CostError when a node fails.
    """
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        why = f"{len(placeholders)} placeholders ({', '.join(placeholders)}), {len(inputs)} values"
        raise InputError(
            "the inputs do not fit the graph", why=why, hint="pass one flat value per placeholder, in order"
        )
    walker = _Walker(graph, meter)
    walker.run(*inputs, enable_io_processing=False)
    makers = {name: walker.ledger.makers(kept) for name, kept in walker.kept.items()}
    return {name: replace(visit, saves=makers[name]) for name, visit in walker.visits.items()}


class _Walker(Interpreter, Generic[T]):
    def __init__(self, graph: GraphModule, meter: Callable[[NodeRun], T]) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # our errors name the node themselves
        self.meter = meter
        self.ledger = SavedLedger(state_tensors(graph))
        self.visits: dict[str, Visit[T]] = {}
        self.kept: dict[str, list[StorageWeakRef]] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            return map_tensors(_copied, super().run_node(n))
        if n.op not in COMPUTE_OPS:
            return super().run_node(n)
        with naming(n):
            return self._visit(n)

    def _visit(self, node: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        call = self._callable(node)
        parameters = tuple(call.parameters()) if isinstance(call, nn.Module) else ()
        cell = NodeRun(call, args, kwargs, parameters, self.ledger)
        reading = self.meter(cell)
        made = tensors_in(cell.value)
        self.kept[node.name] = self.ledger.made(node.name, made)
        size = sum(t.numel() * t.element_size() for t in made)
        self.visits[node.name] = Visit(reading, self.ledger.take(), size)
        return cell.value

    def _callable(self, node: Node) -> Callable[..., Any]:
        """What the node calls, so that running it costs nothing on top."""
        if node.op == "call_function":
            assert callable(node.target)
            if node.target is torch.autograd.grad:
                return _some_gradients
            return node.target
        name = str(node.target)
        if node.op == "call_method":
            return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)
        module: nn.Module = self.fetch_attr(name)
        return module


def _some_gradients(_outputs: object, inputs: Any, *_: object, **__: object) -> Any:
    """What stands for the gradients taken inside a model: the values between nodes are detached, so there is no way back."""
    return map_tensors(torch.ones_like, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs))


def _copied(tensor: Tensor) -> Tensor:
    return settled(tensor.clone())


@contextmanager
def naming(node: Node) -> Iterator[None]:
    """Errors in here become a CostError that names the node."""
    try:
        yield
    except Exception as error:
        raise _failed(node, error) from error


def _failed(node: Node, error: Exception) -> CostError:
    """The error that names the node: its module or function, and the user's line when the graph knows it."""
    target = target_text(node)
    sources = ", ".join(source.name for source in node.all_input_nodes)
    return CostError(
        f"node {node.name} ({node.op} {target}) failed: {type(error).__name__}: {error}",
        where=facts(node).source,
        why=f"it was run on its own, on the values of {sources}" if sources else "",
        hint="check that the graph runs on these inputs, outside the cost model",
    )
