"""Random models under random scripts: steps, calls with gradients, lists of micro-batches, changes in between; beside the plain loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from tests.system.scripted_parts import LOSSES, Averaged, Flagged, RandomNet, WholeBatch, leaves
from tests.system.stateful_parts import Part

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")

TOLERANCE = 1e-7


def part(value: Any, index: int, count: int) -> Any:
    """Return the part of a micro-batch of what has rows, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.tensor_split(count)[index] if value.dim() else value
    if isinstance(value, dict):
        return {key: part(one, index, count) for key, one in value.items()}
    return [part(one, index, count) for one in value] if isinstance(value, list) else value


class Script:
    """A pipeline and its twin in eager, which runs the micro-batches in a loop. Each method is a line of a script for both."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.net = RandomNet(self.draw).double()
        self.twin, self.loss_fn, self.count = (
            copy.deepcopy(self.net),
            self.draw.choice(LOSSES),
            self.draw.choice([2, 3, 4]),
        )
        schedule = self.draw.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "auto"])
        is_folded = schedule in ("interleaved", "zbv")
        where: dict[str, Any] = {"devices": ["cpu"] * 2} if is_folded else {}
        self.pipe = pc.compile(
            self.net, 4 if is_folded else self.draw.choice([2, 3]), loss_fn=self.loss_fn, n_microbatches=self.count,
            schedule=schedule, checkpoint=self.draw.choice(["never", "always", "except_last"]), cost="analytic",
            dispatch=self.draw.choice(["inline", "threads"]), **where,
        )  # fmt: skip
        self.optimizers = [torch.optim.SGD(one.parameters(), 0.05) for one in (self.pipe, self.twin)]

    @property
    def both(self) -> tuple[RandomNet, RandomNet]:
        return self.net, self.twin

    def batch(self) -> tuple[dict[str, Any], Tensor]:
        return self.net.batch(self.draw, 2 * self.count + self.draw.choice([0, 0, 1]))

    def step(self) -> None:
        inputs, target = self.batch()
        expected = 0.0
        for index in range(self.count):
            own, labels = part(inputs, index, self.count), part(target, index, self.count)
            loss = self.loss_fn(self.twin(**own), labels) * (len(labels) / len(target))
            loss.backward()
            expected += loss.item()
        assert self.pipe.step(**inputs, target=target).item() == pytest.approx(expected, rel=TOLERANCE)

    def step_in_eval(self) -> None:
        self.pipe.eval()
        self.twin.eval()
        self.step()
        self.pipe.train()
        self.twin.train()

    def step_in_bfloat16(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.step()

    def step_on_a_list(self) -> None:
        batches = [
            self.net.batch(self.draw, self.draw.randint(2, 3)) for _ in range(self.draw.choice([1, self.count, 5]))
        ]
        total, expected = sum(len(target) for _, target in batches), 0.0
        for inputs, target in batches:
            loss = self.loss_fn(self.twin(**inputs), target) * (len(target) / total)
            loss.backward()
            expected += loss.item()
        listed = [pc.Microbatch(**inputs, target=target) for inputs, target in batches]
        assert self.pipe.step(microbatches=listed).item() == pytest.approx(expected, rel=TOLERANCE)

    def call(self) -> None:
        """Compare outputs, then a backward through them and to the input."""
        if any(isinstance(layer, (Averaged, WholeBatch)) for layer in self.net.layers):
            return  # samples meet: a call is refused, or runs a part on the whole batch
        inputs, _ = self.batch()
        other = inputs | {"x": inputs["x"].clone().requires_grad_()}
        inputs["x"].requires_grad_()
        own = leaves(self.pipe(**inputs))
        parts = [leaves(self.twin(**part(other, index, self.count))) for index in range(self.count)]
        expected = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        for one, two in zip(own, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=TOLERANCE, atol=TOLERANCE)
            assert one.requires_grad == two.requires_grad
        weights = [torch.randn_like(one) for one in expected]
        for outputs in (own, expected):
            pairs = zip(outputs, weights, strict=True)
            torch.stack([(one * weight).sum() for one, weight in pairs if one.requires_grad]).sum().backward()
        torch.testing.assert_close(inputs["x"].grad, other["x"].grad, rtol=TOLERANCE, atol=TOLERANCE)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def freeze(self) -> None:
        place = self.draw.randrange(len(self.net.layers))
        for net in self.both:
            for parameter in net.layers[place].parameters():
                parameter.requires_grad_(not parameter.requires_grad)

    def change(self) -> None:
        for net in self.both:
            for layer in net.layers:
                if isinstance(layer, Flagged):
                    layer.scale, layer.is_flipped = layer.scale + 0.25, not layer.is_flipped

    def set_mode(self) -> None:
        place = self.draw.randrange(len(self.net.layers))
        for net in self.both:
            net.layers[place].train(not net.layers[place].training)

    def load(self) -> None:
        state = {
            key: value * 1.1 if value.is_floating_point() else value for key, value in self.twin.state_dict().items()
        }
        self.pipe.load_state_dict(state)
        self.twin.load_state_dict(state)

    def replace(self) -> None:
        place, layer = self.draw.randrange(len(self.net.layers)), Part().double()
        for net in self.both:
            net.layers[place] = copy.deepcopy(layer)
        self.optimizers = [torch.optim.SGD(one.parameters(), 0.05) for one in (self.pipe, self.twin)]

    def hook(self) -> None:
        place, kind = self.draw.randrange(len(self.net.layers)), self.draw.choice(["before", "after", "backward"])
        for net in self.both:
            layer: nn.Module = net.layers[place]
            if kind == "after":
                layer.register_forward_hook(lambda _, __, output: output * 1.1)
            elif kind == "before":
                layer.register_forward_pre_hook(lambda _, given: (given[0] * 0.9,))
            else:
                layer.register_full_backward_hook(
                    lambda _, found, __: tuple(g if g is None else g * 0.5 for g in found)
                )

    def compare(self) -> None:
        """Compare gradients, state, and what Python counts."""
        own, expected = self.pipe.state_dict(), self.twin.state_dict()
        assert list(own) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(own[key], value, rtol=TOLERANCE, atol=TOLERANCE)
        for one, two in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if two.grad is not None:
                torch.testing.assert_close(
                    one.grad, two.grad, rtol=TOLERANCE, atol=TOLERANCE * (1 + two.grad.abs().max())
                )
        calls = [[getattr(layer, "calls", 0) for layer in net.layers] for net in self.both]
        assert calls[0] == calls[1]


LINES: list[Callable[[Script], None]] = [
    Script.step, Script.step, Script.step, Script.call, Script.call, Script.step_in_eval, Script.step_in_bfloat16, Script.step_on_a_list,
    Script.update, Script.freeze, Script.change, Script.set_mode, Script.load, Script.replace, Script.hook,
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_a_script_gives_what_the_plain_loop_gives(seed: int) -> None:
    script = Script(seed)
    for _ in range(script.draw.randint(4, 8)):
        script.draw.choice(LINES)(script)
        script.compare()
