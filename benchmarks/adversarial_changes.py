"""Changes that the adversarial zoo makes to a model between two steps. A change returns False where the model has nothing to change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

__all__ = ["CHANGES", "chosen"]

Change = Callable[[nn.Module], bool]

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.ReLU6, nn.Hardswish)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OURS = ("p", "drop_prob", "eps", "momentum")
"""Attributes that other changes change."""


def chosen(name: str) -> list[str]:
    """Return the names of all changes in an order that depends on the name of the model alone."""
    names = list(CHANGES)
    random.Random(name).shuffle(names)
    return names


def _of(model: nn.Module, *kinds: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Return parent, name and module of each module of exactly these classes."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in kinds
    ]


def _middle(items: list[Any]) -> Any:
    return items[len(items) // 2] if items else None


def _fresh(layer: nn.Linear) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).to(layer.weight)


def dropout_rate(model: nn.Module) -> bool:
    """Every dropout gets another rate."""
    found = [child for *_, child in _of(model, nn.Dropout, nn.Dropout1d, nn.Dropout2d)]
    for module in found:
        module.p = module.p / 2 + 0.05
    return bool(found)


def freeze(model: nn.Module) -> bool:
    """A part is frozen."""
    part = _middle([child for child in model.children() if any(True for _ in child.parameters())])
    if part is not None:
        part.requires_grad_(requires_grad=False)
    return part is not None and any(p.requires_grad for p in model.parameters())


def freeze_biases(model: nn.Module) -> bool:
    """Biases are frozen, and weights are not."""
    found = [p for name, p in model.named_parameters() if name.endswith("bias")]
    for parameter in found:
        parameter.requires_grad_(not parameter.requires_grad)
    return bool(found)


def new_layer(model: nn.Module) -> bool:
    """A linear layer in the middle is another one."""
    found = _middle(_of(model, nn.Linear))
    if found:
        setattr(found[0], found[1], _fresh(found[2]))
    return bool(found)


def new_head(model: nn.Module) -> bool:
    """The last linear layer is another one."""
    found = _of(model, nn.Linear)
    if found:
        setattr(found[-1][0], found[-1][1], _fresh(found[-1][2]))
    return bool(found)


def adapter(model: nn.Module) -> bool:
    """A linear layer gets a low-rank adapter, and is frozen."""
    found = _middle(_of(model, nn.Linear))
    if found:
        setattr(found[0], found[1], _Adapted(found[2]))
    return bool(found)


class _Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        torch.manual_seed(8)
        self.down = nn.Linear(layer.in_features, 2, bias=False).to(layer.weight)
        self.up = nn.Linear(2, layer.out_features, bias=False).to(layer.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def activation(model: nn.Module) -> bool:
    """Another activation function."""
    found = _middle(_of(model, *_ACTIVATIONS))
    if found:
        setattr(found[0], found[1], nn.Tanh())
    return bool(found)


def _numbers(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn"):
            continue
        for name, value in list(vars(module).items()):
            if type(value) is float and value and name not in _OURS:
                yield module, name, value


def number(model: nn.Module) -> bool:
    """Every number of the modules is annealed."""
    found = list(_numbers(model))
    for module, name, value in found:
        setattr(module, name, value * 0.9)
    return bool(found)


def flag(model: nn.Module) -> bool:
    """A flag of a module is turned."""
    found = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is bool and name != "training" and not name.startswith(("_", "call_super"))
        if not type(module).__module__.startswith("torch.nn")
    ]
    if found:
        module, name = _middle(found)
        setattr(module, name, not getattr(module, name))
    return bool(found)


def setting(model: nn.Module) -> bool:
    """Every number between 0 and 1 of a configuration object changes."""
    config = next((vars(m)["config"] for m in model.modules() if "config" in vars(m)), None)
    values = getattr(config, "__dict__", {})
    found = [name for name, value in values.items() if type(value) is float and 0.01 < value < 1]
    for name in found:
        setattr(config, name, values[name] * 0.5)
    return bool(found)


def epsilon(model: nn.Module) -> bool:
    """Normalisations get another epsilon."""
    found = [child for *_, child in _of(model, *_NORMS)]
    for module in found:
        module.eps = module.eps * 50
    return bool(found)


def norms_fixed(model: nn.Module) -> bool:
    """BatchNorm goes into evaluation mode, the rest stays in training."""
    found = [child for *_, child in _of(model, *_NORMS[2:])]
    for module in found:
        module.eval()
    return bool(found)


def leaf_hook(model: nn.Module) -> bool:
    """A layer gets a hook that changes its output."""
    found = _middle(_of(model, nn.Linear, nn.Conv2d, nn.Conv1d, nn.LayerNorm))
    if found:
        found[2].register_forward_hook(lambda _module, _args, output: output * 1.25)
    return bool(found)


def container_hook(model: nn.Module) -> bool:
    """A container gets a hook that changes its input."""
    found = _middle([m for m in model.modules() if m is not model and any(m.children())])
    if found is not None:
        found.register_forward_pre_hook(_scaled_inputs)
    return found is not None


def _scaled_inputs(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a * 1.25 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def patched_forward(model: nn.Module) -> bool:
    """The forward of one layer is replaced on the object."""
    found = _middle(_of(model, nn.Linear, nn.Conv2d, nn.LayerNorm))
    if found:
        plain = found[2].forward
        found[2].forward = lambda *args: plain(*args) * 0.75
    return bool(found)


def new_parameter(model: nn.Module) -> bool:
    """A weight is another parameter of other values."""
    found = _middle(_of(model, nn.Linear, nn.Conv2d, nn.Conv1d, nn.LayerNorm))
    if found and found[2].weight is not None:
        found[2].weight = nn.Parameter(found[2].weight.detach() * 0.8)
    return bool(found)


def new_data(model: nn.Module) -> bool:
    """Weights get other memory."""
    found = [p for p in model.parameters() if p.is_floating_point()]
    for parameter in found:
        parameter.data = parameter.data * 0.95
    return bool(found)


def new_buffer(model: nn.Module) -> bool:
    """Every floating buffer is another tensor of other values."""
    found = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    for module, name, buffer in found:
        setattr(module, name, buffer * 1.1)
    return bool(found)


def fewer_layers(model: nn.Module) -> bool:
    """The last layer of the longest list is deleted."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if lists:
        del max(lists, key=len)[-1]
    return bool(lists)


def weight_norm(model: nn.Module) -> bool:
    """A linear layer is parametrized."""
    found = _middle(_of(model, nn.Linear))
    if found:
        parametrizations.weight_norm(found[2])
    return bool(found)


CHANGES: dict[str, Change] = {
    change.__name__.replace("_", " "): change
    for change in (
        dropout_rate, freeze, freeze_biases, new_layer, new_head, adapter, activation, number, flag, setting, epsilon, norms_fixed,
        leaf_hook, container_hook, patched_forward, new_parameter, new_data, new_buffer, fewer_layers, weight_norm,
    )
}  # fmt: skip
