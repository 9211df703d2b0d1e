"""The pieces kept whole in one recording: a `Kept` for each, and which of its calls comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pipecompile.batching.containers import taken_apart
from pipecompile.errors import TraceError
from pipecompile.tracing.emit.node_target import Spelling, attribute
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attempts import Opaque, Reason
from pipecompile.tracing.opaque.fake_results import imagine
from pipecompile.tracing.opaque.opaque_node import Kept
from pipecompile.tracing.user_source import caller

__all__ = ["KeptCall", "KeptPieces"]


@dataclass(frozen=True, slots=True)
class KeptCall:
    """One call in the graph: the name and the module that is called, the number of the call and the batch size, its imagined
    result, the tensors that it writes, those of the model that it reads, and whether it draws random numbers.
    """

    target: str
    module: Kept
    number: int
    size: Any
    result: Any
    written: list[torch.Tensor]
    held: tuple[torch.Tensor, ...]
    random: bool

    def spelling(self, args: tuple[Any, ...]) -> Spelling:
        """How the call is written down."""
        return "call_module", self.target, (self.number, self.size, *args)


class KeptPieces:
    """Answers the calls of pieces while a model is recorded."""

    def __init__(self, opaque: Opaque, symbol: BatchSymbol) -> None:
        self.opaque, self.symbol = opaque, symbol
        self.modules: dict[Piece, Kept] = {}
        self._calls: Counter[Piece] = Counter()

    @cached_property
    def lines(self) -> frozenset[tuple[str, str]]:
        """Where functions are kept: the path of the module and the name of the function."""
        return frozenset((piece.path, piece.method) for piece in self.opaque.reasons if piece.line)

    def call(self, piece: Piece, run: Callable[..., Any], given: Any, twin: Callable[[torch.Tensor], Any]) -> KeptCall:
        """The next call of a piece, with these arguments. `run` is what it would run."""
        number = self._calls[piece]
        self._calls[piece] += 1
        told = self.opaque.promises[piece]
        if number >= len(told):
            why = f"{piece.name} is called more often while the model is recorded than when it runs"
            raise TraceError(code="PC111", where=caller(), why=why)
        owner = self.opaque.model.get_submodule(piece.path)
        function = run if piece.line else None
        kept = self.modules.setdefault(piece, Kept(piece, owner, self.symbol.symbol, function))
        leaves = taken_apart(given)[0]
        record = told[number].call
        kept.hold(record.used)
        result, promise = imagine(told[number], leaves, self.opaque.inputs.samples, self.symbol, twin)
        kept.promises.append(promise)
        written = [leaves[place] for place in record.written]
        written += [twin(tensor) for tensor in record.used if not isinstance(tensor, torch.nn.Parameter)]
        written += list(owner.buffers()) if piece.is_module else []
        own = [*owner.parameters(), *owner.buffers()] if piece.is_module else []
        held = (*own, *map(twin, record.used))
        size = self.symbol.size if self.symbol.root is not None or self.symbol.fixed else 0
        return KeptCall(self._target(piece), kept, number, size, result, written, held, record.random)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The calls of the block are those of another call of the model, and do not count."""
        calls, self._calls = self._calls, Counter()
        counts = {kept: len(kept.promises) for kept in self.modules.values()}
        try:
            yield
        finally:
            self._calls = calls
            for kept, count in counts.items():
                del kept.promises[count:]

    def settle(self) -> None:
        """At the end: what the recording took for granted about sizes becomes part of the promises."""
        for kept in self.modules.values():
            for promise in kept.promises:
                promise.conditions = self.symbol.unknowns.conditions(promise.unknown, self.symbol.symbol)

    def reasons(self) -> tuple[Reason, ...]:
        """Why each piece that was met is kept whole."""
        return tuple(self.opaque.reasons[piece] for piece in self.modules)

    def _target(self, piece: Piece) -> str:
        """Where the graph has it: a function at a path that nothing in the model has."""
        return attribute(f"{piece.name}_kept_{list(self.modules).index(piece)}" if piece.line else piece.name)
