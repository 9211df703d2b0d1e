"""From a model and its inputs to a graph: one run on fake tensors, in which each call that reaches torch is recorded as a node.

      model(*inputs)                      the user's Python runs for real: if, for, len, isinstance ...
          │ torch.nn leaf modules   ──►   call_module      (Module.__call__ is intercepted)
          │ torch.*, F.*, methods   ──►   call_function,   (a TorchFunctionMode receives the calls)
          │                               call_method
          │ autograd.Function.apply ──►   call_function    (one opaque node, so the function's own backward stays)
          ▼
      FakeTensorMode                      shapes, dtypes, strides, aliasing; no memory, no arithmetic

The batch size is a symbol, so the graph is right for any number of samples. Several recordings are tried until one is right for the
batch size and the grad mode. The model is restored after each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.batch_dims import BatchDims, check_batch_dims, parameters_of
from pipecompile.batching.call_inputs import FlatInputs, flatten
from pipecompile.batching.model_checks import validate_model
from pipecompile.errors import TraceError
from pipecompile.text.progress import task
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import enable_python_dispatcher
from pipecompile.torch_private.modules import parametrizations_uncached
from pipecompile.tracing.call_recorder import CallRecorder
from pipecompile.tracing.emit.call_description import check_keywords, code_name
from pipecompile.tracing.emit.graph_module import assemble_graph
from pipecompile.tracing.emit.value_nodes import storages
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import recording_device
from pipecompile.tracing.forked_pool import renew_pool
from pipecompile.tracing.guards.attribute_reads import AttributeReads, can_be_watched
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, LiftedState
from pipecompile.tracing.guards.state_guards import RecordedReads
from pipecompile.tracing.interception.module_calls import intercepted
from pipecompile.tracing.interception.python_builtins import builtin_substitutes
from pipecompile.tracing.interception.randomness import KnownGenerators, advanced_states, python_draws, refuse_draws
from pipecompile.tracing.interception.user_functions import builtin_calls_redirected, caches_bypassed, caches_purged
from pipecompile.tracing.model_pieces import piece_calls_intercepted
from pipecompile.tracing.node_facts import NodeFacts, set_facts
from pipecompile.tracing.opaque.attempts import OpaquePieces, OpaqueReason
from pipecompile.tracing.opaque.opaque_calls import OpaqueCalls
from pipecompile.tracing.opaque.retries import record_with_retries
from pipecompile.tracing.reachable_code import searches_kept
from pipecompile.tracing.state.carried_state import CarriedState, Carrying
from pipecompile.tracing.state.filled_arguments import arguments_watched
from pipecompile.tracing.state.function_state import globals_restored, warn_of_outer_changes
from pipecompile.tracing.state.recording_leftovers import ModuleSnapshots, RecordingLeftovers
from pipecompile.tracing.state.second_call import CarriedStateError, record_state_changes
from pipecompile.tracing.state.snapshot import held_values, model_restored, places_of
from pipecompile.tracing.state.tensor_attributes import attribute_changes, warn_of_inputs
from pipecompile.tracing.trace_errors import as_trace_error, cause_of, needs_values
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Recorder", "another_size", "record", "trace"]

_lock = RLock()
"""Held while a model is recorded. A recording may lead to another in the same thread."""


def trace(model: nn.Module, /, *args: Any, batch_dims: BatchDims | None = None, **kwargs: Any) -> TracedGraph:
    """Record one forward of `model` as a graph that takes and returns what the model does, at any batch size.

    Dimension 0 of every input tensor is the batch, unless `batch_dims` says otherwise: `{"src": 1, "mask": None}` maps
    parameters of forward to their batch dimension, or to None for a tensor that all samples share. (A model whose own forward
    has a parameter `batch_dims` gets the argument.) Parameters and submodules of the result *are* the model's own. The model does
    not change. The recording is for the model's present mode, train or eval.
    The result is a torch.fx.GraphModule; `str` prints one line per node, and `facts` has what was recorded beyond torch.fx.
    Nothing is computed, unless a submodule or a method cannot be recorded, mostly because Python decides on the *value* of a tensor: the
    piece becomes one opaque node, and the model runs a few times to learn its results. Raise InputError for inputs whose batch sizes
    disagree, and TraceError with the user's line if the model cannot be recorded.
    """
    model = validate_model(model)
    if batch_dims is not None and "batch_dims" in parameters_of(model.forward):
        kwargs, batch_dims = {**kwargs, "batch_dims": batch_dims}, None
    check_batch_dims({} if batch_dims is None else batch_dims, model.forward)
    graph = record(model, flatten(model.forward, args, kwargs, batch_dims), carries=Carrying.TENSORS)
    if graph.facts.carried:
        graph.facts.carried.check_microbatches()
    return graph


def record(
    model: nn.Module,
    inputs: FlatInputs,
    device: torch.device | None = None,
    lifted: LiftedState = NOTHING_LIFTED,
    kept: Sequence[OpaqueReason] = (),
    *,
    carries: Carrying = Carrying.NOTHING,
) -> TracedGraph:
    """Record a model on flat inputs, as `trace` does.

    A batch of 1 sample is recorded with a size that no other dimension has, so that no tensor is broadcast that would not be in a
    larger batch. If the model branches on the single sample, the recording is for 1 sample alone. `device` is that of the fake tensors,
    by default the model's. One thread of the process records at a time, since a recording patches classes. The graph reads the numbers
    of `lifted` at every run. The recording begins with the pieces `kept`, which an earlier one kept whole. `carries` says which state
    the caller keeps from call to call.
    """
    with _lock, searches_kept():
        renew_pool()
        attempt = _Attempt(model, inputs, device or recording_device(model, inputs.leaves), lifted, kept, carries)
        with task(attempt.line):
            return _recorded(attempt)


def _recorded(attempt: _Attempt) -> TracedGraph:
    """Return the recording that is right for most batch sizes."""
    inputs = attempt.inputs
    if inputs.lists:
        return attempt.with_retries(inputs.samples or 1, fixed=True)
    if inputs.samples != 1:
        return attempt.with_retries(inputs.samples or 2)
    try:
        graph = attempt.with_retries(_unseen_size(inputs.leaves))
    except TraceError:
        if sum(isinstance(dim, int) for dim in inputs.dims) > 1:
            raise
        return attempt.with_retries(1, fixed=True)
    return graph if all(guard.holds(1) for guard in graph.facts.guards) else attempt.with_retries(1, fixed=True)


def another_size(
    model: nn.Module, graph: TracedGraph, inputs: FlatInputs, device: torch.device | None = None
) -> TracedGraph | None:
    """Return a recording at another batch size for a graph that is right at a single size; None if there is none.

    Two sizes are needed to find the batch dimensions of the outputs.
    """
    if graph.facts.batch_size is None or inputs.samples is None:
        return None
    for size in (2 * inputs.samples, inputs.samples + 1):
        with suppress(TraceError), torch.inference_mode(False):
            other = record(model, inputs.resized(size), device, kept=graph.facts.kept)
            if other.facts.batch_size == size:
                return other
    return None


def _unseen_size(leaves: Sequence[Any]) -> int:
    """Return the least size from 2 that no dimension of the inputs has."""
    seen = {length for leaf in leaves if isinstance(leaf, torch.Tensor) for length in leaf.shape}
    return next(size for size in itertools.count(2) if size not in seen)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The model, the inputs and the settings that all recordings of one call share."""

    model: nn.Module
    inputs: FlatInputs
    device: torch.device
    lifted: LiftedState
    kept: Sequence[OpaqueReason]
    carries: Carrying = Carrying.NOTHING
    graphs: list[fx.Graph] = field(default_factory=list)

    def line(self) -> str:
        """Return the progress of the recording as a text."""
        operations = f": {len(self.graphs[-1].nodes)} operations" if self.graphs else ""
        again = f", attempt {len(self.graphs)}" if len(self.graphs) > 1 else ""
        return f"recording {type(self.model).__name__}{operations}{again}"

    def with_retries(self, size: int, *, fixed: bool = False) -> TracedGraph:
        """Return the recording for a batch of `size` samples, with as few opaque pieces as possible beside those of `kept`."""
        attempt = partial(self.record, size, fixed=fixed)
        return record_with_retries(self.model, self.inputs, attempt, self.kept, carries=self.carries)

    def record(self, size: int, opaque: OpaquePieces, *, fixed: bool = False) -> TracedGraph:
        """Return the recording for a batch of `size` samples, in which the pieces of `opaque` are opaque nodes.

        Gradients are on. They are off only if they are off around the call, and the model depends on the grad mode or cannot be
        recorded with gradients (some kernels have no backward). `fixed` makes the recording right for this batch size alone.
        """
        fixed = fixed or opaque.is_batch_fixed
        around = torch.is_grad_enabled()
        try:
            graph = self._with_grad(True, size, opaque, fixed)
        except TraceError as error:
            if around or error.code != "PC199" or needs_values(error.__cause__ or error):
                raise
            graph = self._with_grad(False, size, opaque, fixed)
            graph.facts = replace(graph.facts, grad_mode=False)
        if graph.facts.grad_mode in (None, around):
            return graph
        return self._with_grad(False, size, opaque, fixed)

    def _with_grad(self, grad: bool, size: int, opaque: OpaquePieces, fixed: bool) -> TracedGraph:
        """Return the recording with gradients on or off; its `grad_mode` is None if the graph is right for both."""
        symbol = BatchSymbol(self.inputs.samples or size, fixed=True) if fixed else BatchSymbol(size)
        symbol.env.refuses_data_sizes = opaque.refuses_data_sizes
        recorder = Recorder(self.model, symbol, self.device, OpaqueCalls(opaque, symbol), grad=grad)
        self.graphs.append(recorder.graph)
        recorder.has_lifted = bool(self.lifted.holders)
        installed = self.lifted.install() if recorder.has_lifted else nullcontext()
        with (
            caches_purged(), parametrizations_uncached(), model_restored(self.model) as states,
            globals_restored(self.model, tensors=False) as changed, torch.set_grad_enabled(grad), installed,
        ):  # fmt: skip
            begun, graph = advanced_states(states), recorder.record(self.inputs)
            if python_draws(begun):
                begun.restore()
                again = Recorder(self.model, symbol, self.device, OpaqueCalls(opaque, symbol), grad=grad)
                refuse_draws(again, self.inputs, begun)
        warn_of_outer_changes(self.model, changed)
        reads = replace(graph.facts.reads, lifted=self.lifted) if graph.facts.reads else None
        graph.facts = replace(graph.facts, grad_mode=grad if recorder.asked_grad_mode else None, reads=reads)
        return graph


class Recorder(CallRecorder):
    """One recording of a model: `record` runs the model and returns its graph."""

    def record(self, inputs: FlatInputs) -> TracedGraph:
        """Run the model on fake inputs and return the graph of the run. Raise TraceError."""
        check_keywords(inputs.kwargs, "PC109")
        self.values.replace_by_fakes(self.model)
        warn_of_inputs(inputs, self.model)
        self.generators = KnownGenerators((*held_values(places_of(self.model)), *self.reach.objects, *inputs.leaves))
        self.module_snapshots = ModuleSnapshots(self.model)
        self.leftovers = RecordingLeftovers(self.model, self.values.is_fake_of)
        given = tuple(one for one in zip(inputs.names, inputs.leaves, strict=True) if can_be_watched(type(one[1])))
        self.reads = AttributeReads((*self.reach.objects, *(leaf for _, leaf in given)))
        self.reads.executed = self.executed.scopes
        leaves = [self._placeholder(*one) for one in zip(inputs.names, inputs.leaves, inputs.dims, strict=True)]
        self.symbol.open(self.graph, list(self.graph.nodes), inputs.dims)
        args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
        try:
            with ExitStack() as stack:
                for context in (*arguments_watched(self.model, args, kwargs, leaves), *self._contexts()):
                    stack.enter_context(context)
                output = self._record_leftovers(inputs, self.model(*args, **kwargs))
            graph = assemble_graph(self, inputs, output)
            self.twins.release()
            reads = RecordedReads(self.model, self.reads, self.leftovers.written, others=given, asked=self.asked)
            graph.facts = replace(graph.facts, reads=reads, noticed_at=self.noticed_at, tables=self.leftovers.tables)
            return graph
        except Exception as error:
            fault = self.leftovers.of_hooks.reason_of(as_trace_error(error, self.model))
            raise fault from cause_of(fault, error)

    def _record_leftovers(self, inputs: FlatInputs, output: Any) -> Any:
        """Record what the call has left on the model, and return its `output`. Raise TraceError for what no node can leave there."""
        self.values.call_objects.check()
        self.values.closed_over.check()
        if written := attribute_changes(self.model, self.twins, self.reach.functions):
            raise CarriedStateError(written, self.model)
        self.leftovers.warn_of_replaced()
        changes = self.leftovers.changes()
        if self.values.call_objects.are_in([change.value for change in changes]):
            raise CarriedStateError(changes, self.model)
        return record_state_changes(self, inputs, output, changes)

    @property
    def carried(self) -> CarriedState:
        """The state that earlier recordings have shown the calls to carry on."""
        return self.opaque_calls.opaque.carried

    def _contexts(self) -> tuple[Any, ...]:
        """Return the modes and patches of a recording, the outermost first."""
        kept = self.opaque_calls.opaque.reasons
        pieces = piece_calls_intercepted(self.model, kept, self._opaque_call) if kept else nullcontext()
        builtins = builtin_calls_redirected(builtin_substitutes(self), self.reach.functions)
        return (
            self.reads, self.fake, self.draws, self.dispatcher, *self.twins.device_contexts, enable_python_dispatcher(),
            intercepted(self), pieces, builtins, caches_bypassed(self.reach.caches, self.paused), self,
            self.executed, self.located,
        )  # fmt: skip

    def _placeholder(self, name: str, leaf: Any, dim: Any) -> Any:
        node = self.graph.create_node("placeholder", code_name(name))
        twin = self.twin(leaf, dim)
        held = [twin] if isinstance(twin, torch.Tensor) else []
        set_facts(node, NodeFacts(storages=storages(held)), twin)
        if held:
            self.values.bind(twin, node)
        return twin

    def twin(self, leaf: Any, dim: Any) -> Any:
        """Return the fake tensor of an input leaf with batch dimension `dim`; return a leaf that is not a tensor unchanged."""
        return self.twins.of_input(leaf, dim, self.symbol.size) if isinstance(leaf, torch.Tensor) else leaf

    def write_effect(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Record a node that calls `function`, which returns nothing."""
        self.writer.write(("call_function", function, args), {}, None, self.regions.outside)

    def call_counts_restored(self) -> AbstractContextManager[None]:
        """Count the calls of opaque pieces inside the block from 0 again, and forget them afterwards."""
        return self.opaque_calls.counts_restored()
