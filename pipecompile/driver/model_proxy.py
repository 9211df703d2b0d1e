"""A module that acts as another: same parameters under the same names, same state_dict, same modes.

The model stays the owner of everything. It is not registered as a submodule, so no key gets a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import nn

from pipecompile.batching.transformed_inputs import refuse_compile
from pipecompile.driver.model_methods import overrides
from pipecompile.driver.one_process import OneProcess
from pipecompile.errors import InputError
from pipecompile.parameters.optimizer_state import load_optimizer_state, optimizer_state_of
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.device_functions import requested_device
from pipecompile.torch_private.modules import apply_to_tensors

__all__ = ["ModelProxy", "check_norms"]


def _hook_of_model(name: str) -> Any:
    """Return a method that registers a hook on the model, where `step` and calls run it alike, and where its state is."""

    def register(self: ModelProxy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, name)(*args, **kwargs)

    register.__name__ = name
    register.__doc__ = getattr(nn.Module, name).__doc__
    return register


class ModelProxy(OneProcess):
    """Forwards all that nn.Module does with parameters, buffers and modes to `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` alone: hooks of this object are the model's, and a hook of all modules runs for the model, not once more here."""
        return self.forward(*args, **kwargs)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode. Setting it sets that of the model alone, not of its layers, as in nn.Module."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if (model := self.__dict__.get("model")) is not None:  # nn.Module sets it before there is a model
            model.training = mode

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model that this object lacks: `pipe.config`, `pipe.generate`, `pipe.fc`."""
        if "model" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        try:
            value = getattr(self.model, name)
        except AttributeError:
            if hasattr(type(self.model), name):  # a property of the model says why
                raise
            text = (
                f"neither {type(self).__name__} nor its model, {type(self.model).__name__}, has the attribute {name!r}"
            )
            raise AttributeError(text, name=name, obj=self) from None
        return self._of_model(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, if the model has it and this object does not. A new layer is the model's as well."""
        model, is_own = self.__dict__.get("model"), name in self.__dict__ or hasattr(type(self), name)
        if model is None or is_own or name.startswith("_"):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module | nn.Parameter) or hasattr(model, name):
            self._of_model(name, value)
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of this object, or else of the model."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the model."""
        self._of_model(name, tensor)
        self.model.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the model."""
        self._of_model(name, param)
        self.model.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register a layer of the model."""
        self._of_model(name, module)
        self.model.add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """Register a layer of the model, as `add_module` does."""
        self._of_model(name, module)
        self.model.register_module(name, module)

    def set_submodule(self, target: str, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Replace a layer of the model by its dotted name."""
        self._of_model(target, module)
        self.model.set_submodule(target, module, *args, **kwargs)

    register_forward_pre_hook = _hook_of_model("register_forward_pre_hook")
    register_forward_hook = _hook_of_model("register_forward_hook")
    register_full_backward_pre_hook = _hook_of_model("register_full_backward_pre_hook")
    register_full_backward_hook = _hook_of_model("register_full_backward_hook")
    register_backward_hook = _hook_of_model("register_backward_hook")
    register_state_dict_pre_hook = _hook_of_model("register_state_dict_pre_hook")
    register_state_dict_post_hook = _hook_of_model("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _hook_of_model("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _hook_of_model("register_load_state_dict_post_hook")

    def _of_model(self, _: str, value: Any) -> Any:
        """Return the value of an attribute of the model. Raise AttributeError if a pipeline of this kind cannot pass it on."""
        return value

    def _place_names(self) -> str:
        """Return where the stages are, for the message that refuses to move them."""
        return ""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            self._forget()
        return result

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, _: Any, __: Any, missing_keys: list[str], *___: Any
    ) -> None:
        """Load the entries of this module out of the state of a module around it, such as `AveragedModel`."""
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        missing, here = self.load_state_dict(own, strict=False).missing_keys, self.state_dict()
        missing_keys += [f"{prefix}{key}" for key in missing if key in here]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_children()

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.model.apply(fn)
        return self

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: an option of `pipecompile.compile` compiles each stage."""
        refuse_compile("compile() of a pipeline, which torch would record")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype. Raises InputError for another device, since the plan places the stages."""
        with suppress(TypeError) if overrides(self.model, "to") else nullcontext():  # it may take other arguments
            self._check_device(requested_device(*args, **kwargs))
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Self:
        """Raise InputError unless everything is there: the plan places the stages."""
        self._check_device(torch.device("cuda") if device is None else torch.device("cuda", torch.device(device).index))
        return super().cuda(device) if overrides(self.model, "cuda") else self

    def cpu(self) -> Self:
        """Raise InputError unless everything is there: the plan places the stages."""
        self._check_device(torch.device("cpu"))
        return super().cpu() if overrides(self.model, "cpu") else self

    def _check_device(self, device: torch.device | None) -> None:
        """Raise InputError if a tensor is not on `device`. The type alone stands for the current device of that type."""
        if device is not None and any(not _is_on(tensor, device) for tensor in _tensors(self.model)):
            self._refuse()

    def _refuse(self) -> None:
        hint = 'pc.compile(model, n_stages, devices=["cuda:0", "cuda:1"])'
        raise InputError("a pipeline cannot be moved to a device", where=self._place_names(), hint=hint)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Apply a function to all tensors, as `half` and a parent's `to` do. Raises InputError before if it moves them."""
        if any(_moves(fn, tensor) for tensor in _tensors(self.model)):
            self._refuse()
        is_changed = False

        def noting(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_changed
            result = fn(tensor)
            is_changed = is_changed or result is not tensor
            return result

        apply_to_tensors(self.model, noting, recurse)
        if is_changed:
            self._forget()
        return self

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip gradients as `torch.nn.utils.clip_grad_norm_` does, whatever their devices. Return the norm before clipping.

        `max_norm` is in the unit of the gradients; `norm_type` is the order p of the norm, a number without a unit.
        """
        check_norms(max_norm, norm_type, error_if_nonfinite)
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for the steps of an accumulation but the last, as `DistributedDataParallel` has it.

        Copies of the pipeline do not sum gradients in it: the next step outside of it sums those of all. Until then `.grad` is not
        a number (NaN). Without copies the context changes nothing.
        """
        return nullcontext()

    # -- the optimizer's state --------------------------------------------------------------------------------------

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer of these parameters, by parameter names.

        The format is that of PyTorch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict`. On ranks, the state has
        the parameters that live on this rank.
        """
        return optimizer_state_of(dict(self.named_parameters()), optimizer, self._elsewhere())

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load the part of such a state that belongs to these parameters. The state may come from any other layout."""
        load_optimizer_state(dict(self.named_parameters()), optimizer, state_dict, self._elsewhere())

    def _elsewhere(self) -> list[nn.Parameter]:
        """Return the parameters of the model that are none of these: they live on other ranks."""
        return []


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    if is_accelerator(device) and device.index is None and tensor.device.type == device.type:
        return tensor.device.index == torch.accelerator.current_device_index()
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _moves(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return whether a function moves the tensor to another device, tried on an empty one. A tensor on meta has no place yet."""
    if tensor.is_meta:
        return False
    with torch.no_grad():
        try:
            result = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        except (RuntimeError, ValueError, IndexError):  # not for an empty tensor: `to` and the like are
            return False
    return isinstance(result, torch.Tensor) and result.device != tensor.device


def check_norms(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> None:
    """Raise InputError for an argument of `clip_grad_norm_` that torch cannot use."""
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            float(value)
        except Exception:
            raise InputError(f"{name}={shown(value)} is not a number", hint=f"{name}=1.0") from None
    if not isinstance(error_if_nonfinite, bool):
        hint = "error_if_nonfinite=True"
        raise InputError(f"error_if_nonfinite={shown(error_if_nonfinite)} is not True or False", hint=hint)
