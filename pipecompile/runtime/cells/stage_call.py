"""The layers of a stage where its code finds them at once.

    stage.module.forward    self.layer ─► nn.Module.__getattr__ ─► layer     layer(x) ─► any hooks? ─► layer.forward(x)
    the same code, here     self.layer ──────────────────────────────────────────────► layer.forward(x)

The code that was generated for a stage runs with another `self`. Children are plain attributes of it, which Python looks for first,
and before every run each layer is asked whether it has hooks: one that has none is called by its forward. For small layers that
is a fifth of their time. All else is the stage module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import fx, nn

from pipecompile.torch_private.modules import has_any_global_hook, is_compiled, is_hooked

__all__ = ["StageCode"]


@dataclass(frozen=True, slots=True)
class StageCode:
    """What computes a stage. `look()` comes before every run; of `layers` it knows where they are held, their names and themselves."""

    run: Callable[..., Any]
    layers: tuple[tuple[dict[str, Any], str, nn.Module], ...] = ()

    @classmethod
    def of(cls, stage: fx.GraphModule) -> StageCode:
        """The code of a stage that is not rewritten any more."""
        nodes = [node for node in stage.graph.nodes if node.op in ("call_module", "get_attr")]
        called = {str(node.target) for node in nodes if node.op == "call_module"}
        entered = {around for node in nodes for around in _around(str(node.target))}
        layers: list[tuple[dict[str, Any], str, nn.Module]] = []
        children = _within_reach(stage, "", called - entered, layers)
        return cls(MethodType(type(stage).forward, children), tuple(layers))

    def look(self) -> None:
        """Call layers by their forward from now on, but those with hooks."""
        is_watched = has_any_global_hook()
        for attributes, name, layer in self.layers:
            is_plain = not (is_watched or is_hooked(layer) or is_compiled(layer))
            attributes[name] = layer.forward if is_plain else layer


def _around(target: str) -> Iterator[str]:
    """The modules that are passed on the way: of `a.b.c` these are `a` and `a.b`."""
    return (target[:place] for place, letter in enumerate(target) if letter == ".")


def _within_reach(
    module: nn.Module, path: str, called: set[str], layers: list[tuple[dict[str, Any], str, nn.Module]]
) -> _Children:
    """The children of the stage, or of an empty module that leads to others."""
    children = _Children(module)
    for name, child in module.named_children():
        is_empty = type(child) is nn.Module
        children.__dict__[name] = _within_reach(child, f"{path}{name}.", called, layers) if is_empty else child
        if path + name in called and type(child).__call__ is nn.Module.__call__:
            layers.append((children.__dict__, name, child))
    return children


class _Children:
    """Stands for a module; what is not put into it is that module's."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["(module)"] = module  # no name that a child can have

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["(module)"], name)
