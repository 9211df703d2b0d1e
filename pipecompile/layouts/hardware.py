"""A cluster: nodes of equal devices, their memory, and the links inside and between nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from numbers import Real

from pipecompile.costs.device_specs import DEVICES, GIGA, DeviceSpec, spec_for
from pipecompile.errors import InputError
from pipecompile.text.input_checks import LARGEST_OPTION, OVERFLOW, float_of, size_fault, whole
from pipecompile.text.shown_value import shown

__all__ = ["EFFICIENCY", "Cluster", "cluster_of"]

USABLE = 0.9
"""Share of a device's memory that tensors can have. The rest is for the CUDA context, buffers of NCCL and fragments of the allocator:
predicted and measured activations differ by up to 18 % (benchmarks/results/memory.md), and are about half of the memory.
"""

EFFICIENCY = {"a100": 0.59, "h100": 0.53}
"""Share of the data sheet's rates that training reaches, fitted to published runs by benchmarks/clusters.py."""

_UNFITTED = 0.5
"""Share for devices of which no published table was fitted."""

_BETWEEN = {
    # NVIDIA DGX-1 with V100: 4 InfiniBand adapters of 100 Gb/s for 8 GPUs (DGX-1 data sheet).
    "v100": 6.25,
    # NVIDIA DGX A100: 8 adapters of 200 Gb/s for 8 GPUs (DGX A100 data sheet).
    "a100": 25.0,
    # NVIDIA DGX H100, H200 and B200: 8 adapters of 400 Gb/s for 8 GPUs (their data sheets).
    "h100": 50.0,
    "h200": 50.0,
    "b200": 50.0,
}
"""GB/s of a device to other nodes, in one direction."""

_NAME = re.compile(r"\s*(?:([0-9]{1,9})\s*x\s*)?([0-9]{1,9})\s*x\s*([a-z]\w*)\s*", re.IGNORECASE)

_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` nodes of `devices_per_node` devices.

    **device:** a name of `pipecompile.costs.DEVICES` ("h100"), or a `DeviceSpec`.

    **memory:** bytes per device that tensors can have; None: 0.9 of the data sheet's.

    **link_inside, link_between:** bytes per second that a device sends to devices of its node, and to other nodes. None: the data
    sheets of the device and of NVIDIA's systems of 8 such devices.

    **efficiency:** share of the data sheet's FLOP/s and bandwidth of devices that kernels reach; None: the share that was fitted to
    published runs, 0.5 for a device without such runs.

    Raise InputError for a value that is none of these, and where a link between nodes is not known.
    """

    device: DeviceSpec | str
    nodes: int = 1
    devices_per_node: int = _PER_NODE
    memory: float | None = None
    link_inside: float | None = None
    link_between: float | None = None
    efficiency: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, (str, DeviceSpec)):
            raise InputError(f"device={shown(self.device)} is neither a name nor a DeviceSpec", hint='device="h100"')
        spec_for(self.device)
        whole("nodes", self.nodes, 1)
        whole("devices_per_node", self.devices_per_node, 1)
        for name in ("memory", "link_inside", "link_between", "efficiency"):
            _check_amount(name, getattr(self, name))
        if self.nodes > 1 and self.link_between is None and self.spec.name not in _BETWEEN:
            raise InputError(
                f"the link between nodes of {self.spec.name} is not known",
                why=f"known are those of systems with {', '.join(_BETWEEN)}",
                hint="link_between=12.5e9, bytes per second of a device to other nodes",
            )

    @classmethod
    def of(cls, name: str) -> Cluster:
        """Return the cluster of a name: "8xH100", "64xH100" (nodes of 8), "4x8xH100" (4 nodes of 8).

        Raise InputError for another name, and for a number of devices that does not fill its nodes.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None or match[3].lower() not in DEVICES:
            hint = f'{_meant(name)}, or "4x8xH100" for 4 nodes; devices are {", ".join(DEVICES)}; or pc.Cluster(...)'
            raise InputError(f"{shown(name)} is not the name of a cluster", hint=hint)
        nodes, count, device = match[1], int(match[2]), match[3].lower()
        if 0 in (count, int(nodes or 1)):
            raise InputError(f"the cluster {shown(name)} has no devices", hint=f'"8x{match[3]}"')
        if nodes is not None:
            return cls(device=device, nodes=int(nodes), devices_per_node=count)
        if count > _PER_NODE and count % _PER_NODE:
            less = count // _PER_NODE * _PER_NODE
            hint = f'"{less}x{match[3]}" or "{less + _PER_NODE}x{match[3]}"; "1x{count}x{match[3]}" for one node of {count}'
            raise InputError(f"{count} devices do not fill nodes of {_PER_NODE}", where=repr(name), hint=hint)
        return cls(device=device, nodes=max(1, count // _PER_NODE), devices_per_node=min(count, _PER_NODE))

    @property
    def spec(self) -> DeviceSpec:
        """The data sheet of a device."""
        return spec_for(self.device)

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def capacity(self) -> float:
        """Bytes per device that tensors can have."""
        return USABLE * self.spec.memory if self.memory is None else float(self.memory)

    @property
    def inside(self) -> float:
        """Bytes per second of a device to devices of its node."""
        return self.spec.link_bandwidth if self.link_inside is None else float(self.link_inside)

    @property
    def between(self) -> float:
        """Bytes per second of a device to other nodes."""
        if self.link_between is None:
            return _BETWEEN.get(self.spec.name, 0.0) * GIGA or self.inside
        return float(self.link_between)

    @property
    def reached(self) -> float:
        """Share of the data sheet's rates that kernels reach."""
        return EFFICIENCY.get(self.spec.name, _UNFITTED) if self.efficiency is None else float(self.efficiency)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node} {self.spec.name}"


def _meant(name: object) -> str:
    """Return the name of the cluster that is most like a mistyped one, in quotes; "8xH100" if none is like it."""
    text = name[:80].lower() if isinstance(name, str) else ""
    close = [near for word in re.findall(r"[a-z]+[0-9]+[a-z]?", text) for near in get_close_matches(word, DEVICES, 1)]
    count = re.search(r"(?<![a-z0-9])[1-9][0-9]{0,5}(?![0-9])", text)
    return f'"{int(count[0]) if count else _PER_NODE}x{close[0].upper() if close else "H100"}"'


def cluster_of(cluster: Cluster | str) -> Cluster:
    """Return a cluster, given itself or by name. Raise InputError for anything else."""
    if isinstance(cluster, str):
        return Cluster.of(cluster)
    if not isinstance(cluster, Cluster):
        hint = '"8xH100", or pc.Cluster(device="h100", nodes=2)'
        raise InputError(f"{shown(cluster)} is neither a Cluster nor the name of one", hint=hint)
    return cluster


def _check_amount(name: str, value: object) -> None:
    """Raise InputError unless `value` is None or a number above 0; an efficiency is at most 1."""
    if value is None:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < float_of(value) < inf:  # type: ignore[arg-type]
        raise InputError(
            f"{name}={shown(value)} is not a finite number above 0", hint=f"no {name}=, for the data sheet's"
        )
    if fault := size_fault(float_of(value), LARGEST_OPTION, zero=False):  # type: ignore[arg-type]
        raise InputError(f"{name}={shown(value)} is {fault}", why=OVERFLOW, hint=f"no {name}=, for the data sheet's")
    if name == "efficiency" and float(value) > 1:  # type: ignore[arg-type]
        raise InputError(
            f"efficiency={shown(value)} is above 1", why="it is a share of the data sheet's rates", hint="0.5"
        )
