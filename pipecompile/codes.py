"""The registry of everything that can keep a model from being recorded: one stable code each, never given out twice.

Every code has a section in docs/errors.md with an example that provokes it and a cure. `why` and `hint` are what the
message says where the place that raises knows nothing better.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "DOCS", "Code", "code"]

DOCS = "docs/errors.md"


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of failure."""

    name: str
    what: str
    why: str
    hint: str

    @property
    def page(self) -> str:
        """Where the documentation has its section."""
        return f"{DOCS}#{self.name.lower()}"


_MASKS = "torch.where or a mask instead of the branch, or put the decision into a submodule: that one is kept whole"

_TABLE = (
    Code("PC101", "Python branches on the value of a tensor",
         "an if, while or bool() asks for a number that exists only when the model runs", _MASKS),
    Code("PC102", "Python takes a number out of a tensor",
         "item(), tolist(), int() or float() wants a number that exists only when the model runs",
         "keep it a tensor (without dimensions it broadcasts), or take it out in a submodule: that one is kept whole"),
    Code("PC103", "the shape of a result depends on the values of a tensor",
         "nonzero, unique, masked_select or a boolean index gives as many rows as the data say",
         "multiply with the mask, topk, or do it in a submodule: that one is kept whole"),
    Code("PC104", "data leave torch",
         "numpy and other libraries compute on memory that a recording does not have",
         "the same in torch, or in a submodule: that one is kept whole"),
    Code("PC105", "the model returns what cannot be taken apart into tensors",
         "outputs are put together from micro-batches, leaf by leaf",
         "return tuples, lists or dicts of tensors"),
    Code("PC106", "a backward hook on the whole model",
         "no stage has the whole model's inputs and outputs", "register the hook on the submodules, or on the parameters"),
    Code("PC107", "a tensor was made by a call that torch does not show to anybody",
         "it would be a constant of the recording; it was made on another thread, or in code that torch does not look into",
         "make the call where the forward runs, or in a submodule: that one is kept whole"),
    Code("PC108", "the forward itself raises on these inputs",
         "it does so without pipecompile, too", "check that model(*example_args, **example_kwargs) works"),
    Code("PC109", "the inputs cannot be used",
         "the batch is what is cut into micro-batches", "give tensors the same first dimension"),
    Code("PC110", "what a submodule gives cannot be known without running it",
         "it cannot be recorded, and its weights or inputs are on meta, so it cannot be run either",
         "give the model real weights and the example real data, or keep Python's decisions out of the submodule"),
    Code("PC111", "a submodule that cannot be recorded cannot be kept whole either",
         "what it gives could not be foretold: it must be tensors, numbers and containers of them",
         "return tuples, lists or dicts of tensors, as many in every call"),
    Code("PC112", "a part kept whole gave something else than while recording",
         "the model decided in Python on what the part gave then", "compile with an example that is typical of the data"),
    Code("PC113", "the forward reads a gradient, or runs a backward that leaves one",
         "gradients of earlier calls exist only when the model runs",
         "torch.autograd.grad(...) returns gradients instead of leaving them; what must read .grad belongs after the step"),
    Code("PC114", "a call depends on what the call before left on the model",
         "a recording is of one call, and is run for all of them",
         "keep it in a buffer, or in a submodule: that one is kept whole"),
    Code("PC115", "an operator that takes functions, such as flex_attention or torch.cond",
         "torch compiles the functions with the operator, so there are no single calls to record",
         "call it in a submodule: that one is kept whole"),
    Code("PC199", "the forward works, but not while it is recorded",
         "a recording computes on tensors without memory; something in the model does not work on those",
         "do it in a submodule of its own: that one is kept whole; and please report the line"),
)  # fmt: skip

CODES: dict[str, Code] = {entry.name: entry for entry in _TABLE}


def code(name: str) -> Code:
    """The entry of a code."""
    return CODES[name]
