"""`simulate_launches`: a discrete-event run of the launch plan, the very streams, events and buffers that a run on GPUs uses.

    plan        0F0 on (0, 0) ■   SEND v#0 on (0, 1) after 0F0    1F0 on (1, 1) after SEND v#0
    timeline    a launch starts when the host has launched it, the launch before it on its stream is over, and so are those it waits for

`simulate` predicts the program without knowing streams. Both give the same makespan if no stream, buffer or event holds a
launch up that the program does not (benchmarks/launches.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import HOST, Instruction, Op, Program, Value
from pipecompile.ir.execution_order import merged
from pipecompile.ir.slices import in_slices
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.runtime.stream_events import STORE, Lane, Launch, launches
from pipecompile.simulation.costs import CostOptions, Costs, Engines, Hosts, make_costs
from pipecompile.simulation.host_launches import launch_seconds
from pipecompile.text.input_checks import check_kind
from pipecompile.verifiers import verify

__all__ = ["simulate_launches"]


def simulate_launches(program: Program, **costs: Unpack[CostOptions]) -> Timeline:
    """Return the timeline of a program as it is launched on one GPU per pipeline device. `costs` are those of `simulate`, in seconds.

    Copies of OFFLOAD and RELOAD have a stream per direction and device. The host launches all devices in one order and waits for
    none of them. The program has to be lowered with `overlap=True`. Memory is not simulated. Copies between devices queue for the
    link between their two devices. Actions that overlap run one after the other, as one process runs them.

    Raises InputError for what one process does not do: ties and collectives, which ranks alone have, seconds of actions that overlap,
    and `engines="device"`. Raises VerifyError for a program that is not legal. O(n) for n instructions.
    """
    check_kind(program, Program, "pc.simulate_launches(pipe.program, ...)")
    checked = make_costs(program.n_stages, program.n_devices, program.routes, program.ties, program.n_slices, **costs)
    if what := _not_launched(program, checked):
        raise InputError(
            f"{what[0]} cannot be simulated launch by launch", why=what[1], hint="pc.simulate(program, ...)"
        )
    verify(program)
    return _LaunchRun(program, checked).run()


def _not_launched(program: Program, costs: Costs) -> tuple[str, str] | None:
    """Return a part of the program that one process cannot run under these costs, and the alternative; None if it can run all."""
    if program.ties:
        return "ties", "one process keeps tied parameters equal by itself"
    if costs.engines is not Engines.PAIR:
        return "engines='device'", "one process launches copies on a stream per pair of devices"
    if costs.sharding is not None and any((*costs.sharding.unshard, *costs.sharding.reduce)):
        return "collectives of sharded parameters", "one process has one copy of the pipeline"
    if costs.overlap is not None or costs.communication:
        return "costs of actions that overlap", "one process launches the two actions one after the other"
    return None


class _LaunchRun:
    """The state of a simulation: `free` is the time at which the last launch of each stream is over."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.sizes = {route.value: route.nbytes for route in program.routes}
        self.free: dict[Hashable, float] = {}
        self.host: dict[int, float] = {}
        self.ends: dict[tuple[int, int], float] = {}

    def run(self) -> Timeline:
        planned = launches(self.program, lambda source, target: source != target)
        spans = [
            span
            for d, i in merged(self.program)
            if (span := self.launch((d, i), self.program.rows[d][i], planned[d][i])) is not None
        ]
        return Timeline(self.program.n_devices, tuple(spans))

    def launch(self, place: tuple[int, int], instruction: Instruction, launch: Launch) -> Span | None:
        """Run one launch; return its span if it takes time."""
        if launch.lane is None:
            return None
        begun, launched = self.issued(place[0], instruction)
        stream = self.stream(launch.lane)
        start = max([begun, self.free.get(stream, 0.0), *(self.ends[before] for before in launch.waits)])
        seconds = self.seconds(instruction, launch.lane)
        end = self.free[stream] = self.ends[place] = max(start + seconds, launched)
        source, target = launch.lane
        if STORE in launch.lane:
            ends = (source, "to host") if target == STORE else (target, "from host")
            return Span(*ends, str(instruction.writes[0].value), start, end) if seconds else None
        if instruction.op is Op.COMPUTE:
            return Span(source, COMPUTE, str(instruction.action), start, end)
        if source == HOST:
            return Span(target, "from host", str(instruction.writes[0].value), start, end) if seconds else None
        return Span(source, f"to {target}", str(instruction.reads[0].value), start, end) if seconds else None

    def issued(self, device: int, instruction: Instruction) -> tuple[float, float]:
        """Return when the host begins and ends the launch of an instruction."""
        if self.costs.hosts is Hosts.STEP:
            return 0.0, max(self.costs.launch) if instruction.op is Op.COMPUTE else 0.0
        thread = 0 if self.costs.hosts is Hosts.ONE else device
        begun = self.host.get(thread, 0.0)
        self.host[thread] = begun + launch_seconds(instruction.action, self.costs)
        return begun, self.host[thread]

    def stream(self, lane: Lane) -> Hashable:
        """Return what runs the launches of a lane one after the other: the lane, or the stream on which several devices compute."""
        source, target = lane
        return self.costs.streams[source] if source == target and self.costs.streams else lane

    def seconds(self, instruction: Instruction, lane: Lane) -> float:
        """Return the seconds of an instruction; outputs take none on their way to the host."""
        if instruction.action is not None:
            action = in_slices(instruction.action, self.program.n_slices)
            if STORE in lane:
                return self.costs.offload_seconds(action.stage) * self.costs.byte_share(action)
            return self.costs.action_seconds(action)
        if instruction.op is Op.RECV and lane[0] == HOST:
            value = instruction.writes[0].value
            return self.costs.input_seconds(self.sizes[value.name] * self.share(value))
        if instruction.op is not Op.SEND or lane[0] == lane[1] or HOST in lane:
            return 0.0
        value = instruction.reads[0].value
        return self.costs.message(value.name, self.sizes[value.name], *lane, self.share(value))

    def share(self, value: Value) -> float:
        """Return the share of a value in that of its micro-batch: 1, or that of its slice."""
        slices = self.costs.slices
        return 1.0 if slices is None else slices.of_bytes(value.microbatch % self.program.n_slices)
