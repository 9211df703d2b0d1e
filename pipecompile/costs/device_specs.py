"""Data sheets: peak rates of devices and of the links between them, for the analytic cost model and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from pipecompile.errors import InputError
from pipecompile.ir import HOST, Route
from pipecompile.text.input_checks import LARGEST_OPTION, amount
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.accelerators import is_accelerator

__all__ = ["Bandwidth", "DEVICES", "DeviceSpec", "Links", "PCIE4", "part_of", "spec_for"]


TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
GIB = 1 << 30
PCIE3, PCIE4, PCIE5 = 15.75 * GIGA, 31.5 * GIGA, 63.0 * GIGA
"""Bytes per second of 16 lanes in one direction, after line coding (PCI-SIG)."""

GPU_LAUNCH, CPU_LAUNCH = 5 * MICRO, 2 * MICRO
"""Seconds of overhead per eager PyTorch operator. Not from a data sheet: the order of magnitude that profilers show."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Peak rates of one device: dense (no sparsity), one direction of its link. Rates are per second, sizes in bytes.

    Raise InputError for another value. `link_latency` and `launch_overhead` are seconds. `tf32` is the rate of float32 products on tensor cores, 0 without them.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    link_bandwidth: float
    link_latency: float
    launch_overhead: float
    memory: int
    tf32: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InputError(f"name={shown(self.name)} of a DeviceSpec is not text", hint='name="mine"')
        if not isinstance(self.flops, Mapping) or torch.float32 not in self.flops:
            hint = "flops={torch.float32: 60e12, torch.bfloat16: 900e12}"
            raise InputError(f"flops={shown(self.flops)} has no FLOP/s of torch.float32", where=self.name, hint=hint)
        for dtype, rate in self.flops.items():
            amount(f"flops[{shown(dtype)}]", rate, zero=False, largest=LARGEST_OPTION)
        for field in ("bandwidth", "link_bandwidth", "memory"):
            amount(field, getattr(self, field), zero=False, largest=LARGEST_OPTION)
        for field in ("link_latency", "launch_overhead", "tf32"):
            amount(field, getattr(self, field), largest=LARGEST_OPTION)

    def peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the FLOP/s in `dtype`. A type that the data sheet does not list runs at the float32 rate.

        `tf32`: products of float32 may run on tensor cores, as torch.backends says.
        """
        if tf32 and dtype == torch.float32 and self.tf32:
            return self.tf32
        return self.flops.get(dtype, self.flops[torch.float32])

    def seconds(self, flops: float, moved: float, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the roofline time of one kernel: the longer of computing and of moving its bytes, plus a launch."""
        return max(flops / self.peak(dtype, tf32=tf32), moved / self.bandwidth) + self.launch_overhead


def _gpu(
    name: str,
    *,
    fp64: float,
    fp32: float,
    fp16: float,
    bf16: float = 0.0,
    fp8: float = 0.0,
    memory: int,
    bandwidth: float,
    link: float,
    latency: float = 10 * MICRO,
) -> DeviceSpec:
    """Return a GPU from the figures of its data sheet: TFLOP/s, GiB, GB/s; `link` is bytes/s in one direction."""
    rates = {torch.float64: fp64, torch.float32: fp32, torch.float16: fp16, torch.bfloat16: bf16,
             torch.float8_e4m3fn: fp8, torch.float8_e5m2: fp8}  # fmt: skip
    flops = {dtype: rate * TERA for dtype, rate in rates.items() if rate}
    tf32 = flops.get(torch.bfloat16, 0.0) / 2  # so on all data sheets since Ampere
    return DeviceSpec(name, flops, bandwidth * GIGA, link, latency, GPU_LAUNCH, memory * GIB, tf32)


# float32 is the rate of the CUDA cores: by default PyTorch multiplies matrices in full float32, and convolves in TF32
# (torch.backends). NVLink figures on data sheets add both directions; here is one.
_SPECS = (
    # Intel ARK, Xeon Platinum 8380: 40 cores x 2.3 GHz x 2 AVX-512 FMA units; DDR4-3200 x 8. Its link is its DRAM.
    DeviceSpec(
        "cpu", {torch.float64: 2.94 * TERA, torch.float32: 5.89 * TERA}, bandwidth=204.8 * GIGA, link_bandwidth=102.4 * GIGA,
        link_latency=MICRO, launch_overhead=CPU_LAUNCH, memory=256 * GIB,
    ),
    # NVIDIA Tesla P40 data sheet; halves at 1/64 of the float32 rate (CUDA programming guide, 6.1).
    _gpu("p40", fp64=0.367, fp32=12.0, fp16=0.183, memory=24, bandwidth=346, link=PCIE3),
    # NVIDIA Tesla P100 data sheet, SXM2: NVLink 160 GB/s both ways.
    _gpu("p100", fp64=5.3, fp32=10.6, fp16=21.2, memory=16, bandwidth=732, link=80 * GIGA),
    # NVIDIA Tesla V100 data sheet, SXM2 32 GB: tensor cores in halves only, not bfloat16; NVLink 300 GB/s both ways.
    _gpu("v100", fp64=7.8, fp32=15.7, fp16=125, memory=32, bandwidth=900, link=150 * GIGA),
    # NVIDIA T4 data sheet.
    _gpu("t4", fp64=0.25, fp32=8.1, fp16=65, memory=16, bandwidth=320, link=PCIE3),
    # NVIDIA A10 data sheet.
    _gpu("a10", fp64=0.49, fp32=31.2, fp16=125, bf16=125, memory=24, bandwidth=600, link=PCIE4),
    # NVIDIA A100 data sheet, SXM 80 GB: NVLink 600 GB/s both ways.
    _gpu("a100", fp64=9.7, fp32=19.5, fp16=312, bf16=312, memory=80, bandwidth=2039, link=300 * GIGA),
    # NVIDIA L4 data sheet (its tensor figures are with sparsity, halved here).
    _gpu("l4", fp64=0.47, fp32=30.3, fp16=121, bf16=121, fp8=242.5, memory=24, bandwidth=300, link=PCIE4),
    # NVIDIA L40S data sheet.
    _gpu("l40s", fp64=1.43, fp32=91.6, fp16=362, bf16=362, fp8=733, memory=48, bandwidth=864, link=PCIE4),
    # NVIDIA H100 data sheet, SXM (tensor figures with sparsity, halved here): NVLink 900 GB/s both ways.
    _gpu("h100", fp64=34, fp32=67, fp16=989.5, bf16=989.5, fp8=1979, memory=80, bandwidth=3350, link=450 * GIGA),
    # NVIDIA H200 data sheet, SXM: the H100 with more and faster memory.
    _gpu("h200", fp64=34, fp32=67, fp16=989.5, bf16=989.5, fp8=1979, memory=141, bandwidth=4800, link=450 * GIGA),
    # NVIDIA DGX B200 data sheet, an eighth of it (sparse tensor figures halved here): NVLink 1.8 TB/s both ways.
    _gpu("b200", fp64=37, fp32=75, fp16=2250, bf16=2250, fp8=4500, memory=180, bandwidth=8000, link=900 * GIGA),
)  # fmt: skip

DEVICES: Mapping[str, DeviceSpec] = {spec.name: spec for spec in _SPECS}
"""Data sheets by name."""


def spec_for(device: DeviceSpec | torch.device | str) -> DeviceSpec:
    """Return the data sheet of a device given by name ("h100") or as a torch.device ("cuda:1", "cpu").

    A GPU that is present but has no data sheet counts as an A100 with its own memory. Raise InputError, listing the
    known names, for any other name; pass a DeviceSpec of your own instead.
    """
    if isinstance(device, DeviceSpec):
        return device
    name = str(device).lower()
    if name.partition(":")[0] == "cuda":
        name = _card(torch.device(name))
        if torch.cuda.is_available():
            return _scaled(torch.device(device), name) if name in DEVICES else _unlisted(torch.device(device), name)
    if name.startswith("cpu:"):
        name = "cpu"
    if name not in DEVICES:
        hint = f"pass one of {', '.join(DEVICES)}, or a pipecompile.costs.DeviceSpec"
        raise InputError(
            f"no data sheet for device {shown(str(device))}",
            why="" if name == str(device) else f"it is {shown(name)}",
            hint=hint,
        )
    return DEVICES[name]


def _card(device: torch.device) -> str:
    """Return the short name of the CUDA device: "h100" for "NVIDIA H100 80GB HBM3"; the full name if no data sheet
    matches.
    """
    if not torch.cuda.is_available():
        return "cuda, but there is none here"
    full = torch.cuda.get_device_name(device).lower()
    words = full.replace("-", " ").split()
    return next((word for word in words if word in DEVICES), full)


_MULTIPROCESSORS = {
    "p40": 30, "p100": 56, "v100": 80, "t4": 40, "a10": 72, "a100": 108, "l4": 58, "l40s": 142, "h100": 132, "h200": 132, "b200": 148,
}  # fmt: skip
"""Multiprocessors of the card of each data sheet."""

_PCIE = {"v100": PCIE3, "p100": PCIE3, "a100": PCIE4, "h100": PCIE5, "h200": PCIE5}
"""Links of the cards of which there is one without NVLink."""


def _scaled(device: torch.device, name: str) -> DeviceSpec:
    """Return the data sheet of the card that is there: with its memory, with the rates of as many multiprocessors as it has, and
    with its link. A MIG slice has the bandwidth of its part of the memory.
    """
    spec, full = DEVICES[name], torch.cuda.get_device_name(device).lower()
    properties = torch.cuda.get_device_properties(device)
    share = min(1.0, properties.multi_processor_count / _MULTIPROCESSORS[name])
    is_slice = "mig" in full.replace("-", " ").split()
    bandwidth = spec.bandwidth * (min(1.0, properties.total_memory / spec.memory) if is_slice else 1.0)
    return replace(
        spec,
        flops={dtype: rate * share for dtype, rate in spec.flops.items()},
        tf32=spec.tf32 * share,
        bandwidth=bandwidth,
        link_bandwidth=_PCIE.get(name, spec.link_bandwidth) if "pcie" in full else spec.link_bandwidth,
        memory=properties.total_memory,
    )


def part_of(spec: DeviceSpec, count: int) -> DeviceSpec:
    """Return the rates of one of `count` partitions of a card. Memory and its bandwidth are not divided, but shared."""
    flops = {dtype: rate / count for dtype, rate in spec.flops.items()}
    return replace(spec, name=f"1/{count} of {spec.name}", flops=flops, tf32=spec.tf32 / count)


def _unlisted(device: torch.device, name: str) -> DeviceSpec:
    """Return the spec of a GPU without a data sheet: its own memory and the rates of an A100.

    A cut depends on the ratios between nodes and hardly on the rates themselves.
    """
    memory = torch.cuda.get_device_properties(device).total_memory
    return replace(DEVICES["a100"], name=name, memory=memory)


Bandwidth = float | tuple[tuple[float, ...], ...]
"""Bytes per second: one number for all pairs of devices, or a square with one number per pair."""


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds per byte and seconds of latency of the fastest pair; `factors[p][q]` is the slowdown of the pair (p,
    q). `streams` is the stream of each device, where several are the same GPU; None otherwise.
    """

    seconds_per_byte: float
    latency: float
    factors: tuple[tuple[float, ...], ...] | None = None
    streams: tuple[int, ...] | None = None

    @classmethod
    def of(cls, devices: Sequence[torch.device], bandwidth: Bandwidth | None) -> Links:
        """Return the links with the given `bandwidth`, else from the data sheets; zero if all stages share one
        device.
        """
        places = {device: index for index, device in enumerate(dict.fromkeys(devices))}
        is_shared = len(places) < len(devices) and is_accelerator(devices[0])
        streams = tuple(places[device] for device in devices) if is_shared else None
        return replace(cls._between(devices, bandwidth), streams=streams)

    @classmethod
    def within(cls, device: torch.device, bandwidth: Bandwidth | None) -> Links:
        """Return the links between partitions of one card: a copy reads and writes the memory of the card."""
        spec = spec_for(device)
        if bandwidth is not None:
            return cls._between([device], bandwidth)
        return cls(2.0 / spec.bandwidth, spec.launch_overhead)

    @classmethod
    def _between(cls, devices: Sequence[torch.device], bandwidth: Bandwidth | None) -> Links:
        spec = spec_for(devices[0])
        if isinstance(bandwidth, tuple):
            pairs = [(p, q) for p in range(len(devices)) for q in range(len(devices)) if p != q]
            finite = [bandwidth[p][q] for p, q in pairs if bandwidth[p][q] < inf]
            best = max(finite, default=inf if pairs else 1.0)
            rows = [
                [best / bandwidth[p][q] if p != q and finite else 0.0 for q in range(len(devices))]
                for p in range(len(devices))
            ]
            return cls(1.0 / best, spec.link_latency, tuple(map(tuple, rows)))
        if bandwidth is not None:
            return cls(1.0 / bandwidth, spec.link_latency)
        if len(set(devices)) == 1:
            return cls(0.0, 0.0)
        factors = tuple(tuple(float(one != other) for other in devices) for one in devices)
        is_shared = len(set(devices)) < len(devices)
        return cls(1.0 / spec.link_bandwidth, spec.link_latency, factors if is_shared else None)

    def seconds(self, routes: Sequence[Route], placement: Sequence[int] | None) -> dict[str, float]:
        """Return, per route, the seconds of its slowest link in one direction; of the fastest link without a
        placement.
        """
        return {route.value: self._worst(route, placement) for route in routes}

    def _worst(self, route: Route, placement: Sequence[int] | None) -> float:
        once = self.latency + route.nbytes * self.seconds_per_byte
        if self.factors is None or placement is None or route.source == HOST:
            return once
        ends = [placement[end] for end in route.consumers if end != HOST]
        return once * max((self.factors[placement[route.source]][end] for end in ends), default=0.0)
