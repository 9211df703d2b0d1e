"""Facts of a whole recording, typed: everything that later levels need of a traced graph beyond its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from pipecompile.batching.batch_dims import Dims
from pipecompile.torch_private import pytree
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.guards.state_guards import RecordedReads
from pipecompile.tracing.opaque.attempts import OpaqueReason
from pipecompile.tracing.state.carried_state import CarriedFacts
from pipecompile.tracing.state.made_tables import MadeTable

__all__ = ["GraphFacts", "Ties"]


@dataclass(frozen=True, slots=True)
class Ties:
    """Names of nodes that must share a stage, and pairs (a, b) with stage(a) <= stage(b) that no data edge implies."""

    groups: tuple[tuple[str, ...], ...]
    precedence: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The facts of one recording.

    symbol      the batch size as a symbol, in the shapes of all values
    batch_size  the only batch size (samples) that the graph is right for; None if there are several
    guards      conditions on the batch size under which the graph is right, because the model branched on them
    names       names of the flat input leaves, one per placeholder
    dims        batch dimension of each input leaf; None for an input that all samples share
    in_spec     structure of (args, kwargs) over the input leaves
    out_spec    structure of the output over its leaves
    outside     grad mode and autocast around the recorded call
    device      device of the recording: tensors made in `forward` were made there
    kept        the pieces of the model that are one opaque node each, and why
    carried     the state in attributes and containers that a call reads before it replaces it; None if there is none
    rebound     the names of the buffers that the forward replaces by a tensor of the same shape and dtype
    grad_mode   the grad mode that the graph is right for; None if it is right for both
    ties        the nodes that must share a stage; None until `prepare` has computed the ties
    reads       the state that the recording read beyond its inputs; None for a graph that was read from its text
    tables      the tables that every run makes anew, and that the model keeps once they are made
    written     the names of the tensors of the model that layers and pieces kept whole were seen to write
    left        the names of what hooks of layers and pieces kept whole were seen to leave on objects
    noticed_at  the user's line that saw that a value is fake, after which the model may take another way; "" if none did
    """

    symbol: sympy.Symbol
    batch_size: int | None
    guards: tuple[Guard, ...]
    names: tuple[str, ...]
    dims: Dims
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    outside: Ambient
    device: torch.device
    kept: tuple[OpaqueReason, ...] = ()
    carried: CarriedFacts | None = None
    rebound: tuple[str, ...] = ()
    grad_mode: bool | None = None
    ties: Ties | None = None
    reads: RecordedReads | None = None
    noticed_at: str = ""
    tables: tuple[MadeTable, ...] = ()
    written: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
