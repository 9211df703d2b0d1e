"""Everything that the adversarial zoo asks of one model: the same story told to a pipeline and to a twin in plain eager.

    step · change · step · change · step · another batch size · another length · evaluation · the user's model in eager again

Random draws are on. The schedule runs one micro-batch after the other, so that both draw in the same order.
"""

from __future__ import annotations

import contextlib
import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from adversarial_changes import CHANGES, chosen
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from zoo_check import COMPILED, MICROBATCHES, STAGES, TRAINED, _divided, _own_loss, _precise, _rounding, wave_loss
from zoo_models.specimen import Call, Specimen
from zoo_table import EQUAL

import pipecompile as pc

__all__ = ["examine"]

_TENSORS = ("loss", "output", "gradient", "parameter", "buffer")
"""Beginnings of the names of what a step computes; the other names are those of attributes."""

CANCELLED = 1e-5
"""A loss below this is a sum whose terms cancel: its roundings are compared with this number."""

RATE = 1e-3
"""Learning rate of the gradient descent between steps."""

Tell = Callable[..., None]
State = dict[str, Any]


def examine(specimen: Specimen, tell: Tell) -> None:
    """Tell, per phase, the outcome: "right", "anew", "warned", "refused", "failed" or "WRONG", with the reason."""
    story = _Story(specimen, tell)
    try:
        story.prepare()
    except Exception as error:
        tell(skipped=f"eager: {type(error).__name__}: {error}"[:300])
        return
    story.run()
    tell(phase="done")


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


class _Story:
    def __init__(self, specimen: Specimen, tell: Tell) -> None:
        self.specimen, self.tell = specimen, tell
        self.changes: list[str] = []
        self.tolerance = EQUAL["float32"]
        self.said: list[str] = []
        self.is_apart = False

    # -- what is told --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the calls, and choose two changes after which the model still runs."""
        specimen = self.specimen
        samples = TRAINED + 1 if specimen.lists else TRAINED
        self.double = self._is_double()
        self.calls = {"first": self._call(specimen.inputs, COMPILED), "batch": self._call(specimen.inputs, samples)}
        if specimen.longer is not None:
            self.calls["length"] = self._call(specimen.longer, COMPILED)
        self.samples = {"first": COMPILED, "batch": samples, "length": COMPILED}
        for change in chosen(specimen.name):
            if len(self.changes) < 2 and self._bears(change):
                self.changes.append(change)
        self.has_loss = _own_loss(self._run(self._fresh(), self.calls["first"])) is not None
        model = self._repeated()
        self._drop_impossible_calls()
        self.tell(changes=self.changes, parameters=sum(p.numel() for p in model.parameters()))

    def _repeated(self) -> nn.Module:
        """Return a model after one step. Raise RuntimeError if another one of the same seeds has another loss."""
        losses = []
        for _ in range(2):
            model = self._fresh()
            _seed(5)
            losses.append(self._eager_step(model, "first", None if self.has_loss else wave_loss))
        if not torch.equal(*losses):
            raise RuntimeError("it draws from a source that no seed sets, as torch.seed() or the time")
        return model

    def _drop_impossible_calls(self) -> None:
        """Leave out the calls that eager does not take in these micro-batches: a single sample for a BatchNorm, another length."""
        for name in list(self.calls):
            model = self._fresh()
            try:
                for change in self.changes:
                    CHANGES[change](model)
                for args, kwargs in self._parts(self.calls[name], self.samples[name]):
                    model(*args, **kwargs)
            except Exception:
                if name == "first":
                    raise
                del self.calls[name]

    def _call(self, inputs: Callable[[int], Call], samples: int) -> Call:
        _seed(3)
        call = inputs(samples)
        widened = pytree.tree_map_only(torch.Tensor, self._widened, (call.args, call.kwargs))
        return Call(*widened)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if self.double and tensor.is_floating_point() else tensor

    def _is_double(self) -> bool:
        told: dict[str, Any] = {}
        _seed(0)
        model = self.specimen.build().train()
        _precise(model, self.specimen.inputs(COMPILED), Call(), told.update)
        is_double = any(
            t.dtype is torch.float64 for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()
        )
        if is_double:
            self.tolerance = EQUAL["float64"]
            return True
        return False

    def _fresh(self) -> nn.Module:
        _seed(0)
        model = self.specimen.build()
        return (model.double() if self.double else model).train()

    @staticmethod
    def _run(model: nn.Module, call: Call) -> Any:
        return model(*call.args, **call.kwargs)

    def _bears(self, change: str) -> bool:
        model = self._fresh()
        try:
            for earlier in self.changes:
                CHANGES[earlier](model)
            if not CHANGES[change](model):
                return False
            _seed(1)
            self._eager_step(
                model,
                "first",
                loss_fn=None if _own_loss(self._run(model, self.calls["first"])) is not None else wave_loss,
            )
        except Exception:
            return False
        return True

    # -- eager and pipeline --------------------------------------------------------------------------------------

    def _eager_step(self, model: nn.Module, name: str, loss_fn: Any) -> torch.Tensor:
        total = torch.zeros(())
        samples = self.samples[name]
        for m, (args, kwargs) in enumerate(self._parts(self.calls[name], samples)):
            output = model(*args, **kwargs)
            size = samples // MICROBATCHES + (m < samples % MICROBATCHES)
            loss = (_own_loss(output) if loss_fn is None else loss_fn(output)) * (size / samples)
            loss.backward()
            total = loss.detach() if not m else total + loss.detach()
        return total

    def _parts(self, call: Call, samples: int) -> Any:
        shared = {name for name, dim in self.specimen.dims.items() if dim is None}
        if not shared:
            return _divided(self.specimen, call, samples)
        rest = Call(call.args, {k: v for k, v in call.kwargs.items() if k not in shared})
        same = {k: v for k, v in call.kwargs.items() if k in shared}
        return [(args, {**kwargs, **same}) for args, kwargs in _divided(self.specimen, rest, samples)]

    def _compile(self, model: nn.Module) -> pc.Pipeline:
        call = self.calls["first"]
        for stages in range(STAGES, 0, -1):
            try:
                return pc.compile(
                    model, stages, example_args=call.args, example_kwargs=call.kwargs, n_microbatches=MICROBATCHES,
                    loss_fn=self.loss_fn, batch_dims=self.specimen.batch_dims, cost="analytic", devices=["cpu"] * stages,
                    dispatch="inline", partitioner="dp", batch_norm="each", schedule=_in_turn,
                )  # fmt: skip
            except (pc.InputError, pc.PartitionError) as error:
                if stages == 1 or "stages" not in str(error):
                    raise
        raise AssertionError

    # -- the story -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.loss_fn = None if self.has_loss else wave_loss
        self.model, self.twin = self._fresh(), self._fresh()
        self.pipe: pc.Pipeline | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.caught = caught
            if self._phase("compile", self._start) and self._phase("step 1", lambda: self._step("first")):
                self._later()
            elif self.pipe is not None:
                self._resume()
            self._phase("eager again", self._again)

    def _later(self) -> None:
        steps = [
            ("step 2", "first", 0),
            ("step 3", "first", 1),
            ("batch size", "batch", None),
            ("length", "length", None),
        ]
        for phase, name, change in steps:
            if name not in self.calls:
                continue
            if change is not None and change < len(self.changes):
                for model in (self.model, self.twin):
                    CHANGES[self.changes[change]](model)
            if not self._phase(phase, lambda name=name: self._step(name)):  # type: ignore[misc]
                self._resume()
        if not self._phase("evaluation", self._evaluate):
            self._resume()

    def _phase(self, name: str, run: Callable[[], str]) -> bool:
        """Run one phase and tell its outcome. Return whether the model and its twin are alike after it."""
        self.tell(phase=name)
        before = self.pipe.explain().traces if self.pipe else 0
        reason = ""
        try:
            reason = run()
            outcome = "right" if not reason else "WRONG"
        except pc.PipecompileError as error:
            outcome, reason = "refused", f"{type(error).__name__}: {error.args[0]}"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome, reason = "failed", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        said = [
            str(w.message)
            for w in self.caught
            if issubclass(w.category, pc.RecordingWarning)
            or "pipecompile" in w.filename
            or "micro-batch" in str(w.message)
        ]
        self.said = list(dict.fromkeys([*self.said, *said]))
        if outcome == "WRONG" and self.said:
            outcome = "warned"
        if outcome == "right" and self.pipe and before and self.pipe.explain().traces > before:
            outcome = "anew"
        self.tell(**{name: outcome, f"{name}: why": reason[:1500], "said": [s[:600] for s in self.said]})
        return outcome in ("right", "anew")

    def _start(self) -> str:
        _seed(4)
        before = _drawn()
        _seed(4)
        keep = _state(self.model)
        self.pipe = self._compile(self.model)
        self.tolerance = max(self.tolerance, EQUAL.get(_rounding(self.pipe.graph), 0.0))
        self.tell(stages=len(self.pipe.stages), kept_whole=_kept_whole(self.pipe))
        if _drawn() != before:
            return "compiling moved the generators of random numbers"
        return _difference(_state(self.model), keep, self.tolerance)

    def _step(self, name: str) -> str:
        assert self.pipe is not None
        call, results, draws = self.calls[name], [], []
        for runner in (self.twin, self.pipe):
            runner.zero_grad(set_to_none=True)
            _seed(5)
            if runner is self.twin:
                results.append(self._eager_step(self.twin, name, self.loss_fn))
            else:
                results.append(self.pipe.step(*call.args, **call.kwargs))
            draws.append(_drawn())
        expected, made = ({"loss": r} for r in results)
        found = self._compared(made | _state(self.model), expected | _state(self.twin))
        if not found and draws[0] != draws[1]:
            found = "the generators of random numbers end in other states"
        for model in (self.model, self.twin):
            _descend(model)
        if not found:
            self._copy_tensors()  # a network of many BatchNorms makes large differences of roundings, step by step
        return found

    def _evaluate(self) -> str:
        assert self.pipe is not None
        self.pipe.eval(), self.twin.eval()
        outputs = []
        with torch.no_grad():
            _seed(6)
            parts = [self.twin(*args, **kwargs) for args, kwargs in self._parts(self.calls["first"], COMPILED)]
            if self._draws_in_eval():
                return ""
            _seed(6)
            outputs.append(self._run(self.pipe, self.calls["first"]))
        leaves = pytree.tree_leaves(outputs[0])
        joined = _joined_leaves(leaves, [pytree.tree_leaves(part) for part in parts])
        made, expected = _outputs(leaves), _outputs(joined)
        if _difference(
            made, expected, self.tolerance
        ):  # where samples meet, the pipeline computes the whole mini-batch at once
            with torch.no_grad():
                expected = _outputs(pytree.tree_leaves(self._run(self.twin, self.calls["first"])))
        ours, theirs = _state(self.model), _state(self.twin)
        missing = [name for name in theirs.keys() - ours.keys() if isinstance(theirs[name], torch.Tensor)]
        tables = tuple(f"{name.partition('[')[0]}{mark}" for name in missing if "[" in name for mark in "[:")
        ours, theirs = ({k: v for k, v in one.items() if not k.startswith(tables)} for one in (ours, theirs))
        return self._compared(made | ours, expected | theirs)  # without tables of tensors that a forward looks up once

    def _compared(self, made: State, expected: State) -> str:
        """Compare two states; after a refusal without the attributes, which an interrupted step may leave in between."""
        if self.is_apart:
            made, expected = ({k: v for k, v in state.items() if k.startswith(_TENSORS)} for state in (made, expected))
        return _difference(made, expected, self.tolerance)

    @staticmethod
    def _draws_in_eval() -> bool:
        """Whether eager drew: a call runs stage by stage, and so in another order."""
        after = _drawn()
        _seed(6)
        return after != _drawn()

    def _again(self) -> str:
        results: list[State] = []
        keys = []
        self._copy_tensors()
        for model in (self.twin, self.model):
            model.train()
            model.zero_grad(set_to_none=True)
            _seed(9)
            output = self._run(model, self.calls["first"])
            loss = _own_loss(output) if self.has_loss else wave_loss(output)
            if loss.requires_grad:
                loss.backward()
            results.append(_outputs(pytree.tree_leaves(output)) | _state(model))
            keys.append(list(model.state_dict()))
        if keys[0] != keys[1]:
            return f"state_dict has other keys: {set(keys[0]) ^ set(keys[1])}"
        return self._compared(results[1], results[0])

    def _resume(self) -> None:
        """Give the model the parameters and buffers of its twin, so that a later phase is judged by itself."""
        self.is_apart = True
        self._copy_tensors()

    def _copy_tensors(self) -> None:
        theirs = dict(self.twin.named_parameters()) | dict(self.twin.named_buffers())
        with torch.no_grad(), contextlib.suppress(RuntimeError, KeyError):
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if not torch.equal(tensor, theirs[name]):
                    tensor.copy_(theirs[name])


def _in_turn(n_stages: int, n_microbatches: int, _n_devices: int) -> pc.Schedule:
    """Return the schedule in which one micro-batch follows the other, as in a plain loop."""
    rows = [",".join(f"{s}F{m},{s}B{m}" for m in range(n_microbatches)) for s in range(n_stages)]
    return pc.Schedule.from_csv("\n".join(rows) + "\n")


def _kept_whole(pipe: pc.Pipeline) -> list[str]:
    return [part[:200] for recording in pipe.explain().kept for part in recording.kept]


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.requires_grad:
                parameter.add_(parameter.grad, alpha=-RATE)


# -- what a model is and holds -----------------------------------------------------------------------------------


def _state(model: nn.Module) -> State:
    """Return what is on a model, by path: tensors, gradients, plain values, kinds of objects."""
    state: State = {}
    for name, parameter in model.named_parameters():
        state[f"gradient of {name}"] = parameter.grad
        state[f"{name}.requires_grad"] = parameter.requires_grad
        state[f"parameter {name}"] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = buffer.detach().clone()
    for name, module in model.named_modules():
        for key, value in sorted(vars(module).items(), key=lambda item: item[0]):
            if key in ("_parameters", "_buffers", "_modules", "_version"):
                continue
            _note(state, f"{name}.{key}", value, 3)
    return state


def _note(state: State, path: str, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        state[f"{path}: class"] = type(value).__name__
        state[path] = value.detach().clone() if type(value) in (torch.Tensor, nn.Parameter) else type(value).__name__
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        state[path] = value
    elif isinstance(value, Mapping) and depth:
        state[f"{path}: keys"] = len(value)
        for number, (key, item) in enumerate(value.items()):
            _note(state, f"{path}[{key if isinstance(key, str) else number}]", item, depth - 1)
    elif isinstance(value, RemovableHandle):
        state[f"{path}: class"] = "RemovableHandle"  # its number counts all hooks of the process
    elif type(value) in (list, tuple) and depth:
        state[f"{path}: length"] = len(value)
        for number, item in enumerate(value[:20]):
            _note(state, f"{path}[{number}]", item, depth - 1)
    elif not isinstance(value, nn.Module) and depth and not callable(value) and hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            _note(state, f"{path}.{key}", item, depth - 1)
    else:
        state[f"{path}: class"] = type(value).__name__


def _outputs(leaves: list[Any]) -> State:
    state: State = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            state[f"output {number}"] = leaf.detach().clone()
        else:
            _note(state, f"output {number}", leaf, 4)
    return state


def _joined_leaves(leaves: list[Any], parts: list[list[Any]]) -> list[Any]:
    """Return the leaves of a call, of those of its micro-batches: one after the other where the output is a list with an entry per
    sample.
    """
    if sum(map(len, parts)) == len(leaves):
        return [leaf for part in parts for leaf in part]
    return [_joined(leaf, each) for leaf, *each in zip(leaves, *parts, strict=True)]


def _joined(leaf: Any, each: list[Any]) -> Any:
    if isinstance(leaf, (list, tuple)):
        return [_joined(*items) for items in zip(leaf, zip(*each, strict=True), strict=True)]
    if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor):
        keys = vars(leaf)
        return SimpleNamespace(**{key: _joined(keys[key], [getattr(e, key) for e in each]) for key in keys})
    if not isinstance(leaf, torch.Tensor) or all(e is each[0] for e in each):
        return each[0]
    candidates = [each[0]] if all(torch.equal(each[0], other) for other in each) else []
    if each[0].dim():
        for dim in range(each[0].dim()):
            with contextlib.suppress(RuntimeError):
                candidates.append(torch.cat(each, dim))
    if each[0].is_floating_point():
        candidates += [torch.stack(each).mean(0), torch.stack(each).sum(0)]
    if each[0].shape == each[-1].shape:
        candidates += [torch.stack(each).amax(0)] if not each[0].is_complex() else []
    alike = [candidate.to(leaf.dtype) for candidate in candidates if candidate.shape == leaf.shape]
    return min(alike, key=lambda one: _relative(leaf, one, 0.0), default=each[0])


def _difference(made: State, expected: State, tolerance: float) -> str:
    """Return the first differences, "" if there are none."""
    if made.keys() != expected.keys():
        more, less = sorted(made.keys() - expected.keys()), sorted(expected.keys() - made.keys())
        return f"there is more: {more[:4]}, or less: {less[:4]}"
    steepest = max(
        (
            float(v.to_dense().abs().max())
            for k, v in expected.items()
            if k.startswith("gradient") and v is not None and v.numel()
        ),
        default=0.0,
    )
    found = list(_differences(made, expected, tolerance, steepest))
    return f"{len(found)} of {len(made)} differ: {'; '.join(found[:4])}" if found else ""


def _differences(made: State, expected: State, tolerance: float, steepest: float) -> Iterator[str]:
    for name, theirs in expected.items():
        ours = made[name]
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            is_nan = isinstance(ours, float) and math.isnan(ours)
            same = ours is theirs or (type(ours) is type(theirs) and (ours == theirs or is_nan))
            if not same:
                yield f"{name} is {_text(ours)} instead of {_text(theirs)}"
            continue
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            yield f"{name} is {_text(ours)} instead of {_text(theirs)}"
            continue
        floor = {"gradient": 1e-3, "parameter": RATE}.get(name.partition(" ")[0], 0.0) * steepest
        if name == "loss":
            floor = CANCELLED
        if name.endswith(".running_mean") and name.replace("_mean", "_var") in expected:
            floor = (
                1e-3 * float(expected[name.replace("_mean", "_var")].max()) ** 0.5
            )  # a mean of zero is a sum of roundings
        distance = _relative(ours, theirs, floor)
        if not distance <= tolerance:
            yield f"{name} by {distance:.1e}"


def _text(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]


def _relative(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    if ours.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if torch.equal(ours, theirs) or not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    largest = float(b[~b.isnan()].abs().nan_to_num(0, 0, 0).max()) if bool((~b.isnan()).any()) else 0.0
    return float((a - b).abs()[~same].nan_to_num(float("inf")).max()) / max(largest, floor, 1e-300)
