"""Parameters of the loss that are not the model's: the rank with the last stage trains them, and copies of the pipeline add up their gradients.

copy 0    rank 0    rank 1  loss.weight.grad ──┐
copy 1    rank 2    rank 3  loss.weight.grad ──┴── sum of both, as of the parameters of the stage
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.state.function_state import tensors_near
from pipecompile.tracing.user_source import warn

__all__ = ["loss_parameters", "warn_of_untrained"]


def loss_parameters(loss: Callable[..., Any] | None, model: nn.Module) -> list[Any]:
    """Return the trained leaves near a loss that are not parameters of the model."""
    own = set(map(id, model.parameters()))
    near = tensors_near(loss).items()
    return [one for key, one in near if one.requires_grad and one.is_leaf and key not in own]


def warn_of_untrained(loss: Callable[..., Any] | None, model: nn.Module, rank: int) -> None:
    """Warn, on a rank that does not compute the loss, that parameters of the loss stay there as they are. `rank` computes the loss."""
    held = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
    names = {id(one): name for name, one in held.items()}
    if not (own := loss_parameters(loss, model)):
        return
    named = [names[id(one)] for one in own if id(one) in names]
    which = f", such as {named[0]}" if named else ""
    warn(
        f"the loss has parameters of its own{which}: gradients go to those of rank {rank}, which computes the "
        "loss, and on this rank they stay as they are. Try to save them where pipe.needs_targets is True; or parameters of the model",
        RecordingWarning,
    )
