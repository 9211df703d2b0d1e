"""The routes of a training step: the routes of a plan with the target and the loss added, ending in the last stage.

route of the plan             route of the step, 3 stages
──────────────────────        ───────────────────────────────────
input: host -> 0              input: host -> 0
h:     0 -> 1                 h:     0 -> 1
y:     1 -> 2 host            y:     1 -> 2
z:     2 -> host              (none: the loss is computed where z is)
                              @target: host -> 2, no gradient
                              @loss:   2 -> host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipecompile.ir.routes import AUX, HOST, LOSS, TARGET, Route

__all__ = ["training_routes"]


def training_routes(
    routes: Sequence[Route], n_stages: int, with_target: bool, has_aux: bool = False
) -> tuple[Route, ...]:
    """Return the routes of a training step for the `routes` of a plan with `n_stages` stages.

    The last stage computes the loss. Outputs of the model therefore go to the last stage instead of the host. The
    target comes from the host; the loss, and with `has_aux` the auxiliary output, go to the host. The gradient of the
    loss, which is the weight of the micro-batch, comes from the host.
    """
    last = n_stages - 1
    result = []
    for route in routes:
        ends = {last if end == HOST else end for end in route.consumers} - {route.source}
        if ends:
            result.append(replace(route, consumers=tuple(sorted(ends))))
    if with_target:
        result.append(Route(TARGET, HOST, (last,), gradient=False))
    if has_aux:
        result.append(Route(AUX, last, (HOST,), gradient=False))
    return (*result, Route(LOSS, last, (HOST,)))
