"""Everything that the zoo asks of one model, phase by phase. What is found is told at once, so a crash loses nothing."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from zoo_models.specimen import Call, Specimen, quiet

import pipecompile as pc
from pipecompile.tracing.node_facts import value_of

__all__ = ["PHASES", "examine"]

TRACED, OTHER = 2, 3
"""Samples of the recording, and of the run that must give the same."""

COMPILED, TRAINED, MICROBATCHES, STAGES = 4, 5, 2, 3
"""Training is compiled for four samples and run with five: micro-batches of three and two. Lists with an entry per sample go
into micro-batches of equal length, so there it is run with six.
"""

LARGE = 60_000_000
"""Models with more parameters train in float32: in float64 they would not fit beside their gradients."""

Tell = Callable[..., None]
Phase = Callable[[Specimen, nn.Module, Tell], None]


def examine(specimen: Specimen, tell: Tell, limit: Callable[[str], Any], *, baselines: bool) -> None:
    """Run all phases; the first that fails ends ours, the baselines are asked in any case."""
    torch.manual_seed(0)
    model: nn.Module | None = None
    try:
        for name, phase in PHASES.items():
            tell(phase=name)
            with limit(name):
                if model is None:
                    model = _built(specimen, tell)
                phase(specimen, model, tell)
        tell(phase="done")
    except Exception as error:
        tell(error=_described(error), where=str(getattr(error, "where", "") or ""))
    for name, baseline in BASELINES.items() if baselines else ():
        tell(phase=name)
        try:
            with limit(name):
                tell(**{name: _seconds(partial(_asked, baseline, specimen))})
        except Exception as error:
            tell(**{f"{name}_error": _described(error)})


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _built(specimen: Specimen, tell: Tell) -> nn.Module:
    model = quiet(specimen.build())
    tell(parameters=sum(p.numel() for p in model.parameters()))
    return model


def _asked(baseline: Callable[[nn.Module, Call], None], specimen: Specimen) -> None:
    baseline(quiet(specimen.build()).eval(), specimen.inputs(TRACED))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# -- the phases ---------------------------------------------------------------------------------------------------


def eager(specimen: Specimen, model: nn.Module, tell: Tell) -> None:
    """One forward of the model itself, the faster of two."""
    call = specimen.inputs(TRACED)
    tell(eager=min(_seconds(lambda: model.train()(*call.args, **call.kwargs)) for _ in range(2)))
    model.eval()(*call.args, **call.kwargs)


def record(specimen: Specimen, model: nn.Module, tell: Tell) -> None:
    """Record it in evaluation mode, and compare the graph's output at another batch size."""
    call, other = specimen.inputs(TRACED), specimen.inputs(OTHER)
    model.eval()
    start = time.process_time()
    graph = pc.trace(model, *call.args, batch_dims=specimen.batch_dims, **call.kwargs)
    tell(trace=time.process_time() - start, nodes=sum(n.op.startswith("call") for n in graph.graph.nodes))
    alike = pytree.tree_structure((call.args, call.kwargs)) == pytree.tree_structure((other.args, other.kwargs))
    if not alike or not all(guard.holds(OTHER) for guard in graph.facts.guards):  # a pipeline records once more
        tell(guards=[str(guard) for guard in graph.facts.guards])
        graph = pc.trace(model, *other.args, batch_dims=specimen.batch_dims, **other.kwargs)
    with torch.no_grad():
        wanted = model(*other.args, **other.kwargs)
        made = graph(*other.args, **other.kwargs)
    if (found := pytree.tree_structure(made)) != pytree.tree_structure(wanted):
        raise AssertionError(f"the graph returns {found}, the model {pytree.tree_structure(wanted)}")
    tell(output=_difference(_tensors(made), _tensors(wanted)))


def train(specimen: Specimen, model: nn.Module, tell: Tell) -> None:
    """Three stages and uneven micro-batches against the plain loop: loss, gradients, buffers."""
    model.train()
    torch.manual_seed(1)
    samples = TRAINED + 1 if specimen.lists else TRAINED
    example, batch = specimen.inputs(COMPILED), specimen.inputs(samples)
    example, batch = _precise(model, example, batch, tell)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    has_loss = _own_loss(model(*example.args, **example.kwargs)) is not None
    _restore(model, buffers)
    loss_fn = None if has_loss else wave_loss
    torch.manual_seed(2)
    wanted = _plain_loop(model, specimen, batch, samples, loss_fn)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}  # a forward may change some
    model.zero_grad(set_to_none=True)
    _restore(model, buffers)
    start = time.process_time()
    pipe = pc.compile(
        model, STAGES, example_args=example.args, example_kwargs=example.kwargs, n_microbatches=MICROBATCHES,
        loss_fn=loss_fn, batch_dims=specimen.batch_dims, cost="analytic", devices=["cpu"] * STAGES, dispatch="inline", partitioner="dp",
    )  # fmt: skip
    tell(compile=time.process_time() - start)
    torch.manual_seed(2)
    loss = pipe.step(*batch.args, **batch.kwargs)
    tell(loss=_difference([loss], [wanted]), stages=len(pipe.stages))
    tell(gradient=_gradient_difference(model, gradients), with_gradient=sum(g is not None for g in gradients.values()))
    tell(buffers=_difference([b for _, b in model.named_buffers()], list(after.values())))
    tell(rounding=_rounding(pipe.graph))
    gradients.clear()
    model.zero_grad(set_to_none=True)
    _state(specimen, model, pipe, dtypes, tell)


def _state(specimen: Specimen, model: nn.Module, pipe: pc.Pipeline, dtypes: dict[str, torch.dtype], tell: Tell) -> None:
    """The state_dict: keys in order, shapes, dtypes, ties, and strictly both ways. `dtypes` are those that eager leaves."""
    fresh = specimen.build().to(next((p.dtype for p in model.parameters()), torch.float32))
    for name, parameter in fresh.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    if _shape_of(pipe.state_dict()) != _shape_of(fresh.state_dict()):
        raise AssertionError("the state_dict of the pipeline is not that of the model")
    fresh.load_state_dict(pipe.state_dict(), strict=True)
    pipe.load_state_dict(fresh.state_dict(), strict=True)
    if _shape_of(pipe.state_dict()) != _shape_of(fresh.state_dict()):
        raise AssertionError("loading a state_dict changed the pipeline's")
    tell(state=len(fresh.state_dict()))


def _shape_of(state: dict[str, Any]) -> list[Any]:
    """Keys, shapes, dtypes, and for each tensor the first key that names the same memory."""
    first: dict[Any, str] = {}
    rows = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            rows.append((key, value.shape, value.dtype, first.setdefault(place, key) if value.numel() else key))
        else:
            rows.append((key, type(value)))
    return rows


PHASES: dict[str, Phase] = {"eager": eager, "record": record, "train": train}


# -- the others ---------------------------------------------------------------------------------------------------


def _symbolic_trace(model: nn.Module, call: Call) -> None:
    given = {*list(inspect.signature(model.forward).parameters)[: len(call.args)], *call.kwargs}
    rest = {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if name not in given and parameter.default is not parameter.empty
    }
    torch.fx.symbolic_trace(model, concrete_args=rest)


def _export(model: nn.Module, call: Call) -> None:
    torch.export.export(model, call.args, call.kwargs, strict=False)


BASELINES: dict[str, Callable[[nn.Module, Call], None]] = {"symbolic_trace": _symbolic_trace, "export": _export}


# -- training by hand, and comparing ------------------------------------------------------------------------------


def wave_loss(output: Any) -> torch.Tensor:
    """A mean over the samples in which every number of the output counts differently, also where outputs are normalised."""
    found = [leaf for leaf in _tensors(output) if leaf.is_floating_point() or leaf.is_complex()]
    return torch.stack(
        [_waved(leaf.abs() if leaf.is_complex() else leaf) for leaf in found if leaf.requires_grad]
    ).sum()


def _waved(leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.dim():
        return leaf
    wave = torch.arange(leaf[0].numel(), dtype=leaf.dtype).mul(0.7).sin().reshape(leaf.shape[1:])
    return (leaf * wave + leaf.square()).mean()


def _own_loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def _plain_loop(
    model: nn.Module, specimen: Specimen, batch: Call, samples: int, loss_fn: Callable[[Any], torch.Tensor] | None
) -> torch.Tensor:
    total = None
    for m, (args, kwargs) in enumerate(_divided(specimen, batch, samples)):
        output = model(*args, **kwargs)
        size = samples // MICROBATCHES + (m < samples % MICROBATCHES)
        loss = (_own_loss(output) if loss_fn is None else loss_fn(output)) * (size / samples)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def _divided(specimen: Specimen, batch: Call, samples: int) -> list[Any]:
    """Args and kwargs of each micro-batch."""
    if specimen.lists:
        size = samples // MICROBATCHES
        return [([arg[m * size : (m + 1) * size] for arg in batch.args], {}) for m in range(MICROBATCHES)]
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    split = [_parts(leaf) for leaf in leaves]
    return [pytree.tree_unflatten([part[m] for part in split], spec) for m in range(MICROBATCHES)]


def _parts(leaf: Any) -> Any:
    batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    return torch.tensor_split(leaf, MICROBATCHES) if batched else [leaf] * MICROBATCHES


def _precise(model: nn.Module, example: Call, batch: Call, tell: Tell) -> tuple[Call, Call]:
    """Everything in float64 if the model can, so that what is equal can be told from what is close."""
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return example, batch
    state = copy.deepcopy(model.state_dict())
    model.double()
    wide = _double(example)
    try:
        model(*wide.args, **wide.kwargs)
    except Exception:
        model.float()
        model.load_state_dict(state)
        tell(double=False)
        return example, batch
    return wide, _double(batch)


def _double(call: Call) -> Call:
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, (call.args, call.kwargs)
    )
    return Call(args, kwargs)


def _restore(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _rounding(graph: torch.fx.GraphModule) -> str:
    """The coarsest dtype that the model computes in."""
    known = {t.dtype for node in graph.graph.nodes for t in _tensors(value_of(node))}
    floats = [dtype for dtype in known if dtype.is_floating_point]
    return str(max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)).removeprefix("torch.")


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _difference(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor; 0 where all are bit-equal."""
    if len(made) != len(wanted):
        raise AssertionError(f"{len(made)} tensors instead of {len(wanted)}")
    return max((_relative(a, b) for a, b in zip(made, wanted, strict=True)), default=0.0)


def _relative(made: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        raise AssertionError(f"{made.dtype} {tuple(made.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}")
    if torch.equal(made, wanted) or not made.numel():
        return 0.0
    if not (made.is_floating_point() or made.is_complex()):
        return float("inf")
    a, b = torch.nan_to_num(made.detach()), torch.nan_to_num(wanted.detach())
    if not torch.equal(made.isnan(), wanted.isnan()):
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    return float((a - b).abs().max()) / max(float(b.abs().max()), floor, 1e-300)


def _gradient_difference(model: nn.Module, wanted: dict[str, torch.Tensor | None]) -> float:
    """Relative to the largest number in the gradient of its parameter. What is zero but for rounding counts as small: a
    gradient is at least 1e-3 of the largest of all.
    """
    largest = max((float(g.abs().max()) for g in wanted.values() if g is not None and g.numel()), default=0.0)
    worst = 0.0
    for name, parameter in model.named_parameters():
        theirs = wanted[name]
        if (parameter.grad is None) != (theirs is None):
            raise AssertionError(f"gradient of {name}: {'none' if theirs is not None else 'one'}, unlike eager")
        if parameter.grad is not None and theirs is not None:
            worst = max(worst, _relative(parameter.grad, theirs, 1e-3 * largest))
    return worst
