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

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipecompile.errors import TraceError
from pipecompile.tracing.inputs import FlatInputs, batch_size, flatten, is_batched, validate_model
from pipecompile.tracing.leaves import is_leaf
from pipecompile.tracing.regions import Ambient, Regions, restored
from pipecompile.tracing.snapshot import untouched
from pipecompile.tracing.source import caller, raiser
from pipecompile.tracing.symbols import BatchSymbol
from pipecompile.tracing.values import Values, storages, tensors_in

__all__ = ["trace"]

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def trace(model: nn.Module, /, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """Record one forward of `model` as a graph that takes and returns what the model does, at any batch size.

    Dimension 0 of every input tensor is the batch. Parameters and submodules of the result *are* the model's own. Nothing
    is computed and nothing of the model changes. The mode (train or eval) is the model's at this moment.

    Raises InputError for inputs whose batch sizes disagree, and TraceError, naming the user's line, when the model
    cannot be recorded: above all when Python decides on the *value* of a tensor.
    """
    model = validate_model(model)
    inputs = flatten(model.forward, args, kwargs)
    recorder = _Recorder(model, BatchSymbol(batch_size(inputs) or 2))
    with untouched(model), restored():
        return recorder.record(inputs)


class _Recorder(TorchFunctionMode):
    """One recording. Calls are written down only on this thread, and not from inside a call that is kept whole."""

    def __init__(self, model: nn.Module, symbol: BatchSymbol) -> None:
        super().__init__()
        self.model, self.symbol, self.graph = model, symbol, fx.Graph()
        self.values = Values(self.graph, symbol)
        self.regions = Regions(self.graph, Ambient.now())
        self.names = {id(module): name for name, module in model.named_modules()}
        self.path: list[str] = [""]
        self.whole = False
        self.thread = get_ident()

    # -- one recording, from top to bottom ------------------------------------------------------------------------

    def record(self, inputs: FlatInputs) -> fx.GraphModule:
        fake = FakeTensorMode(shape_env=self.symbol.env, allow_non_fake_inputs=True)
        self.values.own(self.model, fake)
        leaves = [self._placeholder(name, leaf, fake) for name, leaf in zip(inputs.names, inputs.leaves, strict=True)]
        batched = [node for node in self.graph.nodes if is_batched(node.meta["val"])]
        self.symbol.open(self.graph, batched[0] if batched else None)
        args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
        try:
            with ExitStack() as stack:
                for context in (fake, enable_python_dispatcher(), _intercepted(self), self):
                    stack.enter_context(context)
                output = self.model(*args, **kwargs)
        except _DATA_DEPENDENT as error:
            raise _data_dependent(error) from error
        except Exception as error:
            raise _failed(error, self.model) from error
        return self._finish(inputs, output)

    def _placeholder(self, name: str, leaf: Any, fake: FakeTensorMode) -> Any:
        node = self.graph.placeholder(name)
        twin = self._twin(leaf, fake) if isinstance(leaf, torch.Tensor) else leaf
        held = [twin] if isinstance(twin, torch.Tensor) else []
        node.meta.update(val=twin, module="", source="", storages=storages(held), mutates=frozenset())
        if held:
            self.values.bind(twin, node)
        return twin

    def _twin(self, leaf: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        """A fake tensor like `leaf`, its batch size the symbol, on `meta` when the model lives there."""
        first = next(self.model.parameters(), leaf)
        device = first.device if first.device.type == "meta" else leaf.device
        shape = (self.symbol.size, *leaf.shape[1:]) if is_batched(leaf) else leaf.shape
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        with fake:
            twin = torch.empty(shape, dtype=leaf.dtype, device=device, memory_format=layout)
        return twin.requires_grad_() if leaf.requires_grad else twin

    def _finish(self, inputs: FlatInputs, output: Any) -> fx.GraphModule:
        flat, spec = pytree.tree_flatten(output)
        self.regions.close()
        result = self.graph.output(tuple(self._result(leaf) for leaf in flat))
        result.meta.update(val=tuple(flat), module="", source="")
        self._drop_unused_items()
        arguments = list(inputs.arguments)
        self.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(arguments, inputs.spec, spec)))
        module = fx.GraphModule(self.values.roots, self.graph, type(self.model).__name__)
        module.training = self.model.training
        module.meta.update(guards=self.symbol.guards(), in_spec=inputs.spec, out_spec=spec, outside=self.regions.outside,
                           symbol=self.symbol.symbol, names=inputs.names)  # fmt: skip
        return module

    def _result(self, leaf: Any) -> Any:
        """An output leaf; an input or a parameter that is returned as it is gets a node of its own, so a stage makes it."""
        node = self.values.argument(leaf)
        if not isinstance(node, fx.Node) or node.op not in ("placeholder", "get_attr"):
            return node
        alias = self.graph.call_method("view_as", (node, node))
        alias.meta.update(node.meta, ambient=self.regions.outside)
        return alias

    def _drop_unused_items(self) -> None:
        for node in reversed(self.graph.nodes):
            scalar = node.meta.get("scalar", False)
            if not node.users and (node.target is operator.getitem or node.op == "get_attr" or scalar):
                self.graph.erase_node(node)

    # -- what is written down -------------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        return not self.whole and get_ident() == self.thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.listening:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            with self:
                return iter(torch.unbind(args[0]))
        return self.call(func, args, kwargs, lambda: _target(func, args))

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, target: Callable[[], tuple[str, Any, Any]]) -> Any:
        """Make the call, and write it down if tensors came out of it or were changed by it."""
        given = tensors_in((args, kwargs))
        versions = [t._version for t in given if not t.is_inference()]
        ambient = Ambient.now()
        assumed = len(self.symbol.env.guards)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.symbol.forget(assumed)
        changed = [t for t, version in zip(given, versions, strict=False) if t._version != version]
        if changed or tensors_in(result):
            self._write(target(), kwargs, result, changed, ambient)
        return result

    def _write(self, target: tuple[str, Any, Any], kwargs: Any, result: Any, changed: list[Any], ambient: Ambient) -> None:
        op, function, args = target
        arguments, keywords = self.values.argument(tuple(args)), self.values.argument(dict(kwargs))
        self.regions.enter(ambient)
        node = self.graph.create_node(op, function, arguments, keywords, name=self._name(op, function))
        held = tensors_in(result)
        node.meta.update(val=result, module=self.path[-1], source=caller(), ambient=ambient, storages=storages(held), mutates=storages(changed))
        self.values.bind_result(result, node)

    def _name(self, op: str, function: Any) -> str:
        word = function if isinstance(function, str) else getattr(function, "__name__", "call")
        prefix = "" if op == "call_module" else self.path[-1]
        return f"{prefix}.{word.strip('_')}".strip(".").replace(".", "_")

    # -- modules and autograd functions ---------------------------------------------------------------------------

    def module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """`Module.__call__` while recording: a leaf is one node, any other module is run through."""
        name = self.names.get(id(module), "")
        if name and is_leaf(module):
            self.values.roots[name] = module
            with self.kept_whole():
                return self.call(lambda *a, **k: original(module, *a, **k), args, kwargs, lambda: ("call_module", name, args))
        self.path.append(name or self.path[-1])
        try:
            return original(module, *args, **kwargs)
        finally:
            self.path.pop()

    def function(self, original: Callable[..., Any], cls: type, args: Any, kwargs: Any) -> Any:
        """`Function.apply` while recording: one opaque node."""
        with self.kept_whole():
            return self.call(original, args, kwargs, lambda: ("call_function", _opaque(cls), args))

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        self.whole = True
        try:
            yield
        finally:
            self.whole = False


@contextmanager
def _intercepted(recorder: _Recorder) -> Iterator[None]:
    """Route `Module.__call__` and `Function.apply` through the recorder; other threads pass straight on."""
    module_call, function_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.listening:
            return recorder.module(module_call, module, args, kwargs)
        return module_call(module, *args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = function_apply.__get__(None, cls)
        return recorder.function(original, cls, args, kwargs) if recorder.listening else original(*args, **kwargs)

    nn.Module.__call__, torch.autograd.Function.apply = call, classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__call__, torch.autograd.Function.apply = module_call, function_apply  # type: ignore[method-assign]


def _opaque(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as a function that fx can name."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__, apply.__module__ = f"{cls.__name__}_apply", cls.__module__
    return apply


_OPERATORS = {
    f"__{name}__": getattr(operator, name)
    for name in "add sub mul truediv floordiv mod pow matmul neg invert getitem setitem eq ne lt le gt ge abs".split()
} | {f"__{name}__": getattr(operator, name) for name in "iadd isub imul itruediv ifloordiv imod ipow".split()}
_OPERATORS |= {"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor}


def _target(func: Any, args: Any) -> tuple[str, Any, Any]:
    """How fx writes a call: operators and getattr as functions, Tensor methods by name, the rest as it is."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
        return "call_function", getattr if name == "__get__" else setattr, (args[0], attribute, *args[1:])[: 2 + (name == "__set__")]
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    if getattr(torch.Tensor, name, None) == func:
        return "call_method", name, args
    return "call_function", func, args


def _data_dependent(error: Exception) -> TraceError:
    return TraceError(
        "cannot trace: Python needs the value of a tensor",
        where=raiser(error),
        why="the model decides in Python (if, while, int(), .item(), nonzero) on numbers that exist only when it runs",
        hint="torch.where or masks instead of the branch, or move the decision out of forward",
    )


def _failed(error: Exception, model: nn.Module) -> TraceError:
    return TraceError(
        f"cannot trace: the forward of {type(model).__name__} raised {type(error).__name__}: {error}",
        where=raiser(error),
        why="forward is run once on the shapes and dtypes of example_args",
        hint="check that model(*example_args, **example_kwargs) works",
    )
