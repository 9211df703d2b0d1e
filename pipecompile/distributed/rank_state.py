"""The state of a model whose tensors live on several ranks: the part of each, and the whole. Keys are the model's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipecompile.torch_private.dtensors import whole_of
from pipecompile.torch_private.modules import copy_metadata

if TYPE_CHECKING:
    from pipecompile.distributed.rank_pipeline import RankPipeline

__all__ = ["full_state", "load_own", "own_state"]


def own_state(pipe: RankPipeline, state: Mapping[str, Any]) -> Any:
    """Of the model's state what lives on this rank; what is no tensor lives on the first."""
    own = own_keys(pipe)
    for key in [key for key in state if key not in own]:
        del state[key]  # type: ignore[attr-defined]
    return state


def own_keys(pipe: RankPipeline) -> set[str]:
    """The keys of `state_dict` that this rank has."""
    kept = pipe.model.state_dict(keep_vars=True)
    first = pipe.ranks.index == 0
    return {key for key, value in kept.items() if (pipe.is_here(value) if isinstance(value, torch.Tensor) else first)}


def full_state(pipe: RankPipeline) -> dict[str, Any]:
    """Every value from the rank it lives on. Each rank of a pipeline sends what it has to all others."""
    kept, here = pipe.model.state_dict(keep_vars=True), pipe.ranks.index
    owners = {key: pipe.builds.owner(value) if isinstance(value, torch.Tensor) else 0 for key, value in kept.items()}
    others = [peer for peer in range(pipe.ranks.size) if peer != here]
    pipe.communicator.connect()
    found: dict[str, Any] = {}
    for key, owner in owners.items():
        if owner == here:
            value = kept[key]
            found[key] = whole_of(value.detach()).cpu().clone() if isinstance(value, torch.Tensor) else value
            for peer in others:
                pipe.communicator.send(peer, key, found[key], once=True)
        else:
            found[key] = pipe.communicator.take(owner, key, once=True)
    pipe.communicator.flush()
    return found


def load_own(pipe: RankPipeline, state: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
    """Load what is given and lives here; with `strict`, all that lives here must be there, and nothing that the model has not."""
    own = own_keys(pipe)
    elsewhere = pipe.model.state_dict(keep_vars=True).keys() - own
    given = OrderedDict((key, value) for key, value in state.items() if key not in elsewhere)
    copy_metadata(state, given)
    result = pipe.model.load_state_dict(given, strict=False, assign=assign)
    missing = [key for key in result.missing_keys if key in own]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"state_dict of rank {pipe.communicator.rank}: missing {missing}, unexpected {result.unexpected_keys}"
        )
    return result
