"""The state dict of a model whose tensors live on several ranks: the part of each rank, and the whole. Keys are the model's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipecompile.distributed.agreement.extra_state import extra_state_keys
from pipecompile.distributed.communicator import Communicator
from pipecompile.torch_private.dtensors import whole_of
from pipecompile.torch_private.modules import copy_metadata

__all__ = ["RankState"]


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of `model` as one rank has it.

    `owner` returns the pipeline device on which a tensor lives, or None if no tensor has been placed yet: then every rank has all.
    `runner` returns the one that runs a module, by its name, on which its extra state lives; device 0 before there is one. There live
    other entries that are not tensors.
    """

    model: nn.Module
    owner: Callable[[torch.Tensor], int | None]
    communicator: Communicator
    runner: Callable[[str], int] = lambda _: 0

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lives on this rank."""
        return self.owner(tensor) in (self.communicator.ranks.index, None)

    def keys(self) -> set[str]:
        """Return the keys of `state_dict` that live on this rank."""
        return self._own(self.model.state_dict(keep_vars=True))

    def _own(self, state: Mapping[str, Any]) -> set[str]:
        here, owners = self.communicator.ranks.index, self._owners(state)
        return {key for key, owner in owners.items() if owner in (here, None)}

    def _owners(self, state: Mapping[str, Any]) -> dict[str, int | None]:
        """Return the pipeline device on which each entry of the model's state lives; None for a tensor that all ranks have."""
        extra = extra_state_keys(self.model)

        def owner(key: str, value: Any) -> int | None:
            if key in extra:
                return self.runner(extra[key])
            return self.owner(value) if isinstance(value, torch.Tensor) else 0

        return {key: owner(key, value) for key, value in state.items()}

    def own(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the entries that live on this rank. Those of other ranks are not read: a thread may call this beside a step."""
        state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        own = self._own(state)
        for key in [key for key in state if key not in own]:
            del state[key]
        if not keep_vars:
            extra = extra_state_keys(self.model)
            tensors = [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and k not in extra]
            state.update((key, tensor.detach()) for key, tensor in tensors)
        return state

    def full(self) -> dict[str, Any]:
        """Return all entries on every rank, tensors on the CPU. All ranks of the pipeline must call this together."""
        here, communicator = self.communicator.ranks.index, self.communicator
        others = [peer for peer in range(communicator.ranks.size) if peer != here]
        communicator.connect()
        state: dict[str, Any] = {}
        values = self.model.state_dict(keep_vars=True)
        owners = self._owners(values)
        for key, value in values.items():
            if (owner := owners[key] or 0) != here:
                state[key] = communicator.receive(owner, key, once=True)
                continue
            state[key] = whole_of(value.detach()).cpu().clone() if isinstance(value, torch.Tensor) else value
            for peer in others:
                communicator.send(peer, key, state[key], once=True)
        communicator.flush()
        return state

    def load(self, state: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
        """Load the entries that live on this rank and return the result of `load_state_dict`. A tensor of another rank that is not trained
        gets the values of its entry, too: the loss may read it. So does extra state, which a forward may read when it is recorded.

        Raises RuntimeError, if `strict`, for a key of this rank that is missing and for a key that the model does not have.
        """
        values = self.model.state_dict(keep_vars=True)
        own = self._own(values)
        elsewhere = values.keys() - own - extra_state_keys(self.model).keys()
        entries = OrderedDict((key, value) for key, value in state.items() if key not in elsewhere)
        copy_metadata(state, entries)
        result = self.model.load_state_dict(entries, strict=False, assign=assign)
        self._load_untrained({key: state[key] for key in elsewhere & state.keys()})
        missing = [key for key in result.missing_keys if key in own]
        if strict and (missing or result.unexpected_keys):
            rank = self.communicator.rank
            raise RuntimeError(f"state_dict of rank {rank}: missing {missing}, unexpected {result.unexpected_keys}")
        return result

    @torch.no_grad()
    def _load_untrained(self, state: Mapping[str, Any]) -> None:
        tensors = self.model.state_dict(keep_vars=True)
        for key, value in state.items():
            tensor = tensors[key]
            if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or tensor.is_meta:
                continue
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:  # else its own rank says so
                tensor.copy_(value)
