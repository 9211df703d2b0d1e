"""Families of transformers with more than one kind of input, or with inputs of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from zoo_models.specimen import Call
from zoo_models.transformers_shapes import small

__all__ = ["PAIRS"]

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
        "max_position_embeddings": 64, "projection_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "num_key_value_heads": 2, "use_cache": False}  # fmt: skip
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
         "patch_size": 8, "projection_dim": 16}  # fmt: skip
PATCHES, PICTURE = 16, 95
"""How many patches an image of 32 pixels has, and the token that stands for one."""


def _texts(n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (n, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _two_towers(n: int) -> Call:
    return Call((), _texts(n) | {"pixel_values": torch.randn(n, 3, 32, 32), "return_loss": True})


def _captions(n: int) -> Call:
    texts = _texts(n)
    return Call((), texts | {"pixel_values": torch.randn(n, 3, 32, 32), "labels": texts["input_ids"].clone()})


def _llava(n: int) -> Call:
    words = torch.randint(3, 90, (n, 8))
    ids = torch.cat([torch.full((n, PATCHES), PICTURE), words], 1)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(n, 3, 32, 32)}
    return Call((), kwargs | {"labels": ids.clone()})


def _speech(n: int) -> Call:
    return Call((), {"input_features": torch.randn(n, 16, 32), "labels": torch.randint(3, 90, (n, 6))})


def _frames(n: int) -> Call:
    return Call((), {"pixel_values": torch.randn(n, 2, 3, 32, 32), "labels": torch.arange(n) % 2})


def _pixels(side: int, labels: bool = False) -> Callable[[int], Call]:
    def inputs(n: int) -> Call:
        kwargs = {"pixel_values": torch.randn(n, 3, side, side)}
        return Call((), kwargs | ({"labels": torch.randint(0, 2, (n, side, side))} if labels else {}))

    return inputs


def _masked(n: int) -> Call:
    return Call((), {"pixel_values": torch.randn(n, 3, 32, 32), "noise": torch.rand(n, PATCHES)})


def _spectrogram(n: int) -> Call:
    return Call((), {"input_values": torch.randn(n, 32, 16), "labels": torch.arange(n) % 2})


def _series(n: int) -> Call:
    return Call((), {"past_values": torch.randn(n, 32, 3), "future_values": torch.randn(n, 8, 3)})


def _play(n: int) -> Call:
    steps = torch.arange(6).repeat(n, 1)
    return Call((), {"states": torch.randn(n, 6, 5), "actions": torch.randn(n, 6, 3), "rewards": torch.randn(n, 6, 1),
                     "returns_to_go": torch.randn(n, 6, 1), "timesteps": steps, "attention_mask": torch.ones(n, 6)})  # fmt: skip


def _boxes(n: int) -> Call:
    texts = _texts(n)
    boxes = torch.randint(0, 50, (n, 12, 2)).repeat(1, 1, 2) + torch.tensor([0, 0, 5, 5])
    return Call((), texts | {"bbox": boxes, "pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.arange(n) % 2})


def _towers(name: str, **more: Any) -> Any:
    return getattr(transformers, name)(text_config=TEXT, vision_config=IMAGE, **more)


def _config(name: str, **more: Any) -> Any:
    return small(getattr(transformers, name), **more)


def _llava_config() -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**IMAGE), text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=PICTURE, vision_feature_select_strategy="default", vision_feature_layer=-1, use_cache=False,
    )  # fmt: skip


def _detr_config() -> Any:
    backbone = transformers.ResNetConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], embedding_size=8,
                                         out_features=["stage4"])  # fmt: skip
    return small(
        transformers.DetrConfig, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone,
        backbone=None, num_queries=5,
    )  # fmt: skip


def _vision_encoder_decoder() -> Any:
    decoder = small(transformers.GPT2Config, add_cross_attention=True, is_decoder=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        small(transformers.ViTConfig), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


_SPEECH = {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "input_feat_per_channel": 16}
_SERIES = {"context_length": 32, "prediction_length": 8, "num_input_channels": 3, "patch_length": 8, "patch_stride": 8}

PAIRS: dict[str, tuple[str, Callable[[], Any], Callable[[int], Call]]] = {
    "CLIPModel": ("multimodal", partial(_towers, "CLIPConfig"), _two_towers),
    "SiglipModel": ("multimodal", partial(_towers, "SiglipConfig"), _two_towers),
    "AltCLIPModel": ("multimodal", partial(_towers, "AltCLIPConfig"), _two_towers),
    "ChineseCLIPModel": ("multimodal", partial(_towers, "ChineseCLIPConfig"), _two_towers),
    "BlipForConditionalGeneration": ("multimodal", partial(_towers, "BlipConfig"), _captions),
    "GitForCausalLM": ("multimodal", lambda: transformers.GitConfig(vision_config=IMAGE, **TEXT), _captions),
    "LlavaForConditionalGeneration": ("multimodal", _llava_config, _llava),
    "VisionEncoderDecoderModel": ("multimodal", _vision_encoder_decoder,
                                  lambda n: Call((), {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(3, 90, (n, 8))})),
    "LayoutLMv3ForSequenceClassification": ("multimodal", partial(_config, "LayoutLMv3Config", input_size=32, coordinate_size=5, shape_size=6), _boxes),
    "WhisperForConditionalGeneration": ("audio", partial(_config, "WhisperConfig", **_SPEECH), _speech),
    "Speech2TextForConditionalGeneration": ("audio", partial(_config, "Speech2TextConfig", conv_channels=16, **_SPEECH),
                                            lambda n: Call((), {"input_features": torch.randn(n, 32, 16), "labels": torch.randint(3, 90, (n, 6))})),
    "ASTForAudioClassification": ("audio", partial(_config, "ASTConfig", max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8), _spectrogram),
    "TimesformerForVideoClassification": ("video", partial(_config, "TimesformerConfig", num_frames=2), _frames),
    "VideoMAEForVideoClassification": ("video", partial(_config, "VideoMAEConfig", num_frames=2, tubelet_size=2), _frames),
    "VivitForVideoClassification": ("video", partial(_config, "VivitConfig", num_frames=2, tubelet_size=[2, 8, 8]), _frames),
    "ViTMAEForPreTraining": ("vision", partial(_config, "ViTMAEConfig", decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=48), _masked),
    "SegformerForSemanticSegmentation": ("vision", partial(_config, "SegformerConfig", num_attention_heads=[1, 1, 2, 2], hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=32, patch_size=None), _pixels(32, labels=True)),
    "DPTForDepthEstimation": ("vision", partial(_config, "DPTConfig", num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16, neck_hidden_sizes=[8, 8, 16, 16]), _pixels(32)),
    "UperNetForSemanticSegmentation": ("vision", lambda: transformers.UperNetConfig(backbone_config=small(transformers.ConvNextConfig, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], patch_size=4, num_hidden_layers=None, out_features=["stage1", "stage2", "stage3", "stage4"]), hidden_size=16, auxiliary_in_channels=24, auxiliary_channels=16, num_labels=2), _pixels(64, labels=True)),
    "Swin2SRForImageSuperResolution": ("vision", partial(_config, "Swin2SRConfig", num_attention_heads=None, num_hidden_layers=None, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=1, upscale=2), _pixels(16)),
    "DetrForObjectDetection": ("vision", _detr_config, _pixels(64)),
    "YolosForObjectDetection": ("vision", partial(_config, "YolosConfig", image_size=[32, 32], num_detection_tokens=5), _pixels(32)),
    "PatchTSTForPrediction": ("series", partial(_config, "PatchTSTConfig", **_SERIES), _series),
    "PatchTSMixerForPrediction": ("series", partial(_config, "PatchTSMixerConfig", **_SERIES), _series),
    "DecisionTransformerModel": ("control", partial(_config, "DecisionTransformerConfig", state_dim=5, act_dim=3), _play),
}  # fmt: skip
