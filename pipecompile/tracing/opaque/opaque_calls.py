"""The opaque calls of one recording: the number of each call of a piece, its node, and its result for the model's Python code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.containers import argument_leaves
from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import forget_values
from pipecompile.tracing.emit.call_description import NodeCall, graph_path
from pipecompile.tracing.emit.value_nodes import ValueNodes
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.guards.attribute_reads import AttributeReads
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import OpaquePieces, OpaqueReason
from pipecompile.tracing.opaque.fake_results import fake_result
from pipecompile.tracing.opaque.left_attributes import turns_of
from pipecompile.tracing.opaque.named_tensors import attribute_tensors
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.opaque.result_spec import ResultSpec
from pipecompile.tracing.opaque.watched_state import WatchedState
from pipecompile.tracing.outlining.outlined_calls import BlockCall
from pipecompile.tracing.user_source import caller

__all__ = ["OpaqueCall", "OpaqueCalls"]


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """One opaque call as the recorder writes it down.

    target, module   name and module of the node
    number           position among the calls of the piece
    size             batch size in samples: a symbol, a number, or 0 if no input has a batch dimension
    result           the fake result
    written, held    fake tensors that the call may write, and fake tensors of the model that it may read
    draws_random     it drew random numbers in the first trial run
    """

    target: str
    module: OpaqueModule
    number: int
    size: Any
    result: Any
    written: list[torch.Tensor]
    held: tuple[torch.Tensor, ...]
    draws_random: bool

    def returned(self, note_left: Callable[[nn.Module, str, RLock], None], reads: AttributeReads) -> Any:
        """Return what the model's Python gets. It finds in attributes what the call leaves; `note_left` is called for each.

        Each is noted as read, too: a parameter that takes its place later, or another submodule, makes the recording wrong.
        """
        left, owner = self.module.expected_results[-1].left, self.module.owner[0]
        result = left.separated(owner, self.result)
        for path, name in left.names:
            note_left(owner.get_submodule(path), name, turns_of(owner))
            reads.note_path(owner, (*filter(None, path.split(".")), name))
        return result

    def spelling(self, args: tuple[Any, ...]) -> NodeCall:
        """Return opcode, target and arguments of the node."""
        return "call_module", self.target, (self.number, self.size, *args)


class OpaqueCalls:
    """Counts the calls of opaque pieces in one recording, and makes the result of each.

    `modules` has the pieces called. Each call of a block has a module of its own, so that the calls can be in several stages.
    """

    def __init__(self, opaque: OpaquePieces, symbol: BatchSymbol) -> None:
        self.opaque, self.symbol = opaque, symbol
        self.modules: dict[tuple[Piece, int], OpaqueModule] = {}
        self._counts: Counter[Piece] = Counter()

    @cached_property
    def function_names(self) -> frozenset[tuple[str, str]]:
        """The opaque torch functions: path of the module that calls one, and name of the function."""
        return frozenset((piece.path, piece.method) for piece in self.opaque.reasons if piece.line)

    def is_inlined(self, layer: nn.Module) -> bool:
        """Return whether a layer is recorded through, because of what its hooks leave."""
        return id(layer) in self.opaque.inlined

    def call(
        self, piece: Piece, run: Callable[..., Any], arguments: Any, twin: Callable[[torch.Tensor], Any]
    ) -> OpaqueCall:
        """Return the next call of `piece`, with these arguments; `run` is what the call would run.

        Raise TraceError if the trial runs made fewer calls of the piece.
        """
        number = self._counts[piece]
        self._counts[piece] += 1
        specs = self.opaque.result_specs[piece]
        if number >= len(specs):
            why = f"{piece.name} is called more often while the model is recorded than when it runs"
            raise TraceError(code="PC111", where=caller(), why=why)
        trial = specs[number].call
        owner = self.opaque.model.get_submodule(piece.path)
        key = (piece, number if piece.block else 0)
        module = self._module(key, owner, run)
        module.hold(trial.used)
        module.note_writes(trial.trained, trial.buffers)
        leaves = argument_leaves(arguments)
        spec = _trained(specs[number], module)
        result, expected = fake_result(spec, leaves, self.opaque.inputs.samples, self.symbol, twin)
        module.expected_results.append(expected)
        written = [*(leaves[position] for position in trial.written), *map(twin, trial.state)]
        written += [*owner.buffers(), *(twin(one) for _, one in attribute_tensors(owner))] if piece.is_module else []
        forget_values([*leaves, *written])
        own = [*owner.parameters(), *owner.buffers()] if piece.is_module else []
        held = (*own, *map(twin, trial.used))
        size = self.symbol.size if self.symbol.root is not None or self.symbol.fixed else 0
        return OpaqueCall(
            self._target(key), module, 0 if piece.block else number, size, result, written, held, trial.draws_random
        )

    def _module(self, key: tuple[Piece, int], owner: nn.Module, run: Callable[..., Any]) -> OpaqueModule:
        function = run.kept if isinstance(run, BlockCall) else run if key[0].is_function else None
        return self.modules.setdefault(key, OpaqueModule(key[0], owner, self.symbol.symbol, function))

    @contextmanager
    def counts_restored(self) -> Iterator[None]:
        """Count the calls in the block from 0 again and forget them afterwards: the model is called a second time."""
        counts, self._counts = self._counts, Counter()
        lengths = {module: len(module.expected_results) for module in self.modules.values()}
        try:
            yield
        finally:
            self._counts = counts
            for module, length in lengths.items():
                del module.expected_results[length:]

    def finish(self, nodes: Iterable[fx.Node], values: ValueNodes) -> None:
        """Set on the pieces which results the graph with these nodes reads, and what the recording assumed about sizes of results."""
        watched = WatchedState.of(self.opaque.model, nodes, values) if self.modules else WatchedState()
        for module in self.modules.values():
            module.watched = watched if module.is_users else WatchedState()
            for expected in module.expected_results:
                sizes, batch = expected.data_sizes, self.symbol.symbol
                expected.conditions = self.symbol.data_sizes.conditions(sizes, batch)

    def reasons(self) -> tuple[OpaqueReason, ...]:
        """Return why each piece called is opaque."""
        return tuple(self.opaque.reasons[piece] for piece in dict.fromkeys(piece for piece, _ in self.modules))

    def _target(self, key: tuple[Piece, int]) -> str:
        """Return the node's target; for a function or a block, a path that nothing in the model has. Saved plans contain it."""
        piece = key[0]
        return graph_path(piece.name if piece.is_part else f"{piece.name}_kept_{list(self.modules).index(key)}")


def _trained(spec: ResultSpec, module: OpaqueModule) -> ResultSpec:
    """Return the spec with gradients if the call draws numbers and has parameters: by chance, no trial run may have used them."""
    has_parameters = any(parameter.requires_grad for parameter in module.parameters())
    return spec.with_gradients() if spec.call.draws_random and has_parameters and torch.is_grad_enabled() else spec
