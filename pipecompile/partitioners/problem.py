"""The partition problem as plain data, and its text form `pipecompile.problem/1`, JSON:

    problem := {"format": "pipecompile.problem/1", "nodes": [node*], "precedence": [[NAME, NAME]*], "tensors": [tensor*],
                "groups": [[NAME*]*], "multicast": BOOL, "overlap": BOOL, "name": TEXT,
                "placement": null | [DEVICE*], "speed": null | [NUMBER*], "memory_limit": null | NUMBER | [NUMBER*],
                "links": null | [[NUMBER*]*], "in_flight": null | [NUMBER*], "recompute": null | "auto" | [BOOL*],
                "shared": [shared*], "pins": {NAME: STAGE}, "apart": [[NAME, NAME]*]}
    node    := {"name": NAME, "time": NUMBER, "forward": NUMBER, "bytes": NUMBER, "activation": NUMBER}
    tensor  := {"from": NAME, "to": [NAME+], "time": NUMBER, "bytes": NUMBER}
    shared  := {"nodes": [NAME+], "bytes": NUMBER}

Only "nodes" is required. Times are in seconds, bytes in bytes. `speed`, `memory_limit` and `links` are indexed by device;
`placement`, `in_flight` and `recompute` by stage. A list fixes the number of stages that the problem can be cut into. Without
a placement, stage s is on device s.

The objective is defined in `objective.py`, the legality of a problem in `verify.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipecompile.errors import PartitionError
from pipecompile.text.input_checks import file_path, json_text, place_text
from pipecompile.text.shown_value import shown, type_text
from pipecompile.text.text_file import load_text, save_text

__all__ = ["FORMAT", "Node", "Problem", "Shared", "Tensor"]

FORMAT = "pipecompile.problem/1"

_HINT = """pc.Problem.from_json('{"nodes": [{"name": "a", "time": 1.0}]}'); help(pipecompile.partitioners.problem) has all keys"""

_NESTED = ("precedence", "groups", "links", "apart")
_TUPLES = (*_NESTED, "nodes", "tensors", "memory_limit", "in_flight", "speed", "placement", "recompute", "shared")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    `time` is the forward and backward of one micro-batch, in seconds; `forward` is the part of it that recomputation repeats.
    `bytes` are permanent (parameters, gradients, optimizer state). `activation` are bytes per micro-batch in flight.
    """

    name: str
    time: float = 0.0
    bytes: float = 0.0
    activation: float = 0.0
    forward: float = 0.0


class Tensor(msgspec.Struct, frozen=True, rename={"source": "from", "consumers": "to"}):
    """A value and its consumers.

    `time` is the cost, in seconds, for a device to send it once or to receive it once. `bytes` is the buffer that each other
    stage with a consumer holds per micro-batch in flight there. A tensor implies no precedence, since a gradient flows
    against it. (A Struct, since the JSON key `from` cannot name a dataclass field.)
    """

    source: str
    consumers: tuple[str, ...]
    time: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.consumers, list):
            msgspec.structs.force_setattr(self, "consumers", tuple(self.consumers))


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that several nodes use, such as a tied parameter. Each device with any of the nodes holds them once."""

    nodes: tuple[str, ...]
    bytes: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _as_tuple(self.nodes))


def _plain(value: object) -> int | float:
    """Return a number of NumPy, or a fraction, as Python's. Raise TypeError for other values, as the encoder does."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type_text(value)} cannot be written as JSON")


@dataclass(frozen=True, slots=True)
class Problem:
    """A weighted graph to be cut into ordered stages, and the machine that runs them.

    Constraints. `precedence` holds pairs (a, b) with stage(a) <= stage(b), `apart` pairs with stage(a) < stage(b), `pins` the
    stage of a node. The nodes of one group share a stage.

    Communication. With `multicast`, a sender pays for a tensor once, however many devices receive it; without, once per
    receiving device. A receiving device always pays once. `links[p][q]` is a factor on the time of a tensor from device p to
    device q. With `overlap`, the load of a device is the maximum of compute, sent and received, else their sum.

    Recomputation. A stage that recomputes holds its activations once, not per micro-batch in flight, and repeats its forward.
    With "auto", the solver decides which stages recompute.

    Lists become tuples. Types and values are checked by `verify_problem`.
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

    def __post_init__(self) -> None:
        for name in _TUPLES:
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        for name in _NESTED:
            value = getattr(self, name)
            if isinstance(value, tuple) and any(isinstance(item, list) for item in value):
                object.__setattr__(self, name, tuple(map(_as_tuple, value)))

    def __repr__(self) -> str:
        return f"Problem({shown(self.name)}, n_nodes={len(self.nodes)}, n_tensors={len(self.tensors)})"

    def to_json(self) -> str:
        """Return the text form."""
        return msgspec.json.format(msgspec.json.encode(self, enc_hook=_plain), indent=1).decode()

    def plain(self) -> Problem:
        """Return the problem with Python's numbers in the place of NumPy's, and of fractions."""
        parts = (*self.nodes, *self.tensors, *self.shared)
        numbers = [getattr(part, name, 0) for part in parts for name in ("time", "bytes", "activation", "forward")]
        lists = (
            self.memory_limit,
            self.in_flight,
            self.speed,
            self.placement,
            *(self.links or ()),
            tuple(self.pins.values()),
        )
        numbers += [number for each in lists for number in (each if isinstance(each, tuple) else (each,))]
        return self if set(map(type, numbers)) <= {int, float, type(None)} else Problem.from_json(self.to_json())

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Problem:
        """Parse the text form. The key `optima` is ignored.

        Raise PartitionError, with the position in the text, if the text is malformed or has an unknown key. Legality is not
        checked: see `verify_problem`.
        """
        text, where = json_text(text), place_text(where)
        try:
            problem: Problem = msgspec.json.decode(text, type=cls)
            keys: dict[str, msgspec.Raw] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            entries: _Entries = msgspec.json.decode(text, type=_Entries)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise PartitionError(
                "the text is not a partition problem", where=where, why=str(error), hint=_HINT
            ) from None
        if problem.format != FORMAT:
            raise PartitionError(
                f"the problem has format {shown(problem.format)}, this version reads {FORMAT!r}", where=where
            )
        if unknown := sorted(set(keys) - {*cls.__dataclass_fields__, "optima"}):
            raise PartitionError(f"the problem has unknown keys: {shown(unknown)}", where=where, hint=_HINT)
        entries.check(where)
        return problem

    def save(self, path: str | Path) -> None:
        """Write the text form to a file. Raise InputError if it cannot be written."""
        save_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read the text form from a file. Raise PartitionError if the file is missing or malformed."""
        source = file_path("path", path)
        text = load_text(source, "problem", PartitionError, f"write one with pipe.problem.save({str(source)!r})")
        return cls.from_json(text, where=str(source))


class _Entries(msgspec.Struct):
    """The keys of the objects in a problem's lists."""

    nodes: list[dict[str, msgspec.Raw]] = []
    tensors: list[dict[str, msgspec.Raw]] = []
    shared: list[dict[str, msgspec.Raw]] = []

    def check(self, where: str) -> None:
        """Raise PartitionError for the first object with a key that it does not have."""
        known = {"node": {*Node.__dataclass_fields__}, "tensor": {*Tensor.__struct_encode_fields__},
                 "shared": {*Shared.__dataclass_fields__}}  # fmt: skip
        for (name, keys), entries in zip(known.items(), (self.nodes, self.tensors, self.shared), strict=True):
            for number, entry in enumerate(entries):
                if unknown := sorted(entry.keys() - keys):
                    what = f"{name} {number} of the problem has unknown keys: {shown(unknown)}"
                    raise PartitionError(what, where=where, hint=f"its keys are {', '.join(sorted(keys))}")
