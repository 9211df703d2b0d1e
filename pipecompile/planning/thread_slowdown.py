"""The time of a micro-batch in a step whose devices are threads, as a multiple of its time alone, as profiled.

    profile     F B                      all of torch's intra-op threads; caches, memory and the interpreter's lock for itself
    step        thread 0   F B F B F B   a share of the intra-op threads
                thread 1     F B F B     caches, memory and the lock are also thread 0's

The graph is divided into one piece per device, of about equal time. The pieces run forward and backward, as stages do: in turns one after
the other in this thread, and all at a time in threads of their own. One factor holds for all nodes: a node's own would be noise. It covers
what the profile of single operations leaves out, too, such as the time to free memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import median
from threading import Event
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import NodeCost
from pipecompile.costs.node_run import map_tensors, tensors_in
from pipecompile.errors import described
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.stages import routes, split
from pipecompile.options import Options
from pipecompile.runtime.dispatch import choose_dispatch
from pipecompile.runtime.worker_threads import ThreadState
from pipecompile.torch_private.modules import backward_hooks_removed
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.drawn_generators import drawn_generators
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.state.preserved_run import preserved, state_tensors, untouched
from pipecompile.tracing.state.random_states import generators_among, random_sources, random_states_restored
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["slowed", "thread_slowdown"]

_log = logging.getLogger("pipecompile.partition")

TURNS = 5
"""Turns of the measurement, at most."""

PASSES = 3
"""Passes of every piece in a turn, beside passes of all others."""


def slowed(costs: Mapping[str, NodeCost], factor: float) -> dict[str, NodeCost]:
    """Return the costs with all times multiplied by `factor`."""
    return {
        name: replace(
            cost,
            forward=factor * cost.forward,
            backward=factor * cost.backward,
            weight=None if cost.weight is None else factor * cost.weight,
            dividing=factor * cost.dividing,
            adding=factor * cost.adding,
        )
        for name, cost in costs.items()
    }


def thread_slowdown(
    graph: TracedGraph,
    batch: MiniBatch,
    inputs: Sequence[Any],
    costs: Mapping[str, NodeCost],
    options: Options,
    *,
    budget: float,
) -> float:
    """Return the factor for `costs`, which are profiled; 1 where the step runs in one thread. The graph is left as it was.

    After `budget` seconds no turn of the measurement begins.

    Beside others a thread computes in the share of the step that is not a bubble, M / (M + P - 1). Pieces kept whole are
    not run in several threads here: then the factor is that of fewer intra-op threads alone.
    """
    devices, n_microbatches = options.devices, len(batch.sizes)
    if not _is_threaded(graph, costs, options):
        return 1.0
    sources = random_sources(drawn_generators(graph, graph.graph.nodes) + generators_among(inputs))
    with (
        untouched(graph),
        preserved(state_tensors(graph)),
        random_states_restored(sources),
        backward_hooks_removed(graph),
    ):
        try:
            turns = _turns(
                _pieces(graph, batch, inputs, costs, len(devices)), not _has_opaque_pieces(graph), devices, budget
            )
        except Exception as error:  # the model as a whole may need more memory than its operations one by one
            _log.info("costs are those of one thread, as the model does not run as a whole here: %s", described(error))
            return 1.0
    alone, beside = (median(column) for column in zip(*turns, strict=True))
    busy = n_microbatches / (n_microbatches + len(devices) - 1)
    return float(alone + (beside - alone) * busy) / (_seconds_of(costs.values()) or 1.0)


def _is_threaded(graph: GraphModule, costs: Mapping[str, NodeCost], options: Options) -> bool:
    """Return whether steps will run in threads on CPUs. `dispatch="auto"` takes none where the order of draws or user code shows."""
    devices = options.devices
    if len(devices) < 2 or any(device.type != "cpu" for device in devices):
        return False
    if options.dispatch != "auto":
        return options.dispatch == "threads"
    if _has_opaque_pieces(graph) or any(facts(node).draws for node in compute_nodes(graph)):
        return False
    cell = sum(cost.forward for cost in costs.values()) / options.n_stages
    return choose_dispatch(cell, devices) == "threads"


def _has_opaque_pieces(graph: GraphModule) -> bool:
    return any(isinstance(module, OpaqueModule) for module in graph.modules())


Pass = Callable[[], None]
"""Runs a piece of the graph forward and, in grad mode, backward. No gradient is kept."""


def _pieces(
    graph: TracedGraph, batch: MiniBatch, inputs: Sequence[Any], costs: Mapping[str, NodeCost], count: int
) -> list[Pass]:
    """Run the graph once, piece by piece. Return the pass of each piece, on the values that it received."""
    piece_of = _piece_of(graph, costs, count)
    stages = split(graph, routes(graph, piece_of), piece_of, [torch.device("cpu")] * count)
    names = (node.name for node in graph.graph.nodes if node.op == "placeholder")
    values, passes = dict(zip(names, inputs, strict=True)), list[Pass]()
    for stage in stages:
        received = [values[name] for name in stage.inputs] + [batch.sizes[0]] * stage.sized
        results = map_tensors(_copied, stage.module(*map_tensors(_copied, received)))
        values |= zip(stage.outputs, results, strict=True)
        passes.append(partial(_pass, stage.module, received))
    return passes


def _seconds_of(costs: Iterable[NodeCost]) -> float:
    """Return the seconds of a pass, which adds no gradients of parameters."""
    return sum(cost.forward + cost.backward - cost.adding for cost in costs)


def _piece_of(graph: TracedGraph, costs: Mapping[str, NodeCost], count: int) -> dict[str, int]:
    """Return the piece of each node: consecutive nodes, of about equal time."""
    nodes = compute_nodes(graph)
    ends = list(accumulate(_seconds_of([costs[node.name]]) for node in nodes))
    share = (ends[-1] if ends else 0.0) / count or 1.0
    return {node.name: min(int(end / share), count - 1) for node, end in zip(nodes, ends, strict=True)}


def _pass(module: nn.Module, received: Sequence[Any]) -> None:
    copies = map_tensors(_copied, received)
    ends = [tensor for tensor in tensors_in(module(*copies)) if tensor.requires_grad]
    sources = [tensor for tensor in (*tensors_in(copies), *module.parameters()) if tensor.requires_grad]
    if ends and sources:
        torch.autograd.grad(ends, sources, [torch.ones_like(end) for end in ends], allow_unused=True)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _turns(
    passes: Sequence[Pass], is_beside: bool, devices: tuple[torch.device, ...], budget: float
) -> list[tuple[float, float]]:
    """Return, per turn, the seconds of all passes one after the other with a thread's share of the intra-op threads, and in threads."""
    state, end = ThreadState.of_caller(len(devices), devices), perf_counter() + budget
    turns: list[tuple[float, float]] = []
    with ThreadPoolExecutor(len(passes), "pipecompile-beside") as threads, _intra_op_threads(state.threads):
        for warm_up in passes:
            warm_up()
        while not turns or (len(turns) < TURNS and perf_counter() < end):
            alone = sum(map(_seconds, passes))
            turns.append((alone, _seconds_beside(passes, state, threads) if is_beside else alone))
    return turns


def _seconds(run: Pass) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _seconds_beside(passes: Sequence[Pass], state: ThreadState, threads: Executor) -> float:
    """Return the sum of the times of all passes while each runs over and over in a thread of its own. The first runs of a turn do not count."""
    times: list[list[float]] = [[] for _ in passes]
    is_over = Event()

    def repeat(index: int) -> None:
        with ExitStack() as stack:
            stack.callback(is_over.set)  # also after an error: no thread waits for the passes of this one
            state.enter(stack)
            while not is_over.is_set() and min(map(len, times)) <= PASSES:
                times[index].append(_seconds(passes[index]))

    list(threads.map(repeat, range(len(passes))))
    return sum(median(row[1 : PASSES + 1]) for row in times)


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
