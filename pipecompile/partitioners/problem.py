"""The partition problem as plain data, and its text form `pipecompile.problem/1`, JSON:

    problem := {"format": "pipecompile.problem/1", "nodes": [node*], "precedence": [[NAME, NAME]*], "tensors": [tensor*],
                "groups": [[NAME*]*], "multicast": BOOL, "overlap": BOOL, "name": TEXT,
                "placement": null | [DEVICE*], "speed": null | [NUMBER*], "memory_limit": null | NUMBER | [NUMBER*],
                "links": null | [[NUMBER*]*], "in_flight": null | [NUMBER*], "recompute": null | "auto" | [BOOL*],
                "shared": [shared*], "pins": {NAME: STAGE}, "apart": [[NAME, NAME]*]}
    node    := {"name": NAME, "time": NUMBER, "forward": NUMBER, "bytes": NUMBER, "activation": NUMBER}
    tensor  := {"from": NAME, "to": [NAME+], "time": NUMBER, "bytes": NUMBER}
    shared  := {"nodes": [NAME+], "bytes": NUMBER}

Only "nodes" must be there. `speed`, `memory_limit` and `links` count devices, `placement`, `in_flight` and `recompute`
stages; a list fixes the number of stages that the problem can be cut into. Without a placement stage s is on device s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from pipecompile.errors import PartitionError, VerifyError
from pipecompile.partitioners.verify import problem_faults

__all__ = ["FORMAT", "Node", "Problem", "Shared", "Tensor"]

FORMAT = "pipecompile.problem/1"

_HINT = "the keys are listed in the docstring of pipecompile.partitioners.problem"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `time` is for one micro-batch, forward and backward together, `forward` the part of it that
    recomputation repeats; `bytes` are held for good (parameters, gradients, optimizer state), `activation` per
    micro-batch in flight.
    """

    name: str
    time: float = 0.0
    bytes: float = 0.0
    activation: float = 0.0
    forward: float = 0.0


class Tensor(msgspec.Struct, frozen=True, rename={"source": "from", "consumers": "to"}):
    """A value and who reads it. `time` is what it costs a device to send it once, or to receive it once; `bytes` is what
    each other stage that reads it holds of it per micro-batch in flight there. It needs no precedence: a gradient flows
    against it. (A Struct, since the JSON key `from` cannot name a dataclass field.)
    """

    source: str
    consumers: tuple[str, ...]
    time: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that several nodes use, a tied parameter: held once by each device that has any of them."""

    nodes: tuple[str, ...]
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be cut into stages, and what a device can hold. `loads` has the objective.

    `precedence` holds pairs (a, b): stage(a) <= stage(b), `apart` pairs with stage(a) < stage(b), `pins` the stage that a
    node must be in. Nodes of one group share a stage. With `multicast` a sender pays a tensor once however many devices
    receive it, else once per receiving device; a receiving device always pays once. `links[p][q]` multiplies the time of a
    tensor from device p to device q. With `overlap` the load of a device is the maximum of compute, sent and received, else
    their sum. A stage that recomputes holds its activations once, not per micro-batch in flight, and repeats its forward;
    "auto" leaves it to the solver which stages do.
    """

    nodes: tuple[Node, ...]
    precedence: tuple[tuple[str, str], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    memory_limit: float | tuple[float, ...] | None = None
    in_flight: tuple[float, ...] | None = None
    multicast: bool = True
    overlap: bool = False
    speed: tuple[float, ...] | None = None
    placement: tuple[int, ...] | None = None
    links: tuple[tuple[float, ...], ...] | None = None
    recompute: Literal["auto"] | tuple[bool, ...] | None = None
    shared: tuple[Shared, ...] = ()
    pins: dict[str, int] = field(default_factory=dict, hash=False)
    apart: tuple[tuple[str, str], ...] = ()
    name: str = ""
    format: str = FORMAT

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Problem:
        """The inverse of `to_json`; `optima` is skipped, another unknown key is refused. Raises PartitionError naming the
        place in the text; legality is left to `verify`.
        """
        try:
            problem = msgspec.json.decode(text, type=cls)
            keys = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PartitionError("this is not a partition problem", where=where, why=str(error), hint=_HINT) from None
        if problem.format != FORMAT:
            raise PartitionError(
                f"the problem has format {problem.format!r}, this version reads {FORMAT!r}", where=where
            )
        if unknown := sorted(set(keys) - {*cls.__dataclass_fields__, "optima"}):
            raise PartitionError(f"the problem has unknown keys: {', '.join(unknown)}", where=where, hint=_HINT)
        return problem

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read a problem. Raises PartitionError when the file is missing or damaged."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PartitionError("the problem cannot be read", where=str(path), why=str(error)) from None
        return cls.from_json(text, where=str(path))

    def verify(self) -> None:
        """Raise VerifyError with every fault: unknown or doubled names, cycles, illegal numbers, lists that disagree."""
        if faults := problem_faults(self):
            raise VerifyError(f"partition problem {self.name!r}" if self.name else "partition problem", faults)
