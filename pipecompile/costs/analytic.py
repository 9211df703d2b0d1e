"""Costs by arithmetic: the kernels of every node, found on fake tensors, timed by the roofline of a named device.

Forward and, in grad mode, backward are really run, on tensors without memory. So a 70B model costs no memory, and the
machine at hand need not have the device. Time = max(FLOPs / peak, bytes / bandwidth) + launch overhead, per kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from pipecompile.costs.devices import DeviceSpec, spec_for
from pipecompile.costs.fake_inputs import FakeTwins, OneDevice
from pipecompile.costs.graph_walk import Visit, walk
from pipecompile.costs.kernels import Kernel, KernelLog
from pipecompile.costs.node_cost import NodeCost
from pipecompile.costs.node_run import NodeRun, map_tensors, tensors_in
from pipecompile.torch_private.modes import FakeTensorMode, is_mkldnn_enabled, set_mkldnn_enabled
from pipecompile.torch_private.modules import NormBase
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.state.preserved_run import state_tensors, untouched

__all__ = ["NodeKernels", "analytic_costs", "node_work"]


@dataclass(frozen=True, slots=True)
class NodeKernels:
    """The kernels that one node launches, forward and backward. Does the backward divide into I and W? None: unknown."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    divides: bool | None = None

    @property
    def flops(self) -> float:
        """FLOPs of the forward; a multiplication and an addition are two."""
        return sum(kernel.flops for kernel in self.forward)

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward."""
        return sum(kernel.flops for kernel in self.backward)


def analytic_costs(
    graph: GraphModule, inputs: Sequence[object], *, device: DeviceSpec | torch.device | str
) -> dict[str, NodeCost]:
    """What every node would cost on `device`, by name ("h100") or spec. Allocates nothing and needs no such device.

    Raises InputError for an unknown device, CostError when a node cannot be run on fake tensors.
    """
    spec = spec_for(device)
    return {name: _cost(visit, spec) for name, visit in node_work(graph, inputs).items()}


def _cost(visit: Visit[NodeKernels], spec: DeviceSpec) -> NodeCost:
    """The gradients of a product's two factors are as dear, so W has half of a backward that divides."""
    work = visit.reading
    forward, backward = _seconds(work.forward, spec), _seconds(work.backward, spec)
    weight = 0.0 if work.divides is False else backward / 2
    return NodeCost(forward, backward, visit.saved_bytes, visit.output_bytes, weight=weight, saves=visit.saves)


def node_work(graph: GraphModule, inputs: Sequence[object]) -> dict[str, Visit[NodeKernels]]:
    """The kernels of every compute node, on whatever device: one walk on fake tensors."""
    device = _common_device([*state_tensors(graph), *tensors_in(tuple(inputs))])
    with untouched(graph), _plain_kernels(), FakeTensorMode():
        _known_momenta(graph)
        twins = FakeTwins(device)
        twins.replace_in(graph)
        return walk(graph, [map_tensors(twins.of, value) for value in inputs], _Tally(device))


class _Tally:
    """The meter of the walk: one run of each node, its kernels noted."""

    def __init__(self, device: torch.device) -> None:
        self.log, self.place = KernelLog(), OneDevice(device)

    def __call__(self, cell: NodeRun) -> NodeKernels:
        with self.log, self.place:
            cell.first()
        forward = self.log.take()
        if isinstance(cell.call, OpaqueModule):
            return _of_opaque(cell.call, cell.args)
        cell.seed()
        divides = bool(cell.late(recorded=True))
        with self.log:
            cell.backward()
        return NodeKernels(forward, self.log.take(), divides)


def _of_opaque(module: OpaqueModule, args: Sequence[object]) -> NodeKernels:
    """What was seen while recording; fake tensors cannot run it. The backward is taken as twice the forward."""
    call, size = args[:2]
    assert isinstance(call, int)
    assert isinstance(size, int)
    forward = tuple(Kernel(*seen) for seen in module.kernels(call, size))
    trains = any(leaf.requires_grad for leaf in module.expected_results[call].leaves)
    return NodeKernels(forward, forward * 2 if trains else ())


def _known_momenta(graph: GraphModule) -> None:
    """BatchNorm without a momentum divides by its own count, which a fake tensor does not know. Called inside `untouched`."""
    for module in graph.modules():
        if isinstance(module, NormBase) and module.momentum is None:
            module.momentum = 0.1


def _seconds(kernels: tuple[Kernel, ...], spec: DeviceSpec) -> float:
    return sum(kernel.seconds(spec) for kernel in kernels)


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Where the model lives; the CPU for one on `meta`, where attention would choose another algorithm."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without fused kernels that have no FLOP formula: oneDNN's recurrent layers, the inference path of attention."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), is_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        set_mkldnn_enabled(onednn)
