"""The recorder: runs a model once on fake tensors and records each call that reaches torch as a node.

      model(*inputs)                      the user's Python runs for real: if, for, len, isinstance ...
          │ torch.nn leaf modules   ──►   call_module      (Module.__call__ is intercepted)
          │ torch.*, F.*, methods   ──►   call_function,   (a TorchFunctionMode receives the calls)
          │                               call_method
          │ autograd.Function.apply ──►   call_function    (one opaque node, so the function's own backward stays)
          ▼
      FakeTensorMode                      shapes, dtypes, strides, aliasing; no memory, no arithmetic

The batch size is a symbol, so the graph is right for any number of samples. The model is restored after the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import enable_python_dispatcher
from pipecompile.tracing.call_recorder import CallRecorder
from pipecompile.tracing.emit.graph_module import assemble_graph
from pipecompile.tracing.emit.value_nodes import storages
from pipecompile.tracing.guards.attribute_reads import AttributeReads
from pipecompile.tracing.guards.state_guards import RecordedReads
from pipecompile.tracing.interception.call_rewriting import builtin_calls_redirected
from pipecompile.tracing.interception.lru_caches import caches_bypassed
from pipecompile.tracing.interception.module_calls import intercepted
from pipecompile.tracing.interception.python_builtins import builtin_substitutes
from pipecompile.tracing.model_pieces import piece_calls_intercepted
from pipecompile.tracing.node_facts import NodeFacts, set_facts
from pipecompile.tracing.state.recording_leftovers import ModuleSnapshots, RecordingLeftovers
from pipecompile.tracing.state.second_call import record_state_changes
from pipecompile.tracing.trace_errors import as_trace_error
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Recorder"]


class Recorder(CallRecorder):
    """One recording of a model: `record` runs the model and returns its graph."""

    def record(self, inputs: FlatInputs) -> TracedGraph:
        """Run the model on fake inputs and return the graph of the run. Raise TraceError."""
        self.values.replace_by_fakes(self.model)
        self.module_snapshots = ModuleSnapshots(self.model)
        self.leftovers = RecordingLeftovers(self.model, self.values.is_fake_of)
        self.reads = AttributeReads(self.reach.objects)
        leaves = [self._placeholder(*one) for one in zip(inputs.names, inputs.leaves, inputs.dims, strict=True)]
        self.symbol.open(self.graph, list(self.graph.nodes), inputs.dims)
        args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
        try:
            with ExitStack() as stack:
                for context in self._contexts():
                    stack.enter_context(context)
                output = self.model(*args, **kwargs)
                record_state_changes(self, inputs)
            graph = assemble_graph(self, inputs, output)
            graph.facts = replace(graph.facts, reads=RecordedReads(self.model, self.reads, self.leftovers.written))
            return graph
        except Exception as error:
            raise as_trace_error(error, self.model) from error

    def _contexts(self) -> tuple[Any, ...]:
        """Return the modes and patches of a recording, the outermost first."""
        pieces = piece_calls_intercepted(self.model, self.opaque_calls.opaque.reasons, self._opaque_call)
        builtins = builtin_calls_redirected(builtin_substitutes(self), self.reach.functions)
        return (
            self.reads, self.fake, self.draws, self.dispatcher, *self.twins.device_contexts, enable_python_dispatcher(),
            intercepted(self), pieces, builtins, caches_bypassed(self.reach.caches), self,
        )  # fmt: skip

    def _placeholder(self, name: str, leaf: Any, dim: Any) -> Any:
        node = self.graph.placeholder(name)
        twin = self.twin(leaf, dim)
        held = [twin] if isinstance(twin, torch.Tensor) else []
        set_facts(node, NodeFacts(storages=storages(held)), twin)
        if held:
            self.values.bind(twin, node)
        return twin

    def twin(self, leaf: Any, dim: Any) -> Any:
        """Return the fake tensor of an input leaf with batch dimension `dim`; return a leaf that is no tensor unchanged."""
        return self.twins.of_input(leaf, dim, self.symbol.size) if isinstance(leaf, torch.Tensor) else leaf

    def write_effect(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Record a node that calls `function`, which returns nothing."""
        self.writer.write(("call_function", function, args), {}, None, self.regions.outside)

    def call_counts_restored(self) -> AbstractContextManager[None]:
        """Count the calls of opaque pieces inside the block from 0 again, and forget them afterwards."""
        return self.opaque_calls.counts_restored()
