"""Flows, differential equations, graphs, quantizers and operators, of libraries that the old zoo does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_models.foreign_entry import Registry, pixels, rows, sequence
from zoo_models.specimen import Call, Specimen

__all__ = ["specimens"]

registry = Registry("science")
add = registry.add


def specimens() -> list[Specimen]:
    return registry.found


class _Density(nn.Module):
    """A distribution as a model: the negative log-likelihood of each sample."""

    def __init__(self, flow: Any, *rest: Any) -> None:
        super().__init__()
        self.flow, self.rest = flow, rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.flow() if not hasattr(self.flow, "log_prob") else self.flow
        return -found.log_prob(x, *self.rest)  # type: ignore[no-any-return]


# -- flows --------------------------------------------------------------------------------------------------------


@add("normflows", rows(4))
def real_nvp_actnorm() -> nn.Module:
    import normflows as nf

    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 8, 4], init_zeros=False)),
            nf.flows.Permute(4, mode="swap"),
            nf.flows.ActNorm(4),
        ]
    return _Density(nf.NormalizingFlow(nf.distributions.DiagGaussian(4), layers))


@add("normflows", rows(4))
def neural_spline_flow() -> nn.Module:
    import normflows as nf

    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nf.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8, num_bins=4), nf.flows.LULinearPermute(4)]
    return _Density(nf.NormalizingFlow(nf.distributions.DiagGaussian(4, trainable=False), layers))


@add("normflows", rows(4))
def residual_flow() -> nn.Module:
    import normflows as nf

    net = nf.nets.LipschitzMLP([4, 8, 4], init_zeros=False, lipschitz_const=0.9)
    return _Density(
        nf.NormalizingFlow(
            nf.distributions.DiagGaussian(4), [nf.flows.Residual(net, reduce_memory=False), nf.flows.ActNorm(4)]
        )
    )


@add("normflows", lambda n: Call((torch.rand(n, 1, 8, 8),)))
def glow() -> nn.Module:
    import normflows as nf

    flows = [[nf.flows.GlowBlock(4, 8, split_mode="channel", scale=True) for _ in range(2)] + [nf.flows.Squeeze()]]
    base = [nf.distributions.DiagGaussian((4, 4, 4))]
    return _Density(nf.MultiscaleFlow(base, flows, [], transform=nf.transforms.Logit(0.05), class_cond=False), None)


@add("nflows", rows(4))
def masked_autoregressive_flow() -> nn.Module:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import BatchNorm, CompositeTransform, MaskedAffineAutoregressiveTransform, RandomPermutation

    parts: list[nn.Module] = []
    for _ in range(2):
        parts += [
            RandomPermutation(4),
            MaskedAffineAutoregressiveTransform(4, 8, dropout_probability=0.2),
            BatchNorm(4),
        ]
    return _Density(Flow(CompositeTransform(parts), StandardNormal([4])))


@add("zuko", rows(4))
def zuko_spline_flow() -> nn.Module:
    import zuko

    return _Density(zuko.flows.NSF(4, transforms=2, hidden_features=(8, 8)))


@add("zuko", rows(4))
def zuko_gaussianization() -> nn.Module:
    import zuko

    return _Density(zuko.flows.GF(4, transforms=2, components=3))


@add("zuko", rows(3))
def zuko_continuous_flow() -> nn.Module:
    import zuko

    return _Density(zuko.flows.CNF(3, hidden_features=(8,), exact=False))


@add("FrEIA", rows(4))
def invertible_sequence() -> nn.Module:
    import FrEIA.framework as ff
    import FrEIA.modules as fm

    net = ff.SequenceINN(4)
    for _ in range(2):
        net.append(
            fm.AllInOneBlock,
            subnet_constructor=lambda a, b: nn.Sequential(nn.Linear(a, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, b)),
        )
    return net


# -- differential equations ---------------------------------------------------------------------------------------


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.evaluations = 0

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.evaluations += 1
        return self.body(y) * (1 + t)  # type: ignore[no-any-return]


class _Integrated(nn.Module):
    def __init__(self, method: str, *, is_adjoint: bool) -> None:
        super().__init__()
        self.field, self.method, self.is_adjoint = _Field(), method, is_adjoint
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if self.is_adjoint else torchdiffeq.odeint
        times = torch.linspace(0, 1, 4, dtype=x.dtype)
        return self.head(solve(self.field, x, times, method=self.method)[-1])  # type: ignore[no-any-return]


@add("torchdiffeq", rows(4))
def ode_rk4() -> nn.Module:
    return _Integrated("rk4", is_adjoint=False)


@add("torchdiffeq", rows(4))
def ode_adaptive() -> nn.Module:
    return _Integrated("dopri5", is_adjoint=False)


@add("torchdiffeq", rows(4))
def ode_adjoint() -> nn.Module:
    return _Integrated("rk4", is_adjoint=True)


@add("torchsde", rows(3))
def sde_brownian() -> nn.Module:
    import torchsde

    class Process(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 torchsde's signature
            return self.drift(y)  # type: ignore[no-any-return]

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 torchsde's signature
            return self.spread(y).sigmoid()  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torchsde.sdeint(self, x, torch.linspace(0, 1, 3, dtype=x.dtype), dt=0.25, method="euler")[-1]  # type: ignore[no-any-return]

    return Process()


@add("torchcde", sequence(6, 3))
def controlled_equation() -> nn.Module:
    import torchcde

    class Controlled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.field, self.head = nn.Linear(3, 4), nn.Linear(4, 12), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            path = torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(x))
            start = self.start(path.evaluate(path.interval[0]))
            z = torchcde.cdeint(path, lambda _t, z: self.field(z).tanh().view(*z.shape[:-1], 4, 3), start, path.interval, adjoint=False,
                                method="rk4", options={"step_size": 0.5})  # fmt: skip
            return self.head(z[:, -1])  # type: ignore[no-any-return]

    return Controlled()


# -- quantizers ---------------------------------------------------------------------------------------------------


class _Bottleneck(nn.Module):
    def __init__(self, quantizer: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(6, width), quantizer, nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.quantizer(self.encoder(x))
        found = found if isinstance(found, tuple) else (found,)
        return (self.decoder(found[0]), *found[1:])


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def vector_quantize_ema() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    return _Bottleneck(VectorQuantize(dim=8, codebook_size=16, decay=0.8, commitment_weight=1.0))


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def vector_quantize_kmeans_dead_codes() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    return _Bottleneck(
        VectorQuantize(dim=8, codebook_size=8, kmeans_init=True, kmeans_iters=2, threshold_ema_dead_code=2)
    )


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def vector_quantize_stochastic() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    return _Bottleneck(
        VectorQuantize(
            dim=8, codebook_size=8, stochastic_sample_codes=True, sample_codebook_temp=0.5, use_cosine_sim=True
        )
    )


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def residual_quantize_dropout() -> nn.Module:
    from vector_quantize_pytorch import ResidualVQ

    return _Bottleneck(ResidualVQ(dim=8, num_quantizers=3, codebook_size=8, quantize_dropout=True))


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def finite_scalar_noise_dropout() -> nn.Module:
    from vector_quantize_pytorch import FSQ

    return _Bottleneck(FSQ(levels=[5, 4, 3], dim=8, noise_dropout=0.5, preserve_symmetry=True))


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def lookup_free() -> nn.Module:
    from vector_quantize_pytorch import LFQ

    return _Bottleneck(LFQ(dim=8, codebook_size=16, entropy_loss_weight=0.1, diversity_gamma=1.0))


@add("vector-quantize-pytorch", sequence(6, 6), sequence(9, 6))
def sim_quantize() -> nn.Module:
    from vector_quantize_pytorch import SimVQ

    return _Bottleneck(SimVQ(dim=8, codebook_size=16, rotation_trick=True))


@add("vector-quantize-pytorch", sequence(6, 6))
def latent_quantize() -> nn.Module:
    from vector_quantize_pytorch import LatentQuantize

    return LatentQuantize(levels=[5, 5, 4], dim=6)


@add("vector-quantize-pytorch", sequence(6, 6))
def random_projection() -> nn.Module:
    from vector_quantize_pytorch import RandomProjectionQuantizer

    return _Projected(RandomProjectionQuantizer(dim=6, codebook_size=8, codebook_dim=4, num_codebooks=1))


class _Projected(nn.Module):
    """Predicts the codes that a frozen quantizer gives: BEST-RQ."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.quantizer, self.body, self.dropout = quantizer, nn.Linear(6, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.quantizer(x)
        return nn.functional.cross_entropy(
            self.body(self.dropout(x)).transpose(1, 2), codes.view(len(x), -1), reduction="none"
        )


# -- graphs -------------------------------------------------------------------------------------------------------


def _ring(nodes: int) -> torch.Tensor:
    steps = torch.arange(nodes)
    return torch.cat([torch.stack([steps, (steps + 1) % nodes]), torch.stack([(steps + 1) % nodes, steps])], 1)


def _shared_graph(nodes: int) -> Any:
    return lambda n: Call((torch.randn(n, nodes, 5),), {"edge_index": _ring(nodes)})


class _Shared(nn.Module):
    """Graph convolutions of a batch of node features on one graph."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(layers), 0.2

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x, edge_index).relu(), self.rate, self.training)
        return x


@add("torch_geometric", _shared_graph(6), _shared_graph(8), dims={"edge_index": None})
def graph_convolutions() -> nn.Module:
    from torch_geometric.nn import GCNConv, SAGEConv

    return _Shared(GCNConv(5, 8), SAGEConv(8, 8), GCNConv(8, 4))


@add("torch_geometric", _shared_graph(6), _shared_graph(8), dims={"edge_index": None})
def graph_chebyshev() -> nn.Module:
    from torch_geometric.nn import ChebConv, GraphConv, TAGConv

    return _Shared(ChebConv(5, 8, K=2), TAGConv(8, 8), GraphConv(8, 4))


class _Union(nn.Module):
    """A batch of graphs of equal shape, as one disjoint union that the forward makes."""

    def __init__(self, body: Any, pool: Any, out: int) -> None:
        super().__init__()
        self.body, self.pool, self.head = body, pool, nn.Linear(out, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        count, nodes, width = x.shape
        offsets = torch.arange(count).mul(nodes).view(-1, 1, 1)
        edges = (edge_index.unsqueeze(0) + offsets).permute(1, 0, 2).reshape(2, -1)
        batch = torch.arange(count).repeat_interleave(nodes)
        x = self.body(x.reshape(-1, width), edges)
        return self.head(self.pool(x, batch, count))  # type: ignore[no-any-return]


@add("torch_geometric", _shared_graph(6), _shared_graph(8), dims={"edge_index": None})
def graph_attention_union() -> nn.Module:
    from torch_geometric.nn import GAT, global_mean_pool

    return _Union(GAT(5, 8, 2, dropout=0.2, heads=2), global_mean_pool, 8)


@add("torch_geometric", _shared_graph(6), _shared_graph(8), dims={"edge_index": None})
def graph_isomorphism_union() -> nn.Module:
    from torch_geometric.nn import GIN, global_add_pool

    return _Union(GIN(5, 8, 2, dropout=0.2, norm="batch_norm"), global_add_pool, 8)


@add("torch_geometric", _shared_graph(6), dims={"edge_index": None})
def graph_pna_union() -> nn.Module:
    from torch_geometric.nn import PNA, global_max_pool

    return _Union(PNA(5, 8, 2, dropout=0.2, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
                      deg=torch.tensor([0, 0, 6])), global_max_pool, 8)  # fmt: skip


@add("torch_geometric", _shared_graph(6), dims={"edge_index": None})
def graph_top_k_union() -> nn.Module:
    from torch_geometric.nn import GCNConv, TopKPooling, global_mean_pool

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.top, self.head = GCNConv(5, 8), TopKPooling(8, ratio=0.5), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            count, nodes, width = x.shape
            edges = (
                (edge_index.unsqueeze(0) + torch.arange(count).mul(nodes).view(-1, 1, 1))
                .permute(1, 0, 2)
                .reshape(2, -1)
            )
            batch = torch.arange(count).repeat_interleave(nodes)
            h = self.conv(x.reshape(-1, width), edges).relu()
            h, _, _, batch, _, _ = self.top(h, edges, batch=batch)
            return self.head(global_mean_pool(h, batch, count))  # type: ignore[no-any-return]

    return Pooled()


@add(
    "torch_geometric",
    lambda n: Call((torch.randn(n, 6, 5), torch.rand(n, 6, 6).round())),
    lambda n: Call((torch.randn(n, 7, 5), torch.rand(n, 7, 7).round())),
)
def dense_diff_pool() -> nn.Module:
    from torch_geometric.nn import DenseGCNConv, DenseSAGEConv, dense_diff_pool

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.assign, self.last = DenseSAGEConv(5, 8), DenseGCNConv(5, 3), DenseGCNConv(8, 4)

        def forward(self, x: torch.Tensor, adj: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h, adj, _, entropy = dense_diff_pool(self.embed(x, adj).relu(), adj, self.assign(x, adj))
            return self.last(h, adj).mean(1), entropy

    return Pooled()


@add("torch_geometric", lambda n: Call((torch.randint(1, 9, (n, 5)), torch.randn(n, 5, 3))))
def schnet_union() -> nn.Module:
    from torch_geometric.nn import SchNet
    from torch_geometric.nn.models.schnet import InteractionBlock

    class Edges(nn.Module):
        def __init__(self, cutoff: float) -> None:
            super().__init__()
            self.cutoff = cutoff

        def forward(self, pos: torch.Tensor, _batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            count = int(len(pos) / 5)
            one = torch.cartesian_prod(torch.arange(5), torch.arange(5))
            one = one[one[:, 0] != one[:, 1]].t()
            edges = (one.unsqueeze(0) + torch.arange(count).mul(5).view(-1, 1, 1)).permute(1, 0, 2).reshape(2, -1)
            return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)

    class Atoms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SchNet(
                hidden_channels=8, num_filters=8, num_interactions=2, num_gaussians=6, interaction_graph=Edges(10.0)
            )

        def forward(self, z: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            batch = torch.arange(len(z)).repeat_interleave(5)
            return self.body(z.reshape(-1), pos.reshape(-1, 3), batch)  # type: ignore[no-any-return]

    assert InteractionBlock
    return Atoms()


@add(
    "egnn-pytorch",
    lambda n: Call((torch.randint(0, 9, (n, 6)), torch.randn(n, 6, 3))),
    lambda n: Call((torch.randint(0, 9, (n, 8)), torch.randn(n, 8, 3))),
)
def egnn() -> nn.Module:
    from egnn_pytorch import EGNN_Network

    return EGNN_Network(
        num_tokens=9,
        dim=8,
        depth=2,
        num_nearest_neighbors=3,
        norm_coors=True,
        coor_weights_clamp_value=2.0,
        dropout=0.1,
    )


@add("point-transformer-pytorch", lambda n: Call((torch.randn(n, 8, 12), torch.randn(n, 8, 3))))
def point_transformer() -> nn.Module:
    from point_transformer_pytorch import PointTransformerLayer

    return PointTransformerLayer(dim=12, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=4)


# -- operators, Bayes, kernels ------------------------------------------------------------------------------------


@add("neuraloperator", pixels(16, 1), pixels(24, 1))
def fourier_operator() -> nn.Module:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2, channel_mlp_dropout=0.2)


@add("neuraloperator", pixels(16, 1))
def u_shaped_operator() -> nn.Module:
    from neuralop.models import UNO

    return UNO(
        1,
        1,
        8,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        n_layers=3,
        channel_mlp_skip="linear",
    )


@add("bayesian-torch", rows(6))
def bayesian_reparameterized() -> nn.Module:
    from bayesian_torch.layers import LinearFlipout, LinearReparameterization

    class Bayes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = LinearReparameterization(6, 8), LinearFlipout(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, first = self.one(x)
            x, second = self.two(x.relu())
            return x, first + second

    return Bayes()


@add("pykan", rows(4))
def kolmogorov_arnold() -> nn.Module:
    from kan import KAN

    return KAN(width=[4, 5, 2], grid=3, k=3, auto_save=False, noise_scale=0.1, save_act=False)


@add("gpytorch", rows(3))
def deep_kernel() -> nn.Module:
    from gpytorch.kernels import RBFKernel, ScaleKernel

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kernel = (
                nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)),
                ScaleKernel(RBFKernel()),
            )
            self.register_buffer("inducing", torch.randn(5, 2))
            self.mean = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mean(self.kernel(self.body(x), self.inducing).to_dense())  # type: ignore[no-any-return]

    return Kernel()


@add("e3nn", rows(10))
def equivariant_linear() -> nn.Module:
    from e3nn import nn as e3
    from e3nn import o3

    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gate = e3.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
            self.mix, self.gate = o3.Linear("4x0e+2x1o", gate.irreps_in), gate
            self.norm, self.last = e3.BatchNorm(gate.irreps_out), o3.Linear(gate.irreps_out, "3x0e+1x1o")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.gate(self.mix(x))))  # type: ignore[no-any-return]

    return Equivariant()


@add("pyro-ppl", rows(5))
def variational_encoder() -> nn.Module:
    from pyro.distributions import Normal
    from pyro.nn import AutoRegressiveNN, DenseNN

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.auto, self.decoder = DenseNN(5, [8], [3, 3]), AutoRegressiveNN(3, [6]), nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            location, scale = self.body(x)
            z = Normal(location, scale.exp()).rsample()
            mean, log_scale = self.auto(z)
            return self.decoder(z), Normal(mean, log_scale.exp()).log_prob(z).sum(-1)

    return Encoder()


@add("tensorly-torch", pixels(16))
def factorized_convolutions() -> nn.Module:
    from tltorch import FactorizedConv, FactorizedLinear

    model = nn.Sequential(FactorizedConv(3, 6, 3, order=2, rank=0.5, factorization="cp"), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                          FactorizedLinear((4, 6), (2, 3), rank=0.5, factorization="blocktt"), nn.Dropout(0.2))  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model
