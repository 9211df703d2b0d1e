"""Kernels and costs of nodes on fake tensors."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import VisionTransformer, resnet50

import pipecompile as pc
from pipecompile.costs.analytic import Kernel, KernelLog, analytic_costs, node_work
from pipecompile.costs.device_specs import DeviceSpec
from pipecompile.costs.node_cost import CostError


def flops(model: nn.Module, *inputs: object) -> tuple[float, float]:
    work = [visit.reading for visit in node_work(symbolic_trace(model), inputs).values()]
    return sum(w.flops for w in work), sum(w.backward_flops for w in work)


def test_linear() -> None:
    forward = 2 * 5 * 8 * 4
    assert flops(nn.Sequential(nn.Linear(8, 4)), torch.randn(5, 8)) == (forward, forward)  # only the weight's gradient
    assert flops(nn.Sequential(nn.Linear(8, 4)), torch.randn(5, 8, requires_grad=True)) == (forward, 2 * forward)


def test_convolution() -> None:
    layer = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2))
    forward = 2 * (2 * 6 * 5 * 5) * (4 // 2 * 3 * 3)  # per output element, one multiply-add per weight it sees
    assert flops(layer, torch.randn(2, 4, 10, 10)) == (forward, forward)


def test_resnet50_is_the_published_figure() -> None:
    forward, backward = flops(resnet50(), torch.randn(1, 3, 224, 224))
    assert forward == pytest.approx(2 * 4.09e9, rel=0.02)
    assert backward == pytest.approx(2 * forward, rel=0.02)


def test_no_backward_without_grad_mode() -> None:
    with torch.no_grad():
        forward, backward = flops(nn.Sequential(nn.Linear(8, 4)), torch.randn(5, 8))
    assert (forward, backward) == (320, 0)


@pytest.mark.parametrize("case", ["vit", "zoo"])
def test_nodes_add_up_to_what_torch_counts_for_the_model(case: str, zoo: nn.Module, tokens: Tensor) -> None:
    model, x = (VisionTransformer(32, 16, 4, 4, 64, 128), torch.randn(1, 3, 32, 32)) if case == "vit" else (zoo, tokens)
    with sdpa_kernel(SDPBackend.MATH):  # torch's counter leaves out fused attention on the CPU
        counted = flops(model, x)
    fused = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # oneDNN's LSTM has no formula
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = model(x)
            forward = counter.get_total_flops()
            sum(o.sum() for o in (output if isinstance(output, tuple) else (output,))).backward()
    finally:
        torch._C._set_mkldnn_enabled(fused)
    assert counted == (forward, counter.get_total_flops() - forward)


def test_seconds_are_the_roofline() -> None:
    spec = DeviceSpec("mine", {torch.float32: 1000.0}, 100.0, 1.0, 0.0, 0.25, 1)
    graph = symbolic_trace(nn.Sequential(nn.Linear(8, 4, bias=False), nn.Flatten(0), nn.ReLU()))
    costs = analytic_costs(graph, [torch.randn(5, 8)], device=spec)
    read, written = (5 * 8 + 8 * 4) * 4, 5 * 4 * 4
    assert costs["_0"].forward == pytest.approx((read + written) / 100 + 0.25)  # 3.68 s; computing takes 0.32 s
    assert costs["_1"].forward == costs["_1"].backward == 0.0  # a view
    assert costs["_2"].forward == pytest.approx(2 * 80 / 100 + 0.25)
    assert costs["_2"].backward > 0


def test_the_model_stays_as_it_was(zoo: nn.Module, tokens: Tensor, found: type) -> None:
    graph = symbolic_trace(zoo)
    before, flat = found(zoo), list(zoo.lstm._flat_weights)  # type: ignore[arg-type, union-attr]
    costs = analytic_costs(graph, [tokens], device="h100")
    before.check()
    assert all(now is then for now, then in zip(zoo.lstm._flat_weights, flat, strict=True))  # type: ignore[arg-type, union-attr]
    assert all(
        costs[name].backward > 0 for name in ("embed", "lstm", "attention", "norm", "blank_first", "linear", "frozen")
    )


def test_a_failing_node_leaves_the_model_as_it_was(found: type) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    x = torch.randn(2, 4)
    before = found(model)
    with pytest.raises(CostError, match="node _1"):
        analytic_costs(symbolic_trace(model), [x], device="cpu")
    before.check()


class Decoder(nn.Module):
    """A decoder layer with grouped attention; 20 of this width hold 70B parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.q, self.o = (
            nn.RMSNorm(width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.kv = nn.Linear(width, width // 4, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, kv = self.q(y).unflatten(-1, (128, 128)).transpose(1, 2), self.kv(y).unflatten(-1, (2, 16, 128))
        k, v = (t.transpose(1, 2).repeat_interleave(8, 1) for t in (kv[:, :, 0], kv[:, :, 1]))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm(x)
        added: Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + added


def test_a_70b_model_on_meta_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(128256, 16384), *(Decoder(16384, 57344) for _ in range(20)), nn.Linear(16384, 128256)
        ).bfloat16()
        tokens = torch.zeros(1, 4096, dtype=torch.long)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    graph = symbolic_trace(model)
    analytic_costs(symbolic_trace(model[:2]), [tokens], device="h100")  # imports and caches, once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = analytic_costs(graph, [tokens], device="h100")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert parameters > 68e9
    assert grown < 64 * 1024  # KiB
    whole = 6 * 4096 * parameters / 989.5e12
    assert sum(cost.forward + cost.backward for cost in costs.values()) == pytest.approx(whole, rel=0.3)


def test_w_has_half_of_a_product_that_leads_inward_and_nothing_of_a_norm() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    costs = analytic_costs(symbolic_trace(model), [torch.randn(512, 64)], device="cpu")
    assert [costs[name].weight_grad / costs[name].backward for name in ("_0", "_1", "_2")] == [0.0, 0.0, 0.5]


X = torch.randn(10, 10)
BYTES = 400


def kernels(work: Callable[[Tensor], object]) -> tuple[Kernel, ...]:
    log = KernelLog()
    with log:
        work(X)
    return log.take()


@pytest.mark.parametrize(
    "work",
    [lambda x: x.view(100), lambda x: x[2:], lambda x: x.t().detach(), lambda x: x.reshape(-1), torch.empty_like],
)
def test_views_and_allocations_launch_nothing(work: Callable[[Tensor], object]) -> None:
    assert kernels(work) == ()


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda x: x + x, 2 * BYTES),  # each operand is read once
        (lambda x: x + x.clone(), 2 * BYTES + 3 * BYTES),
        (lambda x: x.t().contiguous(), 2 * BYTES),
        (lambda x: x[:1].expand(10, 10) + 0, 40 + BYTES),  # what is expanded is read once
        (lambda x: torch.nn.functional.embedding(torch.tensor([1, 2]), x), 2 * 80 + 16),  # two rows, not the table
        (lambda x: torch.zeros(10, 10), BYTES),
        (lambda x: torch.empty(10, 10).copy_(x), 2 * BYTES),  # the target is written, not read
        (lambda x: torch.empty(10, 10).fill_(1), BYTES),
    ],
)
def test_bytes_moved(work: Callable[[Tensor], object], moved: int) -> None:
    assert sum(kernel.moved for kernel in kernels(work)) == moved


def test_matrix_product() -> None:
    assert kernels(lambda x: x @ x[:, :5]) == (Kernel(2 * 10 * 10 * 5, BYTES + 200 + 200, torch.float32),)


def test_the_dtype_is_that_of_the_first_floating_operand() -> None:
    assert [kernel.dtype for kernel in kernels(lambda x: x.bfloat16())] == [torch.float32]
    assert [kernel.dtype for kernel in kernels(lambda x: torch.zeros(3, dtype=torch.float64))] == [torch.float64]
    assert [kernel.dtype for kernel in kernels(lambda x: torch.zeros(3, dtype=torch.int8).bool())] == [
        torch.int8,
        torch.int8,
    ]


def test_taking_starts_anew() -> None:
    log = KernelLog()
    with log:
        X.exp()
    assert (len(log.take()), log.take()) == (1, ())


def test_convolutions_are_rated_as_torch_runs_them() -> None:
    """Before, convolutions of float32 were rated without tensor cores, though cuDNN uses them unless it is told not to."""
    spec = DeviceSpec("mine", {torch.float32: 1e9}, 1e15, 1.0, 0.0, 0.0, 1, tf32=8e9)
    model = symbolic_trace(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 8 * 8, 4)))

    def seconds() -> list[float]:
        costs = analytic_costs(model, [torch.randn(2, 4, 10, 10)], device=spec)
        return [costs["_0"].forward, costs["_0"].backward, costs["_2"].forward]

    default = seconds()
    with torch.backends.cudnn.flags(allow_tf32=False):
        exact = seconds()
    assert [a / b for a, b in zip(exact, default, strict=True)] == pytest.approx([8.0, 8.0, 1.0], rel=0.01)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert seconds()[2] == pytest.approx(exact[2] / 8, rel=0.01)
    finally:
        torch.set_float32_matmul_precision(before)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.window = nn.Linear(64, 64), nn.Buffer(torch.hann_window(16))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(self.first(x), 16, window=self.window, return_complex=True)
        return torch.istft(spectrum * spectrum.abs(), 16, window=self.window, length=64)


def test_functions_that_check_values_inside_have_a_cost() -> None:
    graph = pc.trace(Spectrum(), torch.randn(4, 64))
    costs = analytic_costs(graph, [torch.randn(4, 64)], device="h100")
    assert costs["istft"].forward > 0
    assert costs["istft"].backward > costs["istft"].forward / 2


def test_a_bag_reads_the_rows_that_it_adds_and_not_the_table() -> None:
    seconds = []
    for rows in (1_000, 1_000_000):
        with torch.device("meta"):
            bag, ids = nn.EmbeddingBag(rows, 64, sparse=True), torch.zeros(32, 4, dtype=torch.long)
        seconds.append(analytic_costs(pc.trace(bag, ids), [ids], device="h100")["embedding_bag"].forward)
    assert seconds[0] == seconds[1]


class ReadsGradients(torch.autograd.Function):
    """An identity whose backward reads values."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.isnan().any():
            raise FloatingPointError
        return gradient.clamp(-float(gradient.abs().max()), 1)


def test_a_backward_that_reads_values_counts_as_twice_its_forward() -> None:
    graph = pc.trace(CallsReader(), torch.randn(4, 8))
    (found,) = [work.reading for name, work in node_work(graph, [torch.randn(4, 8)]).items() if "reads" in name.lower()]
    assert found.backward == found.forward * 2
    assert found.forward


class CallsReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return ReadsGradients.apply(self.layer(x))


def test_a_custom_function_may_take_a_method_of_a_module() -> None:
    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):  # type: ignore[no-untyped-def]
            return function(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Run.apply(self.inner.forward, x)

    x = torch.randn(2, 4)
    assert len(pc.explain(Block(), x).kept_whole) == 0
    pc.compile(nn.Sequential(nn.Linear(4, 4), Block()), 2, example_args=(x,), cost="analytic", devices=["cpu"] * 2)
