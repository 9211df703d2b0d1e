"""Analytic costs: the kernels of every node, recorded on fake tensors and timed by the roofline of a named device.

Forward and, in grad mode, backward run on tensors without memory. A model with 70 billion parameters therefore needs no
memory, and the device need not be present. Time = max(FLOPs / peak, bytes / bandwidth) + launch overhead, per kernel.

FLOPs follow `flop_formulas.py`. Bytes are those that a kernel reads and writes if it reads each
operand once. Views launch nothing; a gather reads only the selected rows; a write-only kernel does not read its target.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pipecompile.costs.device_specs import DeviceSpec, spec_for
from pipecompile.costs.fake_kernels import FakeKernels
from pipecompile.costs.flop_formulas import flops_of
from pipecompile.costs.graph_walk import FakeTwins, OneDevice, Visit, walk
from pipecompile.costs.node_cost import NodeCost
from pipecompile.costs.node_run import NodeRun, map_tensors, tensors_in
from pipecompile.costs.run_signature import run_signature
from pipecompile.torch_private.modes import KnownValuesMode, ObservingMode, is_mkldnn_enabled, set_mkldnn_enabled
from pipecompile.torch_private.modules import NormBase
from pipecompile.torch_private.operators import schema_of
from pipecompile.torch_private.pytree import tree_leaves
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.state.preserved_run import state_tensors, untouched

__all__ = ["Kernel", "KernelLog", "NodeKernels", "analytic_costs", "node_work"]


@dataclass(frozen=True, slots=True)
class NodeKernels:
    """The kernels that one node launches, forward and backward. `divides`: the backward divides into I and W; None
    if unknown.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    divides: bool | None = None

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward; a multiplication and an addition count as two."""
        return sum(kernel.flops for kernel in self.forward)

    @property
    def backward_flops(self) -> float:
        """Return the FLOPs of the backward."""
        return sum(kernel.flops for kernel in self.backward)


def analytic_costs(
    graph: GraphModule, inputs: Sequence[object], *, device: DeviceSpec | torch.device | str
) -> dict[str, NodeCost]:
    """Return the cost of every node on `device`, given by name ("h100") or spec. Allocate no tensors.

    Raise InputError for an unknown device, CostError if a node cannot run on fake tensors.
    """
    spec = spec_for(device)
    return {name: _cost(visit, spec) for name, visit in node_work(graph, inputs).items()}


def _cost(visit: Visit[NodeKernels], spec: DeviceSpec) -> NodeCost:
    """Return the cost of a node. The gradients of a product's two factors cost the same: W has half of a divisible
    backward.
    """
    kernels = visit.reading
    forward, backward = _seconds(kernels.forward, spec), _seconds(kernels.backward, spec)
    weight = 0.0 if kernels.divides is False else backward / 2
    sizes = visit.saved_bytes, visit.output_bytes
    return NodeCost(forward, backward, *sizes, weight=weight, saves=visit.saves, flops=kernels.flops)


def node_work(graph: GraphModule, inputs: Sequence[object]) -> dict[str, Visit[NodeKernels]]:
    """Return the kernels of every compute node, for any device, by one walk on fake tensors."""
    device = _common_device([*state_tensors(graph), *tensors_in(tuple(inputs))])
    with untouched(graph), _plain_kernels(), KnownValuesMode(allow_non_fake_inputs=True), FakeKernels(device):
        _set_missing_momenta(graph)
        twins = FakeTwins(device)
        twins.replace_in(graph)
        return walk(graph, [map_tensors(twins.of, value) for value in inputs], _Tally(device))


class _Tally:
    """The meter of the walk: run each node once and record its kernels. Of nodes with equal signatures, the first is recorded."""

    def __init__(self, device: torch.device) -> None:
        self.log, self.place = KernelLog(), OneDevice(device)
        self._known: dict[Hashable, NodeKernels] = {}

    def __call__(self, run: NodeRun) -> NodeKernels:
        signature = run_signature(run)
        if signature is None:
            return self._recorded(run)
        if signature not in self._known:
            self._known[signature] = self._recorded(run)
        else:
            with self.place:
                run.first()
        return self._known[signature]

    def _recorded(self, run: NodeRun) -> NodeKernels:
        with self.log, self.place:
            run.first()
        forward = self.log.take()
        if isinstance(run.call, OpaqueModule):
            return _of_opaque(run.call, run.args)
        run.seed()
        divides = bool(run.weight_grad_nodes(recorded=True))
        return NodeKernels(forward, self._backward_of(run, forward), divides)

    def _backward_of(self, run: NodeRun, forward: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return the kernels of the backward: twice the forward where it is Python that reads values, which fakes lack."""
        try:
            with self.log:
                run.backward()
        except Exception:
            self.log.take()
            return forward * 2
        return self.log.take()


def _of_opaque(module: OpaqueModule, args: Sequence[object]) -> NodeKernels:
    """Return the kernels seen during recording, since fake tensors cannot run the call. Count the backward as twice
    the forward.
    """
    call, size = args[:2]
    assert isinstance(call, int)
    assert isinstance(size, int)
    forward = tuple(Kernel(*seen) for seen in module.kernels(call, size))
    trains = any(leaf.requires_grad for leaf in module.expected_results[call].leaves)
    return NodeKernels(forward, forward * 2 if trains else ())


def _set_missing_momenta(graph: GraphModule) -> None:
    """Set a momentum where BatchNorm has none, which would divide by a count that fake tensors lack. Call inside
    `untouched`.
    """
    for module in graph.modules():
        if isinstance(module, NormBase) and module.momentum is None:
            module.momentum = 0.1


def _seconds(kernels: tuple[Kernel, ...], spec: DeviceSpec) -> float:
    return sum(kernel.seconds(spec) for kernel in kernels)


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the model; the CPU if all is on `meta`, where attention would choose another algorithm."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Disable fused kernels without a FLOP formula: oneDNN's recurrent layers and the inference path of attention."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), is_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        set_mkldnn_enabled(onednn)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its FLOPs, the bytes that it moves, the dtype in which it computes, and whether it is a convolution."""

    flops: float
    moved: float
    dtype: torch.dtype
    convolves: bool = False

    def seconds(self, spec: DeviceSpec) -> float:
        """Return the roofline time on a device, with TF32 where torch.backends allows it now."""
        settings: Any = torch.backends.cudnn.conv if self.convolves else torch.backends.cuda.matmul  # type: ignore[attr-defined]
        return spec.seconds(self.flops, self.moved, self.dtype, tf32=settings.fp32_precision == "tf32")


class KernelLog(ObservingMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records every kernel."""

    supports_higher_order_operators = False

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[Kernel] = []

    def take(self) -> tuple[Kernel, ...]:
        """Return the kernels recorded since the last call."""
        taken, self._kernels = tuple(self._kernels), []
        return taken

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # queries of a tensor's device or layout
            return result
        read, results = _tensors((args, kwargs)), _tensors(result)
        if _launches(func, read, results):
            flops = flops_of(func, args, kwargs, result)
            convolves = "conv" in func.overloadpacket.__name__
            self._kernels.append(Kernel(flops, _moved(func, args, read, results), _dtype(read, results), convolves))
        return result


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
_SCATTERS = frozenset(
    {
        "index_put_",
        "_index_put_impl_",
        "index_add_",
        "index_copy_",
        "index_reduce_",
        "scatter_",
        "scatter_add_",
        "scatter_reduce_",
    }
)
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def _launches(func: Any, read: list[Tensor], results: list[Tensor]) -> bool:
    """Return whether a kernel runs: not if no tensor results, memory is only reserved, or the result is only a view."""
    if not results or func.overloadpacket.__name__ in _ALLOCATIONS:
        return False
    storages = {storage_key(tensor) for tensor in read}
    return bool(schema_of(func).is_mutable or any(storage_key(tensor) not in storages for tensor in results))


def _moved(func: Any, args: tuple[Any, ...], read: list[Tensor], results: list[Tensor]) -> float:
    name = func.overloadpacket.__name__
    written = sum(map(_bytes, results))
    if name in _GATHERS:
        return 2 * written + sum(_bytes(tensor) for tensor in read[1:])
    if name in _BAGS:
        table, rows = args[0], args[1]
        return written + _bytes(rows) + float(rows.numel() * table.shape[1] * table.element_size())
    if name in _SCATTERS:
        return 2 * sum(_bytes(tensor) for tensor in read[1:])
    skipped = args[0] if name in _OVERWRITES else None
    return written + sum(_bytes(tensor) for tensor in read if tensor is not skipped)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; an expanded dimension counts as one."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )


def _dtype(read: list[Tensor], results: list[Tensor]) -> torch.dtype:
    """Return the type of the first floating-point operand."""
    tensors = [*read, *results]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype)


def _tensors(value: object) -> list[Tensor]:
    leaves: Iterable[object] = tree_leaves(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
    return list(tensors.values())
