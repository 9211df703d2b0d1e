"""Streams of pipeline devices that share one card: a stream per device, on multiprocessors of its own, and one per pair for copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_probes import Skipped

import pipecompile as pc
from pipecompile.ir import HOST, Op
from pipecompile.ir.training_routes import training_routes
from pipecompile.passes import lower
from pipecompile.runtime.cells.stage_cells import loss_cells
from pipecompile.runtime.executable import Executable, ProgramBinding
from pipecompile.runtime.gpu_spans import mark_origins
from pipecompile.runtime.interpreter import bind
from pipecompile.runtime.transport import Link

_KEPT: list[object] = []
"""Contexts of partitions: their streams are valid as long as they live."""


def partition_streams(count: int) -> list[Any]:
    """Return a stream on each of `count` disjoint partitions of the multiprocessors of the first GPU."""
    try:
        from cuda.bindings import driver as cu
    except ImportError as error:
        raise Skipped(f"cuda.bindings is not installed ({error})") from None

    def called(found: Any) -> Any:
        if found[0] != cu.CUresult.CUDA_SUCCESS:
            raise Skipped(f"the driver has no partitions here: {found[0]}")
        return found[1] if len(found) == 2 else found[1:]

    torch.zeros(1, device="cuda:0")
    device = called(cu.cuDeviceGet(0))
    whole = called(cu.cuDeviceGetDevResource(device, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, *_ = called(cu.cuDevSmResourceSplitByCount(count, whole, 0, whole.sm.smCount // count // 8 * 8))
    streams = []
    for group in groups[:count]:
        description = called(cu.cuDevResourceGenerateDesc([group], 1))
        context = called(
            cu.cuGreenCtxCreate(description, device, cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        )
        stream = called(cu.cuGreenCtxStreamCreate(context, cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        streams.append(torch.cuda.ExternalStream(int(stream), device=0))
        _KEPT.append(context)
    return streams


class CardCopy(Link):
    """A copy within the memory of the card."""

    def send(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)


class Partitioned:
    """Streams of pipeline devices: `computes` has one per device; None on the CPU, where all is done at once."""

    def __init__(self, computes: Sequence[Any]) -> None:
        self.computes = computes
        self.lanes: dict[tuple[int, int], OwnStream] = {}
        self.spans: list[tuple[int, Any, Any]] | None = None

    def apart(self, source: int, target: int) -> bool:
        return source not in (target, HOST)

    def stream(self, lane: tuple[int, int]) -> OwnStream:
        if lane not in self.lanes:
            copies = None if self.computes[0] is None else torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.lanes[lane] = OwnStream(self.computes[lane[0]] if lane[0] == lane[1] else copies, self)
        return self.lanes[lane]

    def link(self, source: int, target: int) -> Link:
        return CardCopy() if self.apart(source, target) else Link()

    def fork(self, frame: Any) -> None:
        mark_origins(frame, [torch.device("cuda:0")] if self.computes[0] is not None else [])
        for lane in self.lanes.values():
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        for lane in self.lanes.values():
            if lane.stream is not None:
                torch.cuda.current_stream().wait_stream(lane.stream)

    def finish(self) -> None:
        if self.computes[0] is not None:
            torch.cuda.synchronize()

    def bubble(self, step: Callable[[], object]) -> float:
        """Return the idle share of the devices in a step, by events on their streams; 0 on the CPU."""
        if self.computes[0] is None:
            step()
            return 0.0
        first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        self.spans = []
        step()
        torch.cuda.synchronize()
        spans, self.spans = [(first.elapsed_time(a), first.elapsed_time(b)) for _, a, b in self.spans], None
        makespan = max(end for _, end in spans) - min(start for start, _ in spans)
        return 1 - sum(end - start for start, end in spans) / len(self.computes) / makespan


class OwnStream:
    """A stream that is current for what it runs."""

    def __init__(self, stream: Any, owner: Partitioned) -> None:
        self.stream, self.owner = stream, owner

    def run(self, task: Any, frame: Any) -> None:
        if self.stream is None:
            task.run(frame)
            return
        with torch.cuda.stream(self.stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            is_timed = self.owner.spans is not None and task.op is Op.COMPUTE
            if is_timed:
                events[0].record(self.stream)
            task.run(frame)
            if is_timed and self.owner.spans is not None:
                events[1].record(self.stream)
                self.owner.spans.append((task.place[0], *events))

    def record(self, event: Any) -> Any:
        return None if self.stream is None else self.stream.record_event(event)

    def wait(self, event: Any) -> None:
        if self.stream is not None:
            self.stream.wait_event(event)


class PartitionedExecutable(Executable):
    """A program of a pipeline, launched on these streams."""

    def __init__(self, pipe: pc.Pipeline, count: int, streams: Partitioned) -> None:
        latest, options = pipe._cache.latest, pipe._options
        routes = training_routes(latest.routes, len(latest.stages), with_target=True)
        program = lower(pipe.schedule, routes, checkpoint="never", overlap=True)
        cells = loss_cells(latest.stages, latest.codes, routes, latest.outputs, options.loss_fn)
        super().__init__(ProgramBinding(program, cells, pipe.devices, latest.graph, latest.mirrors, latest.norms))
        self.streams = streams
        self.__dict__["inline"] = bind(program, cells, pipe.devices, threaded=False, streams=streams)
        latest.executables["step", count, True] = self

    def run(self, code: Any, frame: Any, workers: Any = None) -> None:
        super().run(code, frame, workers)
        self.streams.join()
