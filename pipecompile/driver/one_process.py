"""The calls of scripts for ranks, as a pipeline in one process answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipecompile.driver.model_methods import ModelMethods

if TYPE_CHECKING:
    from pipecompile.ir.timeline import Timeline

__all__ = ["OneProcess"]


class OneProcess(ModelMethods):
    """The calls of a script that runs in one process and on ranks."""

    @property
    def measured(self) -> Timeline | None:
        """The timeline of the last step; None before the first."""
        return None

    @property
    def needs_inputs(self) -> bool:
        """Whether this process uses the inputs of a batch. A rank that does not may pass zeros of the same shapes."""
        return True

    @property
    def needs_targets(self) -> bool:
        """Whether this process uses the targets of a batch. A rank that does not may pass zeros of the same shapes."""
        return True

    def sum_over_copies(self, values: Any) -> Any:
        """Return numbers, or nested containers of numbers and tensors, summed over the copies of the pipeline: here there is one."""
        return values

    def full_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of the whole model, tensors on the CPU. On ranks, all must call this together."""
        state = self.state_dict()
        return {key: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}

    def gathered(self) -> Timeline | None:
        """Return the timeline of the last step, on ranks that of all ranks; None before the first step."""
        return self.measured
