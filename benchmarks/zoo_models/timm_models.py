"""timm: the smallest model of every module, which is what timm calls a family."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from torch import nn

from zoo_models.specimen import Specimen, images

__all__ = ["specimens"]

MODELS = (
    "beit_base_patch16_224 halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 "
    "convnext_zepto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny "
    "deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46_c dpn48b edgenext_x_small efficientformer_l1 "
    "efficientformerv2_s0 mnasnet_050 efficientvim_m1 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb "
    "fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 "
    "hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 "
    "inception_v4 lcnetv2_small levit_128s lowformer_b0 test_mambaout test_coatnet poolformerv2_s12 gmlp_ti16_224 "
    "lcnet_035 mobilenetv5_base mobilevit_xs mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny "
    "nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 "
    "repvit_m1 res2next50 resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s "
    "shvit_s1 skresnet18 starnet_s1 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 "
    "swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny "
    "test_vit vit_tiny_r_s16_p8_224 test_vit_relpos samvit_base_patch16_224 vitamin_small_224 volo_d1_224 "
    "ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224"
)
"""A model of each of the modules of timm that register models."""

RESIZED = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0 "
    "gcvit_xxtiny hiera_tiny_224 levit_128s test_coatnet gmlp_ti16_224 nest_tiny pit_ti_224 "
    "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 visformer_tiny "
    "vit_tiny_r_s16_p8_224 test_vit_relpos vitamin_small_224 volo_d1_224"
)
"""Those that must be told the size of the image."""

SIZES = {
    "halonet_h1": 256,
    "deepseek_vit_412m": 112,
    "efficientformer_l1": 224,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
}
"""Pixels a side; 64 where nothing is said."""

OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_vit_412m": {"depth": 2},
    "gemma4_vit_167m": {"depth": 2},
    "naflexvit_base_patch16_parfac_gap": {"depth": 3},
    "qwen3_vit_88m": {"depth": 3},
    "beit_base_patch16_224": {"depth": 3},
    "samvit_base_patch16_224": {"depth": 3},
}
"""Fewer blocks for the largest."""


def specimens() -> list[Specimen]:
    return [
        Specimen(
            "timm",
            str(timm.models.model_entrypoint(name).__module__).rpartition(".")[2],
            name,
            partial(_build, name),
            images(SIZES.get(name, 64)),
        )
        for name in MODELS.split()
    ]


def _build(name: str) -> nn.Module:
    options: dict[str, Any] = {"img_size": SIZES.get(name, 64)} if name in RESIZED.split() else {}
    model: nn.Module = timm.create_model(name, num_classes=10, **options, **OPTIONS.get(name, {}))
    return model
