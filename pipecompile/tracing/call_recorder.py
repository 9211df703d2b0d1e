"""Calls of torch, of modules and of opaque pieces, each recorded as a node while a model runs on fake tensors.

A call is made on the fake tensors first. It becomes a node if tensors come out of it or change: the versions of all tensors that
the call reaches are compared before and after, and `effects` names the writes that versions do not show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import DataDependentOutputException, KnownValuesMode, set_grad_enabled
from pipecompile.torch_private.modules import backward_hooks_of
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.ambient_modes import LAYOUTS, Ambient
from pipecompile.tracing.emit.call_description import (
    NodeCall,
    accesses_gradient,
    decides_rank,
    depends_on_grad_mode,
    graph_path,
    is_metadata_query,
    node_call,
    reads_layout,
    state_name,
    undeclared_writes,
)
from pipecompile.tracing.emit.node_writer import NodeWriter, Regions
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages, tensors_in
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins, with_unknown_data
from pipecompile.tracing.fakes.lifted_calls import check_shapes
from pipecompile.tracing.fakes.lifted_numbers import examples
from pipecompile.tracing.guards.attribute_reads import AttributeReads
from pipecompile.tracing.guards.executed_code import ExecutedCode
from pipecompile.tracing.interception.assertions import asserted_truth, holds
from pipecompile.tracing.interception.dispatcher import DispatchRecorder, is_transformed
from pipecompile.tracing.interception.randomness import KnownGenerators, RandomDrawCounter, rng_function
from pipecompile.tracing.leaf_modules import cheap_forward, is_leaf
from pipecompile.tracing.model_pieces import Piece, add_candidate
from pipecompile.tracing.opaque.opaque_calls import OpaqueCalls
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.layer_writes import LayerWrites
from pipecompile.tracing.state.recording_leftovers import ModuleSnapshots, RecordingLeftovers
from pipecompile.tracing.trace_errors import GradientStateError, is_unsupported_by_fakes
from pipecompile.tracing.user_source import caller

__all__ = ["CallRecorder"]


class CallRecorder(TorchFunctionMode):
    """Records the calls of its own thread, except calls inside a call that is one node. `Recorder` runs the model."""

    module_snapshots: ModuleSnapshots
    leftovers: RecordingLeftovers
    reads: AttributeReads
    generators: KnownGenerators
    located: AbstractContextManager[None] = nullcontext()  # a search for the line of a draw

    def __init__(
        self, model: nn.Module, symbol: BatchSymbol, device: torch.device, opaque_calls: OpaqueCalls, *, grad: bool
    ) -> None:
        super().__init__()
        self.model, self.symbol, self.opaque_calls, self.graph = model, symbol, opaque_calls, fx.Graph()
        self.fake = KnownValuesMode(shape_env=symbol.env, allow_non_fake_inputs=True)
        self.dispatcher = DispatchRecorder(self)
        self.twins = Twins(self.fake, device)
        self.values = ValueNodes(self.graph, symbol, self.twins, opaque_calls.opaque.known_objects)
        self.regions = Regions(self.graph, Ambient.now(grad=grad))
        self.writer = NodeWriter(self.values, self.regions)
        self.layer_writes = LayerWrites(self.values, self.dispatcher)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.reach, self.executed, self.draws = reachable(model), ExecutedCode(), RandomDrawCounter()
        self.is_paused = self.asked_grad_mode = self.has_lifted = False
        self.is_grad_enabled, self.noticed_at, self.asked, self.thread = grad, "", dict[str, str](), get_ident()

    # -- calls of torch -------------------------------------------------------------------------------------------

    @property
    def is_listening(self) -> bool:
        """Whether calls of this thread are recorded at this moment."""
        return not self.is_paused and get_ident() == self.thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self.executed.off:
            if func is set_grad_enabled:
                self.is_grad_enabled = args[0]
            self.asked_grad_mode |= self.is_listening and depends_on_grad_mode(func, args)
            if self.is_listening and reads_layout(func):
                self.note_read(LAYOUTS)
            if not self.is_listening or is_metadata_query(func):
                return func(*args, **kwargs)
            if accesses_gradient(func):
                self.refuse_gradient_read(is_of_state=not args[0].requires_grad)
            if state := state_name(func):
                raise TraceError(code="PC104", where=caller(), why=f"no recording has the `{state}` of a tensor")
            if func is torch.Tensor.__iter__:
                with self:
                    return iter(torch.unbind(args[0]))
            if is_transformed(tensors_in((args, kwargs))):
                return self._under_transform(func, args, kwargs)
            if (piece := self._opaque_piece(func)) is not None:
                return self._opaque_call(piece, func, args, kwargs)
            return self._function_call(func, args, kwargs, sys._getframe(1))

    def _function_call(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """Make and record a call of torch's; `frame` makes it."""
        self.generators.check((*args, *kwargs.values()))
        try:
            return self.call(func, args, kwargs, lambda faked: node_call(func, faked))
        except DataDependentOutputException:
            expected = asserted_truth(func, frame)
            if expected is None:
                raise
            return self._assertion(args[0], expected)
        except Exception as error:
            if is_unsupported_by_fakes(error):
                add_candidate(error, self._piece_of(func))
            raise

    def _assertion(self, tensor: torch.Tensor, expected: bool) -> bool:
        """Record that the truth of a tensor is `expected`, which each run checks."""
        self.writer.write(("call_function", holds, (tensor, expected, caller())), {}, None, Ambient.now())
        return expected

    def _piece_of(self, func: Any) -> Piece:
        """Return the call of a function on the user's current line, as a separate piece."""
        return Piece(self.writer.path[-1], func.__name__, caller())

    def _opaque_piece(self, func: Any) -> Piece | None:
        """Return the piece of this call if the call must be opaque."""
        if (self.writer.path[-1], func.__name__) not in self.opaque_calls.function_names:
            return None
        piece = self._piece_of(func)
        return piece if piece in self.opaque_calls.opaque.reasons else None

    def _under_transform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on tensors that `torch.func` wraps; the dispatcher records the operators behind the call."""
        self.dispatcher.is_detaching = func.__name__ in ("detach", "detach_")
        try:
            return func(*args, **kwargs)
        finally:
            self.dispatcher.is_detaching = False

    def record_operator(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Make the call of an operator and record it; it writes `written` in place."""
        return self.call(func, args, kwargs, lambda faked: ("call_function", func, faked), written)

    def tensor_class(self, tensor: torch.Tensor) -> type:
        """Return the class of the tensor that a fake tensor stands for."""
        return self.twins.tensor_class(tensor)

    def bind_alias(self, value: torch.Tensor, alias: torch.Tensor) -> None:
        """Let the node of `value` stand for `alias` as well."""
        self.values.bind(alias, self.values.node(value))

    def call(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        form: Callable[[Any], NodeCall],
        written: Sequence[torch.Tensor] = (),
        held: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Make a call, and record it if tensors come out of it or change.

        `form` gives the node for the faked arguments. `written` are written tensors that no operator and no version shows, `held` the
        parameters and buffers inside the called module.
        """
        args, kwargs = self.values.with_fakes((args, kwargs))
        example_args, example_kwargs = examples((args, kwargs)) if self.has_lifted else (args, kwargs)
        reached = (*tensors_in((args, kwargs)), *held)
        versions = [(tensor, version_of(tensor)) for tensor in reached if not tensor.is_inference()]
        ambient, drawn = Ambient.now(), self.draws.count
        exchanged = storages(args[:1]) if func.__name__ == "__set__" else frozenset()  # x.data = y exchanges the memory
        lenient = nullcontext() if decides_rank(func) else self.symbol.lenient()
        with self.paused(), lenient, self.dispatcher.writes_noted(reached) as changed:
            make = with_unknown_data(func, args, kwargs)
            result = make(*example_args, **example_kwargs)
            if self.has_lifted:
                check_shapes(make, (args, kwargs), result)
        changed += [*(t for t, n in versions if version_of(t) != n), *written, *undeclared_writes(func, args, kwargs)]
        if changed or tensors_in(result):
            draws = self.draws.note_layer(func, args) > drawn
            self.writer.write(
                form(args), kwargs, result, ambient, changed=changed, exchanged=exchanged, held=held, draws=draws
            )
        return result

    # -- modules, opaque pieces and functions that are one node ---------------------------------------------------

    def record_module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module: record a leaf as one node, and record through any other module."""
        name = self.names.get(id(module), "")
        is_plain = bool(name) and is_leaf(module) and not is_transformed(tensors_in((args, kwargs)))
        if is_plain and not self.opaque_calls.is_inlined(module) and self.module_snapshots.is_unchanged(module):
            return self._leaf(name, original, module, args, kwargs)
        if any(backward_hooks_of(module)):
            what = f"{name} is changed by forward" if name else "the hook is on the whole model"
            raise TraceError(code="PC106", where=caller(), why=what)
        self.reads.inlined.add(id(module))
        self.writer.path.append(name or self.writer.path[-1])
        try:
            return original(module, *args, **kwargs)
        finally:
            self.writer.path.pop()

    def _opaque_call(self, piece: Piece, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the call of an opaque piece as one node; its result is that of the trial runs, on fake tensors."""
        if not self.is_listening:
            return run(*args, **kwargs)
        args, kwargs = self.values.with_fakes((args, kwargs))
        with self.paused(), self.symbol.lenient():
            self.generators.check_piece(pytree.tree_leaves((args, kwargs)))
            call = self.opaque_calls.call(piece, run, (args, kwargs), self.twins.of)
        self.values.roots[call.target] = call.module
        self.writer.write(
            call.spelling(args),
            kwargs,
            call.result,
            Ambient.now(),
            changed=call.written,
            held=call.held,
            draws=call.draws_random,
        )
        return call.returned(self.leftovers.note_left, self.reads)

    def _leaf(self, name: str, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.values.roots[target := graph_path(name)] = module

        def call(*args: Any, **kwargs: Any) -> Any:
            self.draws.note_layer(module)
            return original(module, *args, **kwargs)

        written = list(module.buffers()) if module.training else []
        run = self.layer_writes.watched(cheap_forward(module, call), module, written)
        held = [*module.parameters(), *module.buffers()]
        noted = self.reads.of_layer(module) if type(module).__module__.startswith("torch.nn.") else nullcontext()
        with self.executed.off, self.leftovers.leaf_call(module), noted:
            result = self.call(run, args, kwargs, lambda faked: ("call_module", target, faked), written, held)
        self.module_snapshots.update(module)
        return result

    def record_single_call(
        self, shape_function: Callable[..., Any], target: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Record a custom autograd function or a scripted function as one node; `shape_function` computes its fake result."""
        with self.executed.off:  # the node runs the function anew
            kept = self.values.call_objects.kept(target, args)
            return self.call(shape_function, args, kwargs, lambda faked: ("call_function", target, kept(faked)))

    def record_rng_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a node that reads or sets the state of the random number generator, and return what the call returns."""
        function_node = rng_function(function)
        with self.paused():
            state = function_node(*args, **kwargs)
        self.writer.write(("call_function", function_node, args), kwargs, state, Ambient.now(), draws=True, seeds=True)
        return torch.default_generator if function.__name__ == "manual_seed" else state

    # -- reads of gradients, and pauses ----------------------------------------------------------------------------

    def note_grad_mode_read(self) -> None:
        """Note that the model reads whether gradients are on."""
        self.asked_grad_mode = True

    def note_read(self, what: str) -> None:
        """Note that the model reads `LAYOUTS` or `INFERENCE_MODE`."""
        self.asked.setdefault(what, caller())

    def refuse_gradient_read(self, *, is_of_state: bool = False) -> None:
        """Raise TraceError, because the model reads `.grad` or runs a backward.

        With `is_of_state` the tensor requires no gradient: only the model itself sets its `.grad`, so that a piece may read it.
        """
        raise (GradientStateError if is_of_state else TraceError)(code="PC113", where=caller())

    def refuse_saved_tensor_hooks(self) -> None:
        """Raise TraceError, because the model passes what autograd saves through hooks."""
        raise TraceError(code="PC117", where=caller())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before
