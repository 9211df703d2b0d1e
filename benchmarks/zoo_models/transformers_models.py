"""transformers: families with configs as small as they go, random weights, and labels so that they compute their loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from zoo_models.specimen import Call, Specimen
from zoo_models.transformers_pairs import PAIRS
from zoo_models.transformers_shapes import OVERRIDES, small

__all__ = ["specimens"]

DECODERS = (
    "Afmoe Apertus Arcee AriaText Bamba Beam BioGpt BitNet Bloom CodeGen Cohere Cohere2 Cohere2Moe CpmAnt Cwm "
    "DeepseekV2 DeepseekV3 DeepseekV4 DiffLlama Doge Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba "
    "FlexOlmo Flint Gemma Gemma2 Gemma3 Glm Glm4 Glm4Moe GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Granite "
    "GraniteSWA GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HYV3 "
    "HYV4 HyperCLOVAX Inkling2 Inkling Llama Llama4 Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna Lfm2 Lfm3 Mamba Mamba2 "
    "Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mixtral ModernBertDecoder Moshi Mpt "
    "NanoChat Nemotron NemotronH Olmo Olmo2 Olmo3 OlmoHybrid Olmoe OPT Persimmon Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 "
    "Qwen3Moe Qwen3Next RecurrentGemma Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 TrOCR VaultGemma XGLM Zamba2"
)
ENCODERS = (
    "Albert Bert BigBird Camembert ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra Ernie Esm EuroBert FNet "
    "Funnel Gte IBert JinaEmbeddingsV3 LayoutLM Longformer MegatronBert MobileBert ModernBert MPNet Mra NomicBert "
    "Nystromformer RemBert Roberta RobertaPreLayerNorm RoFormer SqueezeBert Tapas Ultrabert XLMRoberta XLMRobertaXL Yoso"
)
TRANSLATORS = (
    "Bart BigBirdPegasus Blenderbot BlenderbotSmall FSMT LED LongT5 M2M100 MBart MT5 Mvp NllbMoe Pegasus PegasusX PLBart "
    "ProphetNet SwitchTransformers T5 UMT5"
)
VISION = (
    "Beit ConvNext ConvNextV2 Cvt Data2VecVision DeiT Dinov2 Dinov2WithRegisters FocalNet IJepa Levit MobileNetV1 "
    "MobileNetV2 MobileViT MobileViTV2 PoolFormer Pvt PvtV2 RegNet ResNet Segformer SwiftFormer Swin Swinv2 ViT ViTMSN"
)
AUDIO = "Data2VecAudio Hubert SEW SEWD UniSpeech UniSpeechSat Wav2Vec2 Wav2Vec2Conformer WavLM"

_OTHER_NAMES = (
    "BertGenerationDecoder CTRLLMHeadModel GPT2LMHeadModel OpenAIGPTLMHeadModel XLMWithLMHeadModel XLNetLMHeadModel "
    "FlaubertWithLMHeadModel ReformerModelWithLMHead SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText MarianMTModel"
)


def specimens() -> list[Specimen]:
    kinds: tuple[tuple[str, str, str, Callable[[Any, int], Call]], ...] = (
        ("decoder", DECODERS, "ForCausalLM", tokens),
        ("encoder", ENCODERS, "ForMaskedLM", tokens),
        ("encoder-decoder", TRANSLATORS, "ForConditionalGeneration", tokens),
        ("language", _OTHER_NAMES, "", tokens),
        ("vision", VISION, "ForImageClassification", pixels),
        ("audio", AUDIO, "ForSequenceClassification", waves),
    )
    found = [
        _specimen(group, f"{name}{head}", inputs) for group, names, head, inputs in kinds for name in names.split()
    ]
    return found + [
        Specimen("transformers", group, name, partial(_built, name, config), inputs)
        for name, (group, config, inputs) in PAIRS.items()
    ]


def _specimen(group: str, name: str, inputs: Callable[[Any, int], Call]) -> Specimen:
    config = partial(configuration, name)
    return Specimen("transformers", group, name, partial(_built, name, config), lambda n: inputs(config(), n))


def configuration(name: str) -> Any:
    return small(getattr(transformers, name).config_class, **OVERRIDES.get(name, {}))


def _built(name: str, config: Callable[[], Any]) -> nn.Module:
    model: nn.Module = getattr(transformers, name)(config())
    return model


# -- inputs -------------------------------------------------------------------------------------------------------

LENGTH = 12


def tokens(config: Any, n: int) -> Call:  # noqa: ARG001 all kinds of inputs are asked alike
    ids = torch.randint(3, 90, (n, LENGTH))
    return Call((), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})


def pixels(config: Any, n: int) -> Call:
    size = getattr(config, "image_size", 64)
    side = size if isinstance(size, int) else size[0]
    return Call((), {"pixel_values": torch.randn(n, 3, side, side), "labels": torch.arange(n) % 2})


def waves(config: Any, n: int) -> Call:  # noqa: ARG001 all kinds of inputs are asked alike
    return Call((), {"input_values": torch.randn(n, 1600), "labels": torch.arange(n) % 2})
