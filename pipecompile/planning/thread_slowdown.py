"""The time of a micro-batch in a step whose devices are threads, as a multiple of its time alone, as profiled.

    profile     F B                      all of torch's intra-op threads; caches, memory and the interpreter's lock for itself
    step        thread 0   F B F B F B   a share of the intra-op threads
                thread 1     F B F B     caches, memory and the lock are also thread 0's

The graph runs forward and backward, as the code of a stage does, in turns alone and beside threads that do the same. One factor holds
for all nodes: a node's own would be noise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch
from torch.fx import GraphModule

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import NodeCost
from pipecompile.costs.node_run import map_tensors, tensors_in
from pipecompile.errors import described
from pipecompile.graph.colocation import compute_nodes
from pipecompile.options import Options
from pipecompile.runtime.dispatch import choose_dispatch
from pipecompile.runtime.worker_threads import ThreadState
from pipecompile.torch_private.modules import backward_hooks_removed
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.drawn_generators import drawn_generators
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.state.preserved_run import preserved, state_tensors, untouched
from pipecompile.tracing.state.random_states import generators_among, random_sources, random_states_restored

__all__ = ["slowed", "thread_slowdown"]

_log = logging.getLogger("pipecompile.partition")

TURNS = 5
"""Turns of the measurement, at most."""

MOST_BYTES = 2 << 30
"""Bytes of the gradients that threads beside the measured one have at a time: fewer run where they would take more."""


def slowed(costs: Mapping[str, NodeCost], factor: float) -> dict[str, NodeCost]:
    """Return the costs with all times multiplied by `factor`."""
    return {
        name: replace(
            cost,
            forward=factor * cost.forward,
            backward=factor * cost.backward,
            weight=None if cost.weight is None else factor * cost.weight,
            dividing=factor * cost.dividing,
        )
        for name, cost in costs.items()
    }


def thread_slowdown(
    graph: GraphModule,
    batch: MiniBatch,
    inputs: Sequence[Any],
    costs: Mapping[str, NodeCost],
    options: Options,
    *,
    budget: float,
) -> float:
    """Return the factor for `costs`, which are profiled; 1 where the step runs in one thread. The graph is left as it was.

    After `budget` seconds no turn of the measurement begins.

    Beside others a thread computes in the share of the step that is no bubble, M / (M + P - 1). Pieces kept whole are
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
            turns = _turns(lambda: _pass(graph, inputs), _others_of(graph, len(devices)), devices, budget)
        except Exception as error:  # the model as a whole may need more memory than its operations one by one
            _log.info("costs are those of one thread, as the model does not run as a whole here: %s", described(error))
            return 1.0
    shared, beside = (median(column) for column in zip(*turns, strict=True))
    busy = n_microbatches / (n_microbatches + len(devices) - 1)
    return float(shared * (1 + (beside - 1) * busy))


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


def _others_of(graph: GraphModule, n_devices: int) -> int:
    """Return how many threads run the graph beside the one that is measured."""
    if _has_opaque_pieces(graph):
        return 0
    gradients = sum(parameter.nbytes for parameter in graph.parameters() if parameter.requires_grad)
    return min(n_devices - 1, MOST_BYTES // max(gradients, 1))


def _turns(
    run: Callable[[], None], n_others: int, devices: tuple[torch.device, ...], budget: float
) -> list[tuple[float, float]]:
    """Return, per turn, the time with the share of intra-op threads over that with all, and that beside others over that without them."""
    state, end = ThreadState.of_caller(len(devices), devices), perf_counter() + budget
    turns: list[tuple[float, float]] = []
    run()
    while not turns or (len(turns) < TURNS and perf_counter() < end):
        alone = _seconds(run)
        is_same = state.threads == torch.get_num_threads()
        with _intra_op_threads(state.threads):
            shared = alone if is_same else _seconds(run)
            with _others(run, n_others, state):
                turns.append((shared / alone, _seconds(run) / shared if n_others else 1.0))
    return turns


def _pass(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Run the graph, and its backward in grad mode. No gradient is kept."""
    copies = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), tuple(inputs))
    ends = [tensor for tensor in tensors_in(graph(*copies)) if tensor.requires_grad]
    trained = [parameter for parameter in graph.parameters() if parameter.requires_grad]
    if ends and trained:
        torch.autograd.grad(ends, trained, [torch.ones_like(end) for end in ends], allow_unused=True)


def _seconds(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _others(run: Callable[[], None], count: int, state: ThreadState) -> Iterator[None]:
    """Run the function in `count` more threads, over and over, until the block ends. An error of one ends that thread alone."""
    is_over = Event()

    def repeat() -> None:
        with ExitStack() as stack:
            state.enter(stack)
            while not is_over.is_set():
                run()

    threads = [Thread(target=repeat, name=f"pipecompile-beside-{index}", daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
