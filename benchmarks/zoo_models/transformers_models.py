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

__all__ = ["relatives", "specimens"]

DECODERS = (
    "Afmoe AriaText Bamba BioGpt BitNet Bloom CodeGen Cohere2 CpmAnt DeepseekV2 DeepseekV3 DeepseekV4 DiffLlama Doge "
    "Exaone4 Falcon FalconH1 FalconMamba FlexOlmo Gemma2 Gemma3 Glm4Moe GPTBigCode GPTJ GPTNeo GPTNeoX GptOss "
    "GraniteMoeHybrid HrmText HYV4 Inkling Llama Llama4 Jamba JetMoe KimiLinear Kolibri1 Laguna Lfm2 Mamba Mamba2 "
    "MiMoV2Flash MiniMax MiniMaxM3VL Mistral Mixtral Mpt NemotronH OlmoHybrid Olmoe OPT Persimmon Phi3 Phimoe "
    "Qwen2Moe Qwen3 Qwen3Next RecurrentGemma Rwkv StableLm Starcoder2 TrOCR XGLM Zamba2"
)
ENCODERS = (
    "Albert Bert BigBird ConvBert Deberta DebertaV2 DistilBert Esm FNet Funnel IBert JinaEmbeddingsV3 LayoutLM "
    "Longformer MobileBert ModernBert MPNet Mra Nystromformer RoFormer SqueezeBert Tapas Yoso"
)
TRANSLATORS = "Bart BigBirdPegasus FSMT LED LongT5 M2M100 MT5 NllbMoe PegasusX ProphetNet SwitchTransformers T5"
VISION = (
    "Beit ConvNextV2 Cvt DeiT Dinov2 FocalNet IJepa Levit MobileNetV2 MobileViT MobileViTV2 PoolFormer Pvt RegNet "
    "ResNet Segformer SwiftFormer Swin Swinv2 ViT"
)
RELATIVES = {
    "ForCausalLM": (
        "Apertus Arcee Beam Cohere Cohere2Moe Cwm Ernie4_5 Ernie4_5_Moe ExaoneMoe Flint Gemma Glm Glm4 GPTNeoXJapanese "
        "Granite GraniteSWA GraniteMoe GraniteMoeSWA GraniteMoeShared Helium HunYuanDenseV1 HunYuanMoEV1 HYV3 HyperCLOVAX "
        "Inkling2 Jais2 Lfm3 Mellum MiniMaxM2 Ministral Ministral3 ModernBertDecoder Moshi NanoChat Nemotron Olmo Olmo2 "
        "Olmo3 Phi Qwen2 Qwen3Moe SeedOss SmolLM3 SolarOpen VaultGemma"
    ),
    "ForMaskedLM": (
        "Camembert Data2VecText Electra Ernie EuroBert Gte MegatronBert NomicBert RemBert Roberta RobertaPreLayerNorm "
        "Ultrabert XLMRoberta XLMRobertaXL"
    ),
    "ForConditionalGeneration": ("Blenderbot BlenderbotSmall MBart Mvp Pegasus PLBart UMT5"),
    "ForImageClassification": ("ConvNext Data2VecVision Dinov2WithRegisters MobileNetV1 PvtV2 ViTMSN"),
}
"""Close relatives of those above, by the name of their head."""

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


def relatives() -> list[Specimen]:
    """More families, most of which differ little from one that `specimens` has."""
    return [
        _specimen("relative", f"{name}{head}", pixels if head == "ForImageClassification" else tokens)
        for head, names in RELATIVES.items()
        for name in names.split()
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
