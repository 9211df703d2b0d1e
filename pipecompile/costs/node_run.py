"""A run of one node on its own, forward and backward, as often as needed.

Values between nodes are detached, so each node's backward stands alone:

    value ──detach──► Root ──► the node ──► result ──detach──► value
                       ▲                      │
                       └──── autograd.grad ───┘      seeded with ones

`Root` is an autograd node that copies nothing. Its output is not a leaf, so the node may write into it in place. The
output shares the storage of the value, so every other view of the value sees the write, as in the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipecompile.batching.containers import has_attributes
from pipecompile.batching.object_layout import layout_and_values
from pipecompile.graph.backward_split import INPUT, MIN_WEIGHT_FLOPS, divide_backward, explore_backward
from pipecompile.torch_private.pytree import tree_map
from pipecompile.torch_private.storages import version_of

__all__ = ["NodeRun", "SavedLedger", "map_tensors", "settled", "tensors_in"]


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with every tensor replaced by `change(tensor)`, in containers and slices."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*map(changed, (leaf.start, leaf.stop, leaf.step)))
        if has_attributes(leaf):
            layout, values = layout_and_values(leaf)
            return layout.build([map_tensors(change, one) for one in values])
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(changed, value, is_leaf=has_attributes)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the distinct tensors of a nested structure, in order."""
    tensors: list[Tensor] = []

    def kept(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(kept, value)
    return _distinct(tensors)


def settled(tensor: Tensor) -> Tensor:
    """Return the same storage outside any autograd graph, with the same `requires_grad`."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class NodeRun:
    """The runs of `call`, the function of a node. A run is `prepare`, `forward`, `seed`, `backward`, in this order.

    Only `first` has effects. It computes `value`, the result for the rest of the graph, and writes into the arguments
    if the node does. Later runs of a node that writes get copies, made by `prepare`.
    """

    def __init__(
        self,
        call: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        parameters: Iterable[Tensor],
        ledger: SavedLedger,
    ) -> None:
        self.call, self.args, self.kwargs, self._ledger = call, args, kwargs, ledger
        self.arguments = tensors_in((*args, *kwargs.values()))
        self.parameters = tuple(parameters)
        self._trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._anchor = torch.zeros((), requires_grad=True)
        self._ready: tuple[Any, Any] = (), {}
        self._aliases: dict[int, Tensor] = {}
        self._edges: list[GradientEdge] = []
        self._seeds: list[Tensor] = []
        self._versions: list[int] = []
        self._result: object = None
        self._value_of: dict[int, Tensor] = {}
        self.ends: list[Tensor] = []
        self.value: Any = None
        self.writes = False

    @property
    def computes(self) -> bool:
        """Return False if the node neither returned nor changed a tensor: sizes, switches of grad mode. Valid after
        `first`.
        """
        return self.writes or bool(tensors_in(self.value))

    @property
    def has_backward(self) -> bool:
        """Return whether `backward` has anything to do. Valid after `seed`."""
        return bool(self.ends)

    @property
    def sources(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the arguments and parameters that require a gradient, with their gradient edges."""
        rooted = [tensor for tensor in self.arguments if self._aliases[id(tensor)].requires_grad]
        return [*zip(rooted, self._edges, strict=True), *((p, get_gradient_edge(p)) for p in self._trained)]

    def first(self) -> None:
        """Run once with effects: record what autograd saves, and whether the node writes into its arguments."""
        self.prepare()
        with self._ledger.recording():
            self.forward()
        self.settle()

    def settle(self) -> None:
        """Record, after the run with effects, whether the node wrote, and compute the value for the rest of the
        graph.
        """
        self.writes = self._versions != [version_of(tensor) for tensor in self.arguments]
        for tensor in self.arguments:
            if self._aliases[id(tensor)].requires_grad and not tensor.requires_grad:
                tensor.requires_grad_()  # something that needs a gradient was written into it
        self._value_of = {id(self._aliases[id(tensor)]): tensor for tensor in self.arguments}
        self.value = map_tensors(self._settled, self._result)

    def _settled(self, result: Tensor) -> Tensor:
        is_own = isinstance(
            self._value_of.get(id(result)), nn.Parameter
        )  # `requires_grad_` returns the parameter itself
        value = nn.Parameter(result.detach(), result.requires_grad) if is_own else settled(result)
        self._value_of[id(result)] = value
        return value

    def value_of(self, end: Tensor) -> Tensor:
        """Return the value that the rest of the graph has for one of the `ends`."""
        return self._value_of[id(end)]

    def prepare(self) -> None:
        """Create fresh autograd roots for all arguments and drop the graph of the last run."""
        self._result, self.ends, self._seeds = None, [], []
        self._aliases, self._edges = {}, []
        for tensor in self.arguments:
            self._aliases[id(tensor)] = self._alias(tensor)
        self._versions = [version_of(tensor) for tensor in self.arguments]
        self._ready = map_tensors(lambda t: self._aliases[id(t)], (tuple(self.args), dict(self.kwargs)))

    def forward(self) -> None:
        """Run the node. This method and `backward` are the ones to time."""
        args, kwargs = self._ready
        self._result = self.call(*args, **kwargs)

    def find_ends(self) -> None:
        """Find the tensors where this node's backward starts; none if nothing requires a gradient."""
        roots = {edge.node for edge in self._edges}
        ends = [*tensors_in(self._result), *self._aliases.values()]
        differentiable_ends = _distinct(t for t in ends if t.grad_fn is not None and t.grad_fn not in roots)
        self.ends = differentiable_ends if self._edges or self._trained else []

    def weight_grad_nodes(self, *, recorded: bool) -> set[Node]:
        """Return the autograd nodes of gradients that W can compute: those of weights alone.

        Valid after `find_ends`. `recorded`: the last run was `first`.
        """
        if not self.ends:
            return set()
        nodes, (names, rows, count) = explore_backward(map(get_gradient_edge, self.ends), frozenset())
        named = tuple(INPUT if name == ROOT else name for name in names)
        least = MIN_WEIGHT_FLOPS.get(self.ends[0].device.type, MIN_WEIGHT_FLOPS["cuda"])
        division = divide_backward(nodes, (named, rows, count), least, ours=recorded)
        return {nodes[index] for _, weights in division.forks for index in weights}

    def seed(self) -> None:
        """Find the ends and create gradients of ones for them."""
        self.find_ends()
        self._seeds = [torch.ones_like(end) for end in self.ends]

    def backward(self) -> None:
        """Compute the gradients of arguments and parameters without accumulating into `.grad`."""
        if self.ends:
            sources: Any = (*self._edges, *self._trained)
            torch.autograd.grad(self.ends, sources, self._seeds, allow_unused=True)

    def _alias(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if self.writes:
            source = source.clone()
        if not tensor.requires_grad:
            return source
        with torch.enable_grad():
            leaf = isinstance(tensor, nn.Parameter)  # as it is in the model
            alias: Tensor = source.requires_grad_() if leaf else _Root.apply(self._anchor, source)
        self._edges.append(get_gradient_edge(alias))
        return alias


ROOT = "_RootBackward"
"""The name of a `_Root` node in autograd."""


class _Root(torch.autograd.Function):
    """The output `x` of an autograd node that shares its storage. The anchor only makes autograd record the node."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> tuple[None, None]:
        return None, None


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


class SavedLedger:
    """The sum of the storages that autograd saves while `recording()`. Storages of the tensors in `free` do not count.

    A storage is identified by a weak reference and not by its address: a value may be freed between two nodes and its
    address reused, but while the reference lives, the address of the storage's control block is not.
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self._known = {_key(t.untyped_storage()) for t in free if t.layout is torch.strided}
        self._bytes = 0
        self._new: list[StorageWeakRef] = []
        self._makers: dict[StorageWeakRef, list[str]] = {}
        self._is_dropping = False

    def recording(self) -> saved_tensors_hooks:
        """Return a context that counts what autograd saves."""
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    @contextmanager
    def dropping(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Count these inputs of a region that is recomputed, and nothing that is saved inside the block."""
        for tensor in inputs:
            self._pack(tensor)
        self._is_dropping = True
        try:
            yield
        finally:
            self._is_dropping = False

    def take(self) -> int:
        """Return the bytes added since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken

    def note_results(self, node: str, tensors: Iterable[Tensor]) -> list[StorageWeakRef]:
        """Note that a node returned these tensors. Return the storages that the node was the first to save."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._makers.setdefault(_key(tensor.untyped_storage()), []).append(node)
        new, self._new = self._new, []
        return new

    def makers(self, keys: Iterable[StorageWeakRef]) -> frozenset[str]:
        """Return the nodes that returned these storages, also as views. Complete after all nodes ran."""
        return frozenset(name for key in keys for name in self._makers.get(key, ()))

    def _pack(self, tensor: Tensor) -> Tensor:
        """Count one saved tensor. Return it detached, since an output would keep its own graph alive."""
        if tensor.layout is torch.strided and not self._is_dropping:
            storage = tensor.untyped_storage()
            reference = _key(storage)
            if reference not in self._known:
                self._known.add(reference)
                self._bytes += storage.nbytes()
                self._new.append(reference)
        return tensor.detach()


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
