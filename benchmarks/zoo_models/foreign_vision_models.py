"""Vision models of libraries that the old zoo does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_models.foreign_entry import Registry, clip_images, pixels, rows
from zoo_models.specimen import Call, Specimen

__all__ = ["specimens"]

registry = Registry("vision")
add = registry.add

_VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 3,
    "heads": 2,
    "mlp_dim": 48,
}
_DROPS: dict[str, Any] = {"dropout": 0.2, "emb_dropout": 0.2}


def specimens() -> list[Specimen]:
    return registry.found


# -- vit-pytorch --------------------------------------------------------------------------------------------------


@add("vit-pytorch", pixels(32))
def vit() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(**_VIT, **_DROPS)


@add("vit-pytorch", pixels(32))
def simple_vit() -> nn.Module:
    from vit_pytorch import SimpleViT

    return SimpleViT(**_VIT)


@add("vit-pytorch", pixels(32))
def cait_layer_dropout() -> nn.Module:
    from vit_pytorch.cait import CaiT

    return CaiT(**_VIT, **_DROPS, cls_depth=2, layer_dropout=0.3)


@add("vit-pytorch", pixels(32))
def xcit_layer_dropout() -> nn.Module:
    from vit_pytorch.xcit import XCiT

    return XCiT(**_VIT, **_DROPS, cls_depth=2, layer_dropout=0.3)


@add("vit-pytorch", pixels(32))
def vit_patch_dropout() -> nn.Module:
    from vit_pytorch.vit_with_patch_dropout import ViT

    return ViT(**_VIT, **_DROPS, patch_dropout=0.25)


@add("vit-pytorch", pixels(64))
def max_vit() -> nn.Module:
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(num_classes=5, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4, dropout=0.2)


@add("vit-pytorch", pixels(64))
def crossformer() -> nn.Module:
    from vit_pytorch.crossformer import CrossFormer

    return CrossFormer(
        num_classes=5, dim=(32, 32, 32, 32), depth=(1, 1, 2, 1), global_window_size=(4, 2, 2, 1), local_window_size=(4, 4, 2, 2),
        cross_embed_kernel_sizes=((4, 8), (2, 4), (2, 4), (2, 4)), attn_dropout=0.2, ff_dropout=0.2,
    )  # fmt: skip


@add("vit-pytorch", pixels(32))
def nest() -> nn.Module:
    from vit_pytorch.nest import NesT

    return NesT(
        image_size=32,
        patch_size=4,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=5,
        dropout=0.2,
    )


@add("vit-pytorch", pixels(224))
def region_vit() -> nn.Module:
    from vit_pytorch.regionvit import RegionViT

    return RegionViT(
        dim=(8, 8, 8, 16), depth=(1, 1, 1, 1), window_size=7, num_classes=5, attn_dropout=0.2, ff_dropout=0.2
    )


@add("vit-pytorch", pixels(32))
def deep_vit() -> nn.Module:
    from vit_pytorch.deepvit import DeepViT

    return DeepViT(**_VIT, **_DROPS)


@add("vit-pytorch", pixels(32))
def mae_random_masks() -> nn.Module:
    from vit_pytorch import MAE, ViT

    return MAE(encoder=ViT(**_VIT, pool="mean"), masking_ratio=0.5, decoder_dim=24, decoder_depth=1)


@add("vit-pytorch", pixels(32))
def normalized_vit() -> nn.Module:
    from vit_pytorch.normalized_vit import nViT

    return nViT(**_VIT, dropout=0.2)


@add("vit-pytorch", pixels(32))
def decorrelated_vit() -> nn.Module:
    from vit_pytorch.vit_with_decorr import ViT

    return ViT(**_VIT, **_DROPS, decorr_sample_frac=0.5)


@add("vit-pytorch", pixels(32))
def sparse_gating_vit() -> nn.Module:
    from vit_pytorch.simple_vit_with_sparse_gating import SimpleViTWithSparseGating

    return SimpleViTWithSparseGating(**_VIT)


@add("vit-pytorch", pixels(32))
def hyper_connected_vit() -> nn.Module:
    from vit_pytorch.simple_vit_with_hyper_connections import SimpleViT

    return SimpleViT(**_VIT, num_residual_streams=2)


@add("vit-pytorch", pixels(32))
def register_token_vit() -> nn.Module:
    from vit_pytorch.simple_vit_with_register_tokens import SimpleViT

    return SimpleViT(**_VIT)


@add("vit-pytorch", pixels(32))
def jumbo_vit() -> nn.Module:
    from vit_pytorch.jumbo_vit import JumboViT

    return JumboViT(**_VIT)


@add("vit-pytorch", pixels(32))
def small_dataset_vit() -> nn.Module:
    from vit_pytorch.vit_for_small_dataset import ViT

    return ViT(**_VIT, **_DROPS)


@add("vit-pytorch", pixels(64))
def twins_svt() -> nn.Module:
    from vit_pytorch.twins_svt import TwinsSVT

    return TwinsSVT(
        num_classes=5, s1_emb_dim=8, s1_local_patch_size=4, s1_global_k=4, s2_emb_dim=16, s2_local_patch_size=4, s2_global_k=4,
        s3_emb_dim=16, s3_local_patch_size=2, s3_global_k=2, s3_depth=1, s4_emb_dim=16, s4_local_patch_size=1, s4_global_k=1, dropout=0.2,
    )  # fmt: skip


@add("vit-pytorch", lambda n: Call((torch.rand(n, 3, 4, 32, 32),)))
def vivit() -> nn.Module:
    from vit_pytorch.vivit import ViViT

    return ViViT(
        image_size=32, frames=4, image_patch_size=8, frame_patch_size=2, num_classes=5, dim=32, spatial_depth=2, temporal_depth=2,
        heads=2, mlp_dim=32, dropout=0.2, emb_dropout=0.2,
    )  # fmt: skip


@add("vit-pytorch", pixels(64))
def mobile_vit() -> nn.Module:
    from vit_pytorch.mobile_vit import MobileViT

    return MobileViT(
        image_size=(64, 64),
        dims=[16, 24, 32],
        channels=[4, 8, 8, 8, 12, 12, 16, 16, 16, 16, 32],
        num_classes=5,
        depths=(1, 1, 1),
    )


# -- diffusers ----------------------------------------------------------------------------------------------------


def _noised(size: int, channels: int, **rest: Any) -> Any:
    return lambda n: Call((torch.randn(n, channels, size, size), torch.randint(0, 100, (n,))), rest)


def _conditioned(size: int, channels: int, length: int, width: int) -> Any:
    return lambda n: Call(
        (torch.randn(n, channels, size, size), torch.randint(0, 100, (n,)), torch.randn(n, length, width))
    )


@add("diffusers", _noised(16, 3), _noised(32, 3))
def unet_2d() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4, dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


@add("diffusers", _conditioned(16, 4, 5, 12), _conditioned(16, 4, 7, 12))
def unet_2d_condition() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4, cross_attention_dim=12,
        dropout=0.1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


@add(
    "diffusers",
    lambda n: Call((torch.rand(n, 3, 16, 16),), {"sample_posterior": True}),
    lambda n: Call((torch.rand(n, 3, 24, 24),), {"sample_posterior": True}),
)
def autoencoder_kl_sampled() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


@add("diffusers", pixels(16))
def vq_model() -> nn.Module:
    from diffusers import VQModel

    return VQModel(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=3, num_vq_embeddings=16,
                   down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip


@add(
    "diffusers",
    lambda n: Call(
        (torch.randn(n, 4, 8, 8),), {"timestep": torch.randint(0, 100, (n,)), "class_labels": torch.arange(n) % 4}
    ),
)
def dit_class_dropout() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, dropout=0.1, sample_size=8, patch_size=2,
        num_embeds_ada_norm=100,
    )  # fmt: skip


@add(
    "diffusers",
    lambda n: Call(
        (torch.randn(n, 6, 16), torch.rand(n) * 100, torch.randn(n, 16)),
        {"encoder_hidden_states": torch.randn(n, 5, 16)},
    ),
)
def prior_transformer() -> nn.Module:
    from diffusers import PriorTransformer

    model: nn.Module = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=9,
        dropout=0.1,
    )
    return model


@add(
    "diffusers",
    lambda n: Call((torch.randn(n, 4, 8, 8), torch.randn(n, 5, 12), torch.randn(n, 16), torch.randint(0, 100, (n,)))),
)
def sd3_transformer() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12,
        caption_projection_dim=16, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip


@add("diffusers", lambda n: Call((torch.randn(n, 2, 4, 8, 8), torch.randint(0, 100, (n,)), torch.randn(n, 5, 8))))
def unet_3d_condition() -> nn.Module:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        in_channels=2, out_channels=2, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        cross_attention_dim=8, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )  # fmt: skip


@add("denoising-diffusion-pytorch", pixels(16))
def gaussian_diffusion() -> nn.Module:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    return GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False, dropout=0.1), image_size=16, timesteps=50)


@add("denoising-diffusion-pytorch", lambda n: Call((torch.randn(n, 3, 16, 16), torch.randint(0, 50, (n,)))))
def denoising_unet() -> nn.Module:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=8, dim_mults=(1, 2), flash_attn=False, dropout=0.1)


# -- monai, kornia, ultralytics, open_clip -------------------------------------------------------------------------


@add("monai", pixels(32, 1), pixels(48, 1))
def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, dropout=0.2
    )


@add("monai", pixels(32, 1))
def unetr() -> nn.Module:
    from monai.networks.nets import UNETR

    return UNETR(
        1, 2, (32, 32), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2, dropout_rate=0.2, spatial_dims=2
    )


@add("monai", pixels(64, 1))
def swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2),
        drop_rate=0.1, attn_drop_rate=0.1, dropout_path_rate=0.3,
    )  # fmt: skip


@add("monai", rows(1, 16, 16, 16))
def segresnet_vae() -> nn.Module:
    from monai.networks.nets import SegResNetVAE

    return SegResNetVAE((16, 16, 16), init_filters=8, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=0.2)


@add("monai", pixels(32, 1))
def variational_autoencoder() -> nn.Module:
    from monai.networks.nets import VarAutoEncoder

    return VarAutoEncoder(2, (1, 32, 32), 1, latent_size=4, channels=(4, 8), strides=(2, 2), dropout=0.1)


@add("monai", pixels(32, 1), pixels(64, 1))
def monai_densenet() -> nn.Module:
    from monai.networks.nets import DenseNet

    return DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2), dropout_prob=0.2)


@add("monai", pixels(32, 1))
def monai_vqvae() -> nn.Module:
    from monai.networks.nets import VQVAE

    return VQVAE(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8), num_res_channels=(8, 8), num_res_layers=1,
                 downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2, num_embeddings=16, embedding_dim=4,
                 dropout=0.1)  # fmt: skip


@add("monai", pixels(32, 1))
def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(
        2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), dropout=0.1, deep_supervision=True, deep_supr_num=1
    )


@add("kornia", pixels(32))
def kornia_augmented() -> nn.Module:
    import kornia.augmentation as augment
    from kornia.models.vit import VisionTransformer

    body = VisionTransformer(
        image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, dropout_rate=0.1, dropout_attn=0.1
    )
    return nn.Sequential(augment.RandomHorizontalFlip(p=0.5), augment.RandomErasing(p=0.5), body)


@add("kornia", pixels(32))
def kornia_blurred() -> nn.Module:
    from kornia.filters import GaussianBlur2d, Sobel

    return nn.Sequential(
        nn.Conv2d(3, 4, 3), GaussianBlur2d((3, 3), (1.5, 1.5)), nn.ReLU(), Sobel(), nn.Conv2d(4, 2, 3), nn.Dropout(0.2)
    )


@add("kornia", pixels(32, 1))
def hardnet() -> nn.Module:
    from kornia.feature import HardNet

    return HardNet(pretrained=False)


@add("kornia", pixels(64))
def tiny_vit() -> nn.Module:
    from kornia.models.tiny_vit import TinyViT

    return TinyViT(img_size=64, num_classes=5, embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
                   window_sizes=(2, 2, 2, 2), drop_path_rate=0.3)  # fmt: skip


@add("ultralytics", pixels(64), pixels(96))
def yolo_detect() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolov8n.yaml", nc=3, verbose=False)


@add("ultralytics", pixels(64))
def yolo_classify() -> nn.Module:
    from ultralytics.nn.tasks import ClassificationModel

    return ClassificationModel("yolov8n-cls.yaml", nc=5, verbose=False)


@add("ultralytics", pixels(64), pixels(96))
def yolo11_segment() -> nn.Module:
    from ultralytics.nn.tasks import SegmentationModel

    return SegmentationModel("yolo11n-seg.yaml", nc=3, verbose=False)


@add("ultralytics", pixels(64))
def yolo12_detect() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolo12n.yaml", nc=3, verbose=False)


@add("open_clip_torch", clip_images(32, 12))
def clip_patch_dropout() -> nn.Module:
    from open_clip.model import CLIP

    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, "patch_dropout": 0.4}
    return CLIP(16, vision, {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2})


@add("open_clip_torch", clip_images(32, 12))
def clip_resnet() -> nn.Module:
    from open_clip.model import CLIP

    vision = {"image_size": 32, "layers": (1, 1, 1, 1), "width": 8, "head_width": 16}
    return CLIP(16, vision, {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2})


@add("open_clip_torch", clip_images(32, 12))
def open_coca() -> nn.Module:
    from open_clip.coca_model import CoCa

    text = {
        "context_length": 12,
        "vocab_size": 64,
        "width": 32,
        "heads": 2,
        "layers": 2,
        "embed_cls": True,
        "output_tokens": True,
    }
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, "attentional_pool": True,
              "attn_pooler_heads": 2, "output_tokens": True}  # fmt: skip
    model = CoCa(32, {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}, text, vision)
    for parameter in (model.text.cls_emb, model.text_decoder.text_projection):  # the library leaves them uninitialised
        nn.init.normal_(parameter, std=0.1)
    return model


# -- others -------------------------------------------------------------------------------------------------------


@add("mlp-mixer-pytorch", pixels(32))
def mlp_mixer() -> nn.Module:
    from mlp_mixer_pytorch import MLPMixer

    model: nn.Module = MLPMixer(image_size=32, channels=3, patch_size=8, dim=24, depth=3, num_classes=5, dropout=0.2)
    return model


@add("g-mlp-pytorch", pixels(32))
def gmlp_vision() -> nn.Module:
    from g_mlp_pytorch import gMLPVision

    return gMLPVision(image_size=32, patch_size=8, num_classes=5, dim=24, depth=3, prob_survival=0.7)


@add("lambda-networks", rows(8, 8, 8))
def lambda_layers() -> nn.Module:
    from lambda_networks import LambdaLayer

    return nn.Sequential(LambdaLayer(dim=8, dim_out=8, r=5, dim_k=4, heads=2, dim_u=1), nn.GELU(), nn.Conv2d(8, 4, 1))


@add("bottleneck-transformer-pytorch", rows(16, 8, 8))
def bottleneck_stack() -> nn.Module:
    from bottleneck_transformer_pytorch import BottleStack

    return BottleStack(dim=16, fmap_size=8, dim_out=32, proj_factor=4, downsample=True, heads=2, dim_head=8)


@add("axial-attention", rows(12, 8, 8))
def axial_image_reversible() -> nn.Module:
    from axial_attention import AxialImageTransformer

    return nn.Sequential(nn.Conv2d(12, 12, 1), AxialImageTransformer(dim=12, depth=2, heads=2, reversible=True))


@add("perceiver-pytorch", lambda n: Call((torch.rand(n, 16, 16, 3),)), lambda n: Call((torch.rand(n, 20, 20, 3),)))
def perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=6, latent_dim=16, cross_dim_head=8,
        latent_heads=2, latent_dim_head=8, num_classes=5, attn_dropout=0.2, ff_dropout=0.2, weight_tie_layers=True,
    )  # fmt: skip


@add("timesformer-pytorch", lambda n: Call((torch.rand(n, 2, 3, 32, 32),)))
def timesformer() -> nn.Module:
    from timesformer_pytorch import TimeSformer

    return TimeSformer(dim=16, image_size=32, patch_size=8, num_frames=2, num_classes=5, depth=2, heads=2, dim_head=8,
                       attn_dropout=0.1, ff_dropout=0.1)  # fmt: skip


@add("byol-pytorch", pixels(32))
def byol_moving_average() -> nn.Module:
    from byol_pytorch import BYOL
    from torchvision.models import resnet18

    return BYOL(
        resnet18(num_classes=8), image_size=32, hidden_layer="avgpool", projection_size=16, projection_hidden_size=32
    )


@add("efficientnet_pytorch", pixels(64), pixels(96))
def efficientnet_drop_connect() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", {"num_classes": 5, "drop_connect_rate": 0.3})


@add("pytorchcv", pixels(32))
def cv_resnet() -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model("resnet20_cifar10")


@add("pytorchcv", pixels(32))
def cv_shake_resnet() -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model("shakeshakeresnet20_2x16d_cifar10")


@add("pytorchcv", pixels(32))
def cv_stochastic_depth() -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model("resnetd50b", in_size=(64, 64), num_classes=5)


@add("compressai", pixels(64))
def factorized_prior_noise() -> nn.Module:
    from compressai.models import FactorizedPrior

    return FactorizedPrior(8, 12)


@add("compressai", pixels(64))
def mean_scale_hyperprior_noise() -> nn.Module:
    from compressai.models import MeanScaleHyperprior

    return MeanScaleHyperprior(8, 12)


@add("lightly", pixels(32))
def simsiam() -> nn.Module:
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
    from torchvision.models import resnet18

    return nn.Sequential(resnet18(num_classes=16), SimSiamProjectionHead(16, 16, 8), SimSiamPredictionHead(8, 8, 8))


@add("lpips", lambda n: Call((torch.rand(n, 3, 64, 64), torch.rand(n, 3, 64, 64))))
def lpips_distance() -> nn.Module:
    import lpips

    return lpips.LPIPS(
        pretrained=False, net="squeeze", pnet_rand=True, verbose=False, use_dropout=True, eval_mode=False
    )


@add("snntorch", rows(1, 12, 12))
def spiking_convolutions() -> nn.Module:
    import snntorch as snn

    layers = (nn.Conv2d(1, 4, 3), snn.Leaky(beta=0.9), nn.Flatten(), nn.Linear(400, 10), snn.Leaky(beta=0.8))

    class Steps(nn.Module):
        """Three steps of time from silent neurons."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layers[1].init_leaky(), self.layers[4].init_leaky()
            spikes = []
            for _ in range(3):
                spike, first = self.layers[1](self.layers[0](x), first)
                spike, second = self.layers[4](self.layers[3](self.layers[2](spike)), second)
                spikes.append(spike + second)
            return torch.stack(spikes, 1)

    return Steps()


@add("spikingjelly", rows(2, 12, 12))
def spiking_layers() -> nn.Module:
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    spiking = neuron.LIFNode(surrogate_function=surrogate.ATan())
    layers = (layer.Conv2d(2, 4, 3), spiking, layer.Flatten(), layer.Dropout(0.3), layer.Linear(400, 5))

    class Steps(nn.Module):
        """Three steps of time; the neurons and the dropout keep their state between the steps alone."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            functional.reset_net(self.body)
            return torch.stack([self.body(x) for _ in range(3)]).mean(0)

    return Steps()
