"""Scripts of ranks that go on after an error, or differ in what they compile or change: what each rank says, as JSON.

python tests/distributed/rank_scripts.py FOLDER NAME ... prints a list per script: per rank its error, or its result.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh

import pipecompile as pc
from tests.distributed.changed_layers import changed_layers
from tests.distributed.faults import warm
from tests.distributed.lanes import in_lanes
from tests.distributed.mistakes import TIMEOUT, batches, compiled, error_of, of, square
from tests.distributed.read_values import read_otherwise
from tests.distributed.siblings import beside_siblings
from tests.distributed.updated_weights import of_copies, of_ranks

SHORT = 5.0
"""Timeout, in seconds, of scripts in which a rank is awaited for that long."""


class Scaled(nn.Module):
    """A layer times a number, with the number of its calls as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.calls = nn.Linear(4, 4), 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "factor": self.factor}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.factor = state["calls"], state["factor"]


def scaled() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Tanh(), Scaled())


def pinned(model: nn.Module) -> Any:
    """Return a pipeline with the first layer on rank 0 and the last on rank 1."""
    example = (batches(1)[0][0],)
    return pc.compile(
        model, 2, loss_fn=square, n_microbatches=2, cost="analytic", pin={"0": 0, "2": 1}, example_args=example
    )


def loss_of(pipe: Any, part: int = 0, held: list[weakref.ref[Any]] | None = None) -> Any:
    """Return the loss of a step, or its error. Append the batch to what may be `held`."""
    x, y = batches(2)
    if held is not None:
        held.append(weakref.ref(x))
    try:
        return round(pipe.step(x[part], target=y[part]).item(), 6)
    except (pc.PipecompileError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def fail(pipe: Any, *, is_here: bool, part: int = 0, held: list[weakref.ref[Any]] | None = None) -> Any:
    """Return the error of a step in which the last layer of a rank raises."""

    def raising(*_: Any) -> None:
        raise ValueError("the data are wrong")

    hook = pipe.model[2].register_forward_pre_hook(raising) if is_here else None
    said = loss_of(pipe, part, held)
    if hook is not None:
        hook.remove()
    return said


def after_a_failure(rank: int) -> Any:
    """Compile and step again on a mesh whose pipeline has failed on one rank of one copy; send in the mesh's own group in between."""
    mesh, part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), rank // 2
    pipe = compiled(mesh=mesh)
    first = loss_of(pipe, part)
    error = fail(pipe, is_here=rank == 3, part=part)
    dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
    again = compiled(mesh=mesh)
    return [
        first,
        error.splitlines()[0],
        loss_of(again, part),
        loss_of(again, part),
        loss_of(pipe, part).splitlines()[0],
    ]


def beside_a_failure(rank: int) -> Any:
    """Step with a pipeline that stood still while another one of the same ranks failed; count what the error keeps of the call."""
    other, pipe = compiled(), compiled()
    loss_of(other)
    first, held = loss_of(pipe), list[weakref.ref[Any]]()
    gc.disable()
    error = fail(other, is_here=rank == 1, held=held)
    n_held = sum(batch() is not None for batch in held)
    gc.enable()
    return [first, error.splitlines()[0], n_held, loss_of(pipe), loss_of(pipe), len(pipe.full_state_dict())]


def not_finite(rank: int) -> Any:
    """Go on after a norm that is not finite, which all ranks are told."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0] * torch.inf, target=y[0])
    try:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return [str(error), loss_of(pipe)]
    return rank


def other_norm(rank: int) -> Any:
    """Clip to other norms, and go on."""
    pipe = compiled()
    first = loss_of(pipe)
    return [first, error_of(lambda: pipe.clip_grad_norm_(1.0 + rank)), loss_of(pipe)]


def clipped_copy(rank: int, **options: Any) -> Any:
    """Clip on one copy alone, or on each to another norm, and go on."""
    pipe = compiled(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))
    loss_of(pipe, rank // 2)
    said = "" if rank > 1 and not options else error_of(lambda: pipe.clip_grad_norm_(**options or {"max_norm": 1.0}))
    return [said, loss_of(pipe, rank // 2)]


def beside_a_copy(change: Callable[[Any], object]) -> Callable[[int], Any]:
    """Return a script: the second copy steps after a change of its own, whose inverse it may return; then both step."""

    def run(rank: int) -> Any:
        pipe = compiled(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))
        first = loss_of(pipe, rank // 2)
        back = change(pipe) if rank > 1 else None
        error = loss_of(pipe, rank // 2)
        if callable(back):
            back()
        return [error, loss_of(pipe, rank // 2) == first]

    return run


def frozen(pipe: Any) -> None:
    next(pipe.parameters()).requires_grad_(False)


def other_layers(rank: int) -> Any:
    """Step with a layer frozen in each copy, another one of the same stage and of the same shape."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)), batches(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = pc.compile(
        model,
        2,
        mesh=mesh,
        loss_fn=square,
        n_microbatches=2,
        cost="analytic",
        pin={"0": 0, "1": 1},
        example_args=(x[0, :4],),
    )
    cast(nn.Sequential, model[0])[1 - rank // 2].requires_grad_(False)
    return error_of(lambda: pipe.step(x[0, :4], target=y[0, :4]))


def failed_load(rank: int) -> Any:
    """Go on after a state that one rank alone could not load."""
    pipe = compiled()
    loss_of(pipe)
    state = pipe.full_state_dict()
    if rank == 1:
        del state["2.weight"]
    said = ""
    try:
        pipe.load_state_dict(state)
    except RuntimeError as error:
        said = str(error)
    return [said, loss_of(pipe)]


def with_option(name: str, *values: Any) -> Callable[[int], Any]:
    return lambda rank: loss_of(compiled(**{name: values[rank]}))


def rescheduled(rank: int) -> Any:
    pipe = compiled()
    first = loss_of(pipe)
    if rank == 1:
        pipe.reschedule("gpipe")
    error = loss_of(pipe)
    pipe.reschedule("gpipe")
    return [first, error, loss_of(pipe)]


def loaded_on_one(rank: int) -> Any:
    """Load a state on one rank alone, then on the other, too."""
    pipe = compiled()
    first, state = loss_of(pipe), {key: value * 2 for key, value in pipe.full_state_dict().items()}
    if rank == 0:
        pipe.load_state_dict(state)
    error = loss_of(pipe)
    if rank == 1:
        pipe.load_state_dict(state)
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    eager.load_state_dict(state)
    x, y = batches(2)
    again = loss_of(pipe)
    return [first, error, again if abs(again - square(eager(x[0]), y[0]).item()) > 1e-5 else first]


def changed(change: Callable[[Any], object], who: int = 1) -> Callable[[int], Any]:
    """Return a script: one rank changes the model after a step, then all do."""

    def run(rank: int) -> Any:
        model = scaled()
        pipe = pinned(model)
        first = loss_of(pipe)
        if rank == who:
            change(model)
        alone = [loss_of(pipe), loss_of(pipe)]
        if rank != who:
            change(model)
        return [first, *alone, loss_of(pipe)]

    return run


def extra_state(_: int) -> Any:
    """Return extra state after two steps, of all ranks and of this one; then load that of this rank, and of all."""
    model = scaled()
    pipe = pinned(model)
    for _step in range(2):
        loss_of(pipe)
    whole, own = pipe.full_state_dict(), pipe.state_dict()
    extra = [{key: value["calls"] for key, value in one.items() if "extra" in key} for one in (whole, own)]
    own |= {key: {"calls": 40, "factor": 3.0} for key in own if key == "2._extra_state"}
    pipe.load_state_dict(own)
    part = [loss_of(pipe), pipe.full_state_dict()["2._extra_state"]]
    pipe.load_state_dict(whole | {"2._extra_state": {"calls": 7, "factor": 1.0}})
    return [*extra, part, loss_of(pipe), [model[0].calls, model[2].calls]]


def compiled_once_more(rank: int) -> Any:
    pipe = compiled()
    loss_of(pipe)
    return loss_of(compiled() if rank == 1 else pipe)


def compiled_on_one(rank: int) -> Any:
    if rank == 1:
        time.sleep(SHORT + 3)
        return "slept"
    return loss_of(compiled())


def _raise() -> None:
    raise ValueError("bad record 7")


def thread_ended(rank: int) -> Any:
    """Let a thread of rank 1 end by an exception, so that its script waits for it."""
    pipe = compiled()
    loss_of(pipe)
    if rank == 1:
        thread = Thread(target=_raise, name="loader")
        thread.start()
        thread.join()
        time.sleep(SHORT + 3)
    return loss_of(pipe)


def crossed(rank: int) -> Any:
    """Step two pipelines in another order on each rank."""
    pipes = [compiled(example_args=(batches(1)[0][0],)) for _ in range(2)]
    return [loss_of(pipe) for pipe in (pipes if rank == 0 else pipes[::-1])]


def other_seeds(rank: int, part: int | None = None) -> Any:
    """Build the model with another seed on each rank, or on each copy; return the loss and what was warned of."""
    mesh = None if part is None else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(rank if part is None else part)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pc.compile(model, 2, loss_fn=square, n_microbatches=2, cost="analytic", mesh=mesh)
        loss = loss_of(pipe, part or 0)
        copied = loss_of(copy.deepcopy(pipe), part or 0)
    return loss == copied, [str(each.message) for each in caught if "begin with" in str(each.message)]


def read_beside_steps(_: int) -> Any:
    """Read the state of this rank in a thread while steps run."""
    pipe, said, is_over = compiled(), list[str](), Event()
    loss_of(pipe)

    def read() -> None:
        while not is_over.is_set():
            said.append(error_of(lambda: [value.norm().item() for value in pipe.state_dict().values()] and "read"))

    thread = Thread(target=read)
    thread.start()
    losses = {loss_of(pipe) for _ in range(100)}
    is_over.set()
    thread.join()
    return len(losses), sorted(set(said))


def evaluated_beside_steps(_: int) -> Any:
    """Evaluate in a thread; the steps of the main thread, which begin within the evaluation, wait for its end."""
    pipe, said, has_begun = compiled(), list[str](), Event()
    x, y = batches(2)
    first = loss_of(pipe)

    def slow_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for place in (0, 1):
            yield x[place], y[place]
            has_begun.set()
            time.sleep(0.2)

    thread = Thread(target=lambda: said.append(error_of(lambda: pipe.evaluate(slow_batches()).samples)))
    thread.start()
    has_begun.wait()
    losses = [loss_of(pipe), loss_of(pipe)]
    thread.join()
    return losses == [first] * 2, said


def other_default_device(rank: int) -> Any:
    """Train and sum where new tensors are on "meta" by default, as they are on a GPU in many scripts; return what differs."""
    mesh, part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), rank // 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x, y = batches(2)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            options: dict[str, Any] = {"mesh": mesh, "loss_fn": square, "cost": "analytic", "batch_norm": "deferred"}
            pipe = pc.compile(copy.deepcopy(model), 2, n_microbatches=2, **options)
            pipe.step(microbatches=[(x[part][:2], y[part][:2]), (x[part][2:], y[part][2:])])
            said: list[Any] = [pipe.step(x[part], target=y[part]), pipe.clip_grad_norm_(0.1).item()]
            said.append(pipe.sum_over_copies({"right": 1, "all": 0.5}))
            said += [pipe.evaluate([(x[part], y[part])]).loss, pipe.gathered() is not None]
            found.append([*map(str, said), *(value.sum().item() for value in pipe.full_state_dict().values())])
    return [pair for pair in zip(*found, strict=True) if pair[0] != pair[1]]


def skipped(rank: int) -> Any:
    """Go on after batches that all ranks refuse, while they record or before, and after one that a rank alone refuses."""
    pipe, x = pinned(scaled()), batches(2)[0]
    refused: list[Any] = [lambda: pipe.step(x[0][:, :3], target=x[0]), lambda: pipe.step(microbatches=3)]
    refused.append(lambda: pipe.step(x[0], target=x[0]) if rank == 0 else pipe.step(microbatches=3))
    said = [error_of(call).splitlines()[0] for call in refused]
    losses = [loss_of(pipe), loss_of(pipe, 1)]
    calls = pipe.full_state_dict()["0._extra_state"]["calls"]
    return said, losses == [loss_of(pinned(scaled()), part) for part in (0, 1)], calls


def failed_to_record(rank: int) -> Any:
    """Record a forward that raises on rank 1 alone."""
    model = scaled()
    if rank == 1:
        model[0].register_forward_pre_hook(lambda *_: _raise())
    return loss_of(pinned(model))


def with_copies_of_stages(rank: int) -> Any:
    """Reschedule to a schedule with copies of stages, on all ranks; then on one."""
    schedule = pc.build_schedule("chimera", 2, 2)
    pipe = compiled()
    first = loss_of(pipe)
    error = error_of(lambda: pipe.reschedule(schedule))
    alone = error_of(lambda: pipe.reschedule(schedule)) if rank == 1 else ""
    return [error, alone, loss_of(pipe) == first]


def with_copies_on_one(rank: int) -> Any:
    return loss_of(compiled(**{"schedule": pc.build_schedule("chimera", 2, 2)} if rank else {}))


SCRIPTS: dict[str, tuple[Callable[[int], Any], int, float]] = {
    "after a failure": (after_a_failure, 4, TIMEOUT),
    "beside a failure": (beside_a_failure, 2, TIMEOUT),
    "not finite": (not_finite, 2, TIMEOUT),
    "other norm": (other_norm, 2, TIMEOUT),
    "one copy clips": (clipped_copy, 4, TIMEOUT),
    "copies clip otherwise": (lambda rank: clipped_copy(rank, max_norm=1.0 + rank // 2), 4, TIMEOUT),
    "eval on a copy": (beside_a_copy(lambda pipe: [pipe.eval()] and pipe.train), 4, TIMEOUT),
    "other layers of copies": (other_layers, 4, TIMEOUT),
    "frozen on a copy": (beside_a_copy(frozen), 4, TIMEOUT),
    "loaded on a copy": (beside_a_copy(lambda pipe: pipe.load_state_dict(pipe.state_dict())), 4, TIMEOUT),
    "updates": (of_ranks, 2, TIMEOUT),
    "updates of copies": (of_copies, 4, TIMEOUT),
    "read otherwise": (read_otherwise, 4, TIMEOUT),
    "beside siblings": (beside_siblings, 4, TIMEOUT),
    "failed load": (failed_load, 2, TIMEOUT),
    "loss_reduction": (with_option("loss_reduction", "mean", "sum"), 2, TIMEOUT),
    "batch_norm": (with_option("batch_norm", "each", "deferred"), 2, TIMEOUT),
    "check": (with_option("check", True, False), 2, TIMEOUT),
    "rescheduled": (rescheduled, 2, TIMEOUT),
    "loaded on one": (loaded_on_one, 2, TIMEOUT),
    "attribute": (changed(lambda model: setattr(model[2], "factor", 2.0)), 2, TIMEOUT),
    "attribute of another rank": (changed(lambda model: setattr(model[0], "factor", 2.0)), 2, TIMEOUT),
    "layer": (changed(lambda model: setattr(model[0], "linear", nn.Linear(4, 4)), who=0), 2, TIMEOUT),
    "hook": (changed(lambda model: model[2].register_forward_hook(lambda *given: given[2] * 2)), 2, TIMEOUT),
    "frozen": (changed(lambda model: model[2].linear.weight.requires_grad_(False)), 2, TIMEOUT),
    "changed layers": (changed_layers, 2, TIMEOUT),
    "extra state": (extra_state, 2, TIMEOUT),
    "compiled once more": (compiled_once_more, 2, SHORT),
    "compiled on one": (compiled_on_one, 2, SHORT),
    "crossed": (crossed, 2, TIMEOUT),
    "thread ended": (thread_ended, 2, SHORT),
    "other seeds": (other_seeds, 2, TIMEOUT),
    "other seeds of copies": (lambda rank: other_seeds(rank, rank // 2), 4, TIMEOUT),
    "read beside steps": (read_beside_steps, 2, TIMEOUT),
    "evaluated beside steps": (evaluated_beside_steps, 2, TIMEOUT),
    "other default device": (other_default_device, 4, TIMEOUT),
    "skipped": (skipped, 2, TIMEOUT),
    "failed to record": (failed_to_record, 2, TIMEOUT),
    "copies of stages": (with_copies_of_stages, 2, TIMEOUT),
    "copies of stages on one": (with_copies_on_one, 2, SHORT),
}
"""Scripts by name, with their number of ranks and the timeout of `init_process_group`."""


def main() -> None:
    torch.set_num_threads(1)
    warm()
    names = sys.argv[2:]
    lanes = [[name] for name in names if SCRIPTS[name][2] == SHORT]
    print(json.dumps(in_lanes(said, [name for name in names if SCRIPTS[name][2] != SHORT], *lanes)))


def said(name: str) -> list[str]:
    script, world, timeout = SCRIPTS[name]
    return of(name, Path(sys.argv[1]), world, script, timeout)


if __name__ == "__main__":
    main()
