"""The description of a call in the graph: opcode and target of its node, and effects that versions of tensors do not show.

Operators and attribute access are nodes of functions; methods of Tensor are nodes of their name. Calls that only read metadata
get no node. Writes that the version counters of tensors do not show:

    x.requires_grad = True, x.register_hook(f)      the tensor, but not its memory
    F.batch_norm(x, mean, var, training=True)       the running statistics; torch does not declare this write
    torch.ops.library.update(state, x)              what the schema declares as written

A later read must see the same state as in the model, so these tensors count as written.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

import torch
import torch.nn.functional as F
from torch import fx, nn

from pipecompile.errors import TraceError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.modes import set_grad_enabled
from pipecompile.torch_private.operators import batch_norm_operators, written_arguments
from pipecompile.tracing.user_source import caller, is_foreign

__all__ = [
    "HOOKS",
    "HeldArgument",
    "NodeCall",
    "accesses_gradient",
    "check_keywords",
    "code_name",
    "decides_rank",
    "depends_on_grad_mode",
    "graph_path",
    "is_code_atom",
    "is_code_name",
    "is_code_text",
    "is_metadata_query",
    "model_path",
    "node_call",
    "printable",
    "reads_layout",
    "state_name",
    "undeclared_writes",
]


@dataclass(frozen=True, slots=True)
class HeldArgument:
    """An argument that a backward reads: a hook of whatever type, or an object that an autograd function may keep."""

    value: Any


NodeCall = tuple[str, Any, Any]
"""The opcode, the target and the arguments of a node."""

_ATOM = re.compile(r"[0-9A-Za-z_+/:@ -]+")


def is_code_name(name: str) -> bool:
    """Return whether Python's code can contain `name` as a variable, and reads the same name: other letters in their normal form."""
    is_same = name.isascii() or normalize("NFKC", name) == name
    return is_same and name.isidentifier() and not iskeyword(name)


def code_name(name: str) -> str:
    """Return `name`, or if code cannot contain `name`, one that it can: `class` becomes `class_`."""
    if is_code_name(name):
        return name
    word = re.sub(r"\W", "_", name, flags=re.ASCII) + "_"
    return word if is_code_name(word) else f"_{word}"


def check_keywords(names: Iterable[str], code: str = "PC199") -> None:
    """Raise TraceError with this code for a keyword of a call that code cannot contain."""
    for name in names:
        if not is_code_name(name):
            raise TraceError(
                f"cannot trace: a keyword of a call is not a name in Python's code: {shown(name)}",
                code=code, where=caller(), why="a recorded graph is written as code", hint="pass a dictionary, or another keyword",
            )  # fmt: skip


def is_code_atom(atom: str) -> bool:
    """Return whether fx writes this part of a path unchanged: it is a name, or simple text between double quotes."""
    return is_code_name(atom) or (_ATOM.fullmatch(atom) is not None and not iskeyword(atom))


def is_code_text(text: str) -> bool:
    """Return whether fx keeps a line with this string."""
    return "# COUNTER: " not in text


def printable(name: str) -> str:
    """Return a name for a line of a table or picture: control characters, lone surrogates and the like as their escapes."""
    return name if name.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


_OF_MODEL, _QUOTED = "_of_model", "_quoted_"
_TAKEN = frozenset({*dir(fx.GraphModule(nn.Module(), fx.Graph())), "facts", _OF_MODEL})
_CODE_OF_LETTER = re.compile("_([0-9a-f]+)_")


def graph_path(name: str) -> str:
    """Return the path in the graph module of the model's attribute `name`: a dotted name that generated code can contain.

    A name that a GraphModule has itself (`graph`, `code`) moves under `_of_model`. An atom that is not a name in Python's code, such
    as a keyword or the key `a"b` of a ModuleDict, is quoted: `_quoted_a_22_b`. Different names have different paths.
    """
    atoms = name.split(".")
    if name == "" or (atoms[0] not in _TAKEN and all(map(_is_bare, atoms))):
        return name
    return ".".join([_OF_MODEL, *map(_quoted, atoms)])


def model_path(target: str) -> str:
    """Return the path in the model of an attribute of the graph module."""
    first, *atoms = target.split(".")
    return ".".join(map(_unquoted, atoms)) if first == _OF_MODEL else target


def _is_bare(atom: str) -> bool:
    """Return whether code can contain this atom of a path as it is."""
    return is_code_atom(atom) and not atom.startswith(_QUOTED)


def _quoted(atom: str) -> str:
    if _is_bare(atom):
        return atom
    letters = (c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in atom)
    return _QUOTED + "".join(letters)


def _unquoted(atom: str) -> str:
    if not atom.startswith(_QUOTED):
        return atom
    return _CODE_OF_LETTER.sub(lambda code: chr(int(code[1], 16)), atom.removeprefix(_QUOTED))


_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift eq ne lt le gt ge"
_INPLACE = "iadd isub imul itruediv ifloordiv imod ipow ilshift irshift"
_OTHER = "neg pos invert abs getitem setitem"
_OPERATORS = {f"__{name}__": getattr(operator, name) for name in f"{_BINARY} {_INPLACE} {_OTHER}".split()}
_OPERATORS |= {f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")} | {"__xor__": operator.xor}
_OPERATORS |= {f"__i{name}__": getattr(operator, f"i{name}") for name in ("and", "or", "xor")}

_METHODS: dict[Any, str] = {}
"""Names of the methods of torch.Tensor whose `__name__` differs (that of `Tensor.__pow__` is "pow")."""
for _name, _method in vars(torch.Tensor).items():
    if callable(_method) and getattr(_method, "__name__", _name) != _name:
        _METHODS.setdefault(_method, _name)


_BY_SIZE = (
    "squeeze",
    "unbind",
    "chunk",
    "split",
    "tensor_split",
    "hsplit",
    "vsplit",
    "dsplit",
    "unsafe_chunk",
    "unsafe_split",
)


def decides_rank(func: Any) -> bool:
    """Return whether the number of results, or of their dimensions, depends on the sizes of the arguments."""
    return str(func.__name__).strip("_").startswith(_BY_SIZE)


def node_call(func: Any, args: Any) -> NodeCall:
    """Return opcode, target and arguments for a call that reached a TorchFunctionMode."""
    name = _METHODS.get(func) or func.__name__
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
        getting = name == "__get__"
        return "call_function", getattr if getting else setattr, (args[0], attribute, *([] if getting else args[1:2]))
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    if name == "new" and len(args) == 2 and isinstance(args[1], torch.Size):
        return "call_method", "new_empty", args  # fx writes the size as a tuple, and `new` takes a tuple as data
    if getattr(torch.Tensor, name, None) == func:
        return "call_method", name, (args[0], *map(HeldArgument, args[1:])) if name in HOOKS else args
    return "call_function", func, args


_ATTRIBUTES = "shape dtype device ndim is_cuda is_meta layout requires_grad is_leaf itemsize nbytes is_sparse grad_fn"
_QUERIES = (
    "size dim stride numel nelement element_size is_contiguous is_floating_point is_complex storage_offset get_device"
)
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()]
    + [getattr(torch.Tensor, name) for name in _QUERIES.split()]
)

_OF_GRADIENTS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn"))

_LEAVES_GRADIENTS = frozenset([getattr(torch.Tensor, "grad").__get__, torch.Tensor.backward])  # noqa: B009

_STATE_ATTRIBUTES = "_version retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks"
_OF_STATE = {getattr(torch.Tensor, name).__get__: name for name in _STATE_ATTRIBUTES.split()}
_OF_STATE |= {torch.Tensor.is_shared: "is_shared", torch.Tensor.is_pinned: "is_pinned"}

HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
"""Names of the methods of a tensor that register a hook on its gradient."""
_ON_THE_TENSOR = HOOKS | {"__set__", "retain_grad"}

_STATISTICS: dict[Any, tuple[int, str, bool]] = {
    F.batch_norm: (1, "training", False),
    F.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", True),
    **dict.fromkeys(batch_norm_operators, (3, "training", False)),
}
"""Per function: the position of the running mean, before the variance; the name of the flag, argument 5 in all of them, and its default."""


_OF_LAYOUT = frozenset([torch.Tensor.is_contiguous, torch.Tensor.stride])


def reads_layout(func: Any) -> bool:
    """Return whether the call reads how the memory of a tensor is laid out."""
    return func in _OF_LAYOUT


def is_metadata_query(func: Any) -> bool:
    """Return whether the call reads metadata of a tensor, so that no node is needed."""
    return func in _METADATA


def depends_on_grad_mode(func: Any, args: Any) -> bool:
    """Return whether the call makes the recording depend on the caller's grad mode.

    The call reads `requires_grad`, `is_leaf` or `grad_fn` in the user's code, or turns gradients on; the end of a `no_grad` block,
    which restores the mode, does not count.
    """
    if func is set_grad_enabled:
        frame, callers = sys._getframe(2), []
        for _ in range(2):
            callers.append(frame.f_code.co_name)
            frame = frame.f_back or frame
        return bool(args[0]) and "__exit__" not in callers
    return func in _OF_GRADIENTS and not is_foreign(sys._getframe(2))


def accesses_gradient(func: Any) -> bool:
    """Return whether the user's code reads `.grad` or runs a backward."""
    return func in _LEAVES_GRADIENTS and not is_foreign(sys._getframe(2))


def state_name(func: Any) -> str:
    """Return the name of the state of a tensor that user code reads beyond its values and type, such as its version; or ""."""
    name = _OF_STATE.get(func, "")
    return "" if name and is_foreign(sys._getframe(2)) else name


def undeclared_writes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments that the call changes although their versions stay."""
    if func in _STATISTICS:
        first, flag, default = _STATISTICS[func]
        named = (kwargs.get("running_mean"), kwargs.get("running_var"))
        writes = kwargs.get(flag, args[5] if len(args) > 5 else default)
        return (
            [tensor for tensor in (*args[first : first + 2], *named) if isinstance(tensor, torch.Tensor)]
            if writes
            else []
        )
    if func.__name__ in _ON_THE_TENSOR:
        return list(args[:1])
    places = written_arguments(func)
    return [kwargs.get(name) if i >= len(args) else args[i] for i, name in places if i < len(args) or name in kwargs]
