"""The recorder: runs a model once on fake tensors and writes down every call that reaches torch.

      model(*inputs)                      the user's Python runs for real: if, for, len, isinstance ...
          │ torch.nn leaf modules   ──►   call_module      (Module.__call__ is intercepted)
          │ torch.*, F.*, methods   ──►   call_function,   (a TorchFunctionMode sees them)
          │                               call_method
          │ autograd.Function.apply ──►   call_function    (kept opaque, so its backward stays its own)
          ▼
      FakeTensorMode                      shapes, dtypes, strides, aliasing; no memory, no arithmetic

The batch size is a symbol, so the graph serves any number of samples. The model is left exactly as it was found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import DataDependentOutputException, FakeTensorMode, enable_python_dispatcher
from pipecompile.torch_private.modules import has_backward_hooks
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.ambient_regions import Regions
from pipecompile.tracing.emit.effects import (
    accesses_gradient,
    depends_on_grad_mode,
    is_metadata_query,
    undeclared_writes,
)
from pipecompile.tracing.emit.graph_module import assemble_graph
from pipecompile.tracing.emit.node_target import NodeCall, decides_rank, graph_path, node_call
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages, tensors_in
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins
from pipecompile.tracing.fakes.unknown_data import with_unknown_data
from pipecompile.tracing.interception.assertions import asserted_truth, holds
from pipecompile.tracing.interception.call_rewriting import builtin_calls_redirected
from pipecompile.tracing.interception.dispatcher import DispatchRecorder, is_transformed
from pipecompile.tracing.interception.lru_caches import caches_bypassed
from pipecompile.tracing.interception.module_calls import intercepted
from pipecompile.tracing.interception.python_builtins import builtin_substitutes
from pipecompile.tracing.interception.randomness import RandomDrawCounter, rng_function
from pipecompile.tracing.leaf_modules import cheap_forward, is_leaf
from pipecompile.tracing.model_pieces import Piece, add_candidate, piece_calls_intercepted
from pipecompile.tracing.node_facts import NodeFacts, facts, note, set_facts
from pipecompile.tracing.opaque.opaque_calls import OpaqueCalls
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.module_snapshots import ModuleSnapshots
from pipecompile.tracing.state.recording_leftovers import RecordingLeftovers
from pipecompile.tracing.state.second_call import record_state_changes
from pipecompile.tracing.trace_errors import as_trace_error, is_unsupported_by_fakes
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import caller

__all__ = ["Recorder"]


class Recorder(TorchFunctionMode):
    """One recording. Calls are written down only on this thread, and not from inside a call that is kept whole."""

    def __init__(
        self, model: nn.Module, symbol: BatchSymbol, device: torch.device, opaque_calls: OpaqueCalls, *, grad: bool
    ) -> None:
        super().__init__()
        self.model, self.symbol, self.opaque_calls, self.graph = model, symbol, opaque_calls, fx.Graph()
        self.fake = FakeTensorMode(shape_env=symbol.env, allow_non_fake_inputs=True)
        self.dispatcher = DispatchRecorder(self)
        self.twins = Twins(self.fake, device)
        self.values = ValueNodes(self.graph, symbol, self.twins)
        self.regions = Regions(self.graph, Ambient.now(grad=grad))
        self.names = {id(module): name for name, module in model.named_modules()}
        self.reach = reachable(model)
        self.path: list[str] = [""]
        self.draws = RandomDrawCounter()
        self.is_paused = self.asked_grad_mode = False
        self.thread = get_ident()

    # -- one recording, from top to bottom ------------------------------------------------------------------------

    def record(self, inputs: FlatInputs) -> TracedGraph:
        self.values.replace_by_fakes(self.model)
        self.module_snapshots = ModuleSnapshots(self.model)
        self.leftovers = RecordingLeftovers(self.model, self.values.is_fake_of)
        given = zip(inputs.names, inputs.leaves, inputs.dims, strict=True)
        leaves = [self._placeholder(name, leaf, dim) for name, leaf, dim in given]
        self.symbol.open(self.graph, list(self.graph.nodes), inputs.dims)
        args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
        try:
            with ExitStack() as stack:
                contexts: tuple[Any, ...] = (
                    self.fake, self.draws, self.dispatcher, *self.twins.device_contexts, enable_python_dispatcher(), intercepted(self),
                    piece_calls_intercepted(self.model, self.opaque_calls.opaque.reasons, self._opaque_call), builtin_calls_redirected(builtin_substitutes(self), self.reach.functions),
                    caches_bypassed(self.reach.caches), self,
                )  # fmt: skip
                for context in contexts:
                    stack.enter_context(context)
                output = self.model(*args, **kwargs)
                record_state_changes(self, inputs)
            return assemble_graph(self, inputs, output)
        except Exception as error:
            raise as_trace_error(error, self.model) from error

    def _placeholder(self, name: str, leaf: Any, dim: Any) -> Any:
        node = self.graph.placeholder(name)
        twin = self.twin(leaf, dim)
        held = [twin] if isinstance(twin, torch.Tensor) else []
        set_facts(node, NodeFacts(storages=storages(held)), twin)
        if held:
            self.values.bind(twin, node)
        return twin

    def twin(self, leaf: Any, dim: Any) -> Any:
        """What stands for a leaf of the inputs."""
        return self.twins.of_input(leaf, dim, self.symbol.size) if isinstance(leaf, torch.Tensor) else leaf

    def write_effect(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A node that calls a function for what it does."""
        self._write(("call_function", function, args), {}, None, [], self.regions.outside)

    # -- what is written down -------------------------------------------------------------------------------------

    @property
    def is_listening(self) -> bool:
        return not self.is_paused and get_ident() == self.thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.asked_grad_mode |= self.is_listening and depends_on_grad_mode(func, args)
        if not self.is_listening or is_metadata_query(func):
            return func(*args, **kwargs)
        if accesses_gradient(func):
            self.refuse_gradient_read()
        if func is torch.Tensor.__iter__:
            with self:
                return iter(torch.unbind(args[0]))
        if is_transformed(tensors_in((args, kwargs))):
            return self._under_transform(func, args, kwargs)
        if (self.path[-1], func.__name__) in self.opaque_calls.function_names and (
            piece := self._called(func)
        ) in self.opaque_calls.opaque.reasons:
            return self._opaque_call(piece, func, args, kwargs)
        try:
            return self.call(func, args, kwargs, lambda given: node_call(func, given))
        except DataDependentOutputException:
            expected = asserted_truth(func, sys._getframe(1))
            if expected is None:
                raise
            self._write(("call_function", holds, (args[0], expected, caller())), {}, None, [], Ambient.now())
            return expected
        except Exception as error:
            if is_unsupported_by_fakes(error):
                add_candidate(error, self._called(func))
            raise

    def _called(self, func: Any) -> Piece:
        """The call of a function on this line, as a piece of its own."""
        return Piece(self.path[-1], func.__name__, caller())

    def _under_transform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The tensors are wrapped; the floor hears what the call comes down to."""
        self.dispatcher.is_detaching = func.__name__ in ("detach", "detach_")
        try:
            return func(*args, **kwargs)
        finally:
            self.dispatcher.is_detaching = False

    def record_operator(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        return self.call(func, args, kwargs, lambda given: ("call_function", func, given), written)

    def tensor_class(self, tensor: torch.Tensor) -> type:
        return self.twins.tensor_class(tensor)

    def bind_alias(self, value: torch.Tensor, alias: torch.Tensor) -> None:
        self.values.bind(alias, self.values.node(value))

    def call(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        spell: Callable[[Any], NodeCall],
        written: Sequence[torch.Tensor] = (),
        held: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Make the call, and write it down if tensors came out of it or were changed by it, as `written` are. It reads `held`."""
        args, kwargs = self.values.with_fakes((args, kwargs))
        reached = (*tensors_in((args, kwargs)), *held)
        given = [(tensor, version_of(tensor)) for tensor in reached if not tensor.is_inference()]
        ambient, drawn = Ambient.now(), self.draws.count
        before = storages(args[:1]) if func.__name__ == "__set__" else frozenset()  # x.data = y exchanges the memory
        with self.paused(), nullcontext() if decides_rank(func) else self.symbol.lenient():
            result = with_unknown_data(func, args, kwargs)(*args, **kwargs)
        changed = [tensor for tensor, version in given if version_of(tensor) != version]
        changed += [*written, *undeclared_writes(func, args, kwargs)]
        if changed or tensors_in(result):
            node = self._write(spell(args), kwargs, result, changed, ambient)
            note(node, reads=storages(held), draws=self.draws.count > drawn, mutates=facts(node).mutates | before)
        return result

    def _write(self, spelling: NodeCall, kwargs: Any, result: Any, changed: list[Any], ambient: Ambient) -> fx.Node:
        op, function, args = spelling
        arguments, keywords = self.values.argument(tuple(args)), self.values.argument(dict(kwargs))
        self.regions.enter(ambient)
        node = self.graph.create_node(op, function, arguments, keywords, name=self._name(op, function))
        made, written = storages(tensors_in(result)), storages(changed)
        set_facts(node, NodeFacts(self.path[-1], caller(), ambient, made, written), result)
        self.values.bind_result(result, node)
        return node

    def _name(self, op: str, function: Any) -> str:
        word = function if isinstance(function, str) else getattr(function, "__name__", "call")
        prefix = "" if op == "call_module" else self.path[-1]
        return f"{prefix}.{word.strip('_')}".strip(".").replace(".", "_")

    # -- what is kept whole ---------------------------------------------------------------------------------------

    def record_module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """`Module.__call__` while recording: a leaf is one node, any other module is run through."""
        name = self.names.get(id(module), "")
        if (
            name
            and is_leaf(module)
            and not is_transformed(tensors_in((args, kwargs)))
            and self.module_snapshots.is_unchanged(module)
        ):
            return self._leaf(name, original, module, args, kwargs)
        if has_backward_hooks(module):
            what = f"{name} is changed by forward" if name else "the hook is on the whole model"
            raise TraceError(code="PC106", where=caller(), why=what)
        self.path.append(name or self.path[-1])
        try:
            return original(module, *args, **kwargs)
        finally:
            self.path.pop()

    def _opaque_call(self, piece: Piece, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of a piece that cannot be recorded: one node, whose result is imagined."""
        if not self.is_listening:
            return run(*args, **kwargs)
        args, kwargs = self.values.with_fakes((args, kwargs))
        with self.paused(), self.symbol.lenient():
            call = self.opaque_calls.call(piece, run, (args, kwargs), self.twins.of)
        self.values.roots[call.target] = call.module
        node = self._write(call.spelling(args), kwargs, call.result, call.written, Ambient.now())
        note(node, reads=storages(call.held), draws=call.draws_random)
        return call.result

    def _leaf(self, name: str, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        target = graph_path(name)
        self.values.roots[target] = module

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(module, *args, **kwargs)

        written = list(module.buffers()) if module.training else []
        held = [*module.parameters(), *module.buffers()]
        with self.leftovers.leaf_call(module):
            made = self.call(
                cheap_forward(module, call), args, kwargs, lambda given: ("call_module", target, given), written, held
            )
        self.module_snapshots.update(module)
        return made

    def record_single_call(
        self, shape_function: Callable[..., Any], target: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Record a custom autograd function or a scripted one as one node; `shape_function` computes its fake result."""
        return self.call(shape_function, args, kwargs, lambda given: ("call_function", target, given))

    def record_rng_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that sets or gets the state of the random number generator: one node, though no tensor is changed."""
        with self.paused():
            made = rng_function(function)(*args, **kwargs)
        node = self._write(("call_function", rng_function(function), args), kwargs, made, [], Ambient.now())
        note(node, draws=True, seeds=True)
        return torch.default_generator if function.__name__ == "manual_seed" else made

    def call_counts_restored(self) -> AbstractContextManager[None]:
        """Count the calls of opaque pieces inside the block from 0 again, and forget them afterwards."""
        return self.opaque_calls.counts_restored()

    def note_grad_mode_read(self) -> None:
        """Python wants to know whether gradients are recorded."""
        self.asked_grad_mode = True

    def refuse_gradient_read(self) -> None:
        raise TraceError(code="PC113", where=caller())

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
