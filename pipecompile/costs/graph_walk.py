"""The node-by-node walk that all cost models share: run the graph once; a meter runs each node.

`torch.fx.Interpreter` drops a value after its last user. Model inputs are copied first, because a node may write into
them. Fake twins stand for the tensors of a model on meta, or of a model whose values do not matter:

    parameter on meta, or real   ──►   fake on `device`; one twin per tensor, so that tied weights stay tied
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pipecompile.costs.node_cost import CostError
from pipecompile.costs.node_run import NodeRun, SavedLedger, map_tensors, settled, tensors_in
from pipecompile.errors import InputError, described
from pipecompile.torch_private.dtensors import like, part_of
from pipecompile.torch_private.fx_graphs import target_text
from pipecompile.torch_private.modules import backward_hooks_removed
from pipecompile.tracing.container_items import items_in
from pipecompile.tracing.fakes.fake_tensors import with_unknown_data
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.state.preserved_run import state_tensors

__all__ = ["COMPUTE_OPS", "FakeTwins", "MethodCall", "OneDevice", "Visit", "naming", "walk"]


T = TypeVar("T")

COMPUTE_OPS = ("call_module", "call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Visit(Generic[T]):
    """The result of one node: the meter's reading, and the bytes that every cost model reports (see `NodeCost`)."""

    reading: T
    saved_bytes: int
    output_bytes: int
    saves: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of a method of its first argument."""

    name: str

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.name)(*args, **kwargs)


def walk(graph: GraphModule, inputs: Sequence[object], meter: Callable[[NodeRun], T]) -> dict[str, Visit[T]]:
    """Run every compute node in order. The meter receives a NodeRun and must call `first` on it.

    Raise InputError unless there is one input per placeholder, CostError if a node fails.
    """
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        why = f"{len(placeholders)} placeholders ({', '.join(placeholders)}), {len(inputs)} values"
        raise InputError(
            "the inputs do not fit the graph", why=why, hint="pass one flat value per placeholder, in order"
        )
    walker = _Walker(graph, meter)
    with backward_hooks_removed(graph):  # they are to see the model's own gradients alone
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
        run = NodeRun(call, args, kwargs, parameters, self.ledger)
        with self.ledger.dropping(self._region_inputs(node)) if _is_recomputed(node) else nullcontext():
            reading = self.meter(run)
        results = tensors_in(run.value)
        self.kept[node.name] = self.ledger.note_results(node.name, results)
        size = sum(t.numel() * t.element_size() for t in results)
        self.visits[node.name] = Visit(reading, self.ledger.take(), size)
        return run.value

    def _region_inputs(self, node: Node) -> list[Tensor]:
        """Return the tensors that a node of a recomputed region takes from outside of it: what the region saves."""
        region = _outermost(node)
        values = [self.env[source] for source in node.all_input_nodes if _outermost(source) is not region]
        return tensors_in(values)

    def _callable(self, node: Node) -> Callable[..., Any]:
        """Return the function that the node calls, without any wrapper that would cost time."""
        if node.op == "call_function":
            assert callable(node.target)
            if node.target is torch.autograd.grad:
                return _some_gradients
            return node.target
        name = str(node.target)
        if node.op == "call_method":
            return MethodCall(name)
        module: nn.Module = self.fetch_attr(name)
        return module


def _outermost(node: Node) -> RecomputedRegion | None:
    """Return the outermost region of the user's own checkpointing around a node."""
    region = facts(node).region
    return None if region is None else region.path[0]


def _is_recomputed(node: Node) -> bool:
    """Return whether all that the node saves is recomputed. What a `context_fn` of the user's recomputes is not known."""
    region = facts(node).region
    return region is not None and not region.is_selective and torch.is_grad_enabled()


def _some_gradients(_outputs: object, inputs: Any, *_: object, **__: object) -> Any:
    """Return ones in place of gradients taken inside a model: values between nodes are detached and have no
    backward.
    """
    return map_tensors(torch.ones_like, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs))


def _copied(tensor: Tensor) -> Tensor:
    return settled(tensor.clone())


@contextmanager
def naming(node: Node) -> Iterator[None]:
    """Turn errors inside this context into a CostError that names the node."""
    try:
        yield
    except Exception as error:
        raise _failed(node, error) from error


def _failed(node: Node, error: Exception) -> CostError:
    """Return the error with the node, its module or function, and the user's line if known."""
    target = target_text(node)
    sources = ", ".join(source.name for source in node.all_input_nodes)
    return CostError(
        f"node {node.name} ({node.op} {target}) failed: {described(error)}",
        where=facts(node).source,
        why=f"the node ran alone, on the values of {sources}" if sources else "",
        hint="check that graph(*inputs) runs",
    )


class FakeTwins:
    """One fake twin per tensor. Use inside a FakeTensorMode. No data are copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor. The original is kept alive, so that no other tensor can take its id."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def replace_in(self, model: nn.Module) -> None:
        """Replace the model's tensors by twins, also in lists such as those of recurrent layers.

        The originals are not restored: call inside `untouched`.
        """
        for module in model.modules():
            attributes = vars(module)
            for key, value in attributes.items():
                if isinstance(value, Tensor):
                    attributes[key] = self.of(value)
                elif isinstance(value, dict | list):
                    self._replace_items(value)

    def _replace_items(self, container: dict[Any, Any] | list[Any]) -> None:
        items = items_in(container)
        for key, value in items if isinstance(container, dict) else enumerate(items):
            if isinstance(value, Tensor):
                container[key] = self.of(value)

    def _make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            twin = like(tensor, self._make(part_of(tensor)))
            return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        shape = [int(size) for size in tensor.shape]
        if tensor.layout is torch.strided:
            twin = torch.empty_strided(
                shape, [int(step) for step in tensor.stride()], dtype=tensor.dtype, device=self._device
            )
        else:  # sparse: costs are those of a dense tensor
            twin = torch.empty(shape, dtype=tensor.dtype, device=self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)


class OneDevice(TorchFunctionMode):
    """Replaces the device of calls that name one by `device`: a graph recorded on `meta` has `zeros(...,
    device="meta")`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.cpu):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = self._device
        if func is Tensor.to:
            args = (args[0], *(self._device if isinstance(arg, str) else arg for arg in args[1:]))
        if func is Tensor.__setitem__ and _selects_by_mask(args[1]):
            return _write_by_mask(args[0], args[2])
        args = tuple(self._device if isinstance(arg, torch.device) else arg for arg in args)
        return with_unknown_data(func, args, kwargs)(*args, **kwargs)


def _selects_by_mask(index: Any) -> bool:
    """Return whether the values of the index decide how many elements it selects."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _write_by_mask(tensor: Tensor, value: Any) -> None:
    """Stand for `tensor[mask] = value`, which fake tensors cannot run: write the tensor once, with a gradient to both."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.add_(value.sum().to(tensor.dtype) if isinstance(value, Tensor) else 0)
    else:
        tensor.zero_()
