"""How small a transformers config can be: one set of sizes for all families, and what some need beside or instead."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES", "small"]

WIDTHS = dict.fromkeys(
    "hidden_size n_embd d_model dim embedding_size moe_intermediate_size image_size".split(), 32
) | dict.fromkeys("intermediate_size n_inner d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_dim".split(), 48)
DEPTHS = dict.fromkeys("num_hidden_layers n_layer num_layers n_layers".split(), 3) | dict.fromkeys(
    "encoder_layers decoder_layers num_decoder_layers num_encoder_layers".split(), 2
)
HEADS = dict.fromkeys(
    "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads".split(), 4
)
EXPERTS = dict.fromkeys("num_local_experts num_experts n_routed_experts".split(), 4)
OTHERS: dict[str, Any] = {
    "vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64, "n_positions": 64, "d_kv": 8,
    "head_dim": 8, "patch_size": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 0, "use_cache": False, "state_size": 8, "expand": 2, "d_state": 8, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "apply_spec_augment": False,
    "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip
SMALL: dict[str, Any] = WIDTHS | DEPTHS | HEADS | EXPERTS | OTHERS

_LATENT = {"num_key_value_heads": 4}
_ROTARY = {"rotary_dim": 4}
_MAMBA_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
_WAVES = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "hidden_size": 32,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_NO = None  # leave the family's own value

OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": _MAMBA_HYBRID | {"attn_layer_indices": [1]},
    "CodeGenForCausalLM": _ROTARY,
    "CvtForImageClassification": {"num_hidden_layers": _NO, "patch_size": _NO, "num_heads": [1, 2, 2], "embed_dim": [16, 24, 32], "depth": [1, 2, 3]},
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "patch_size": 4, "num_hidden_layers": _NO},
    "ConvNextV2ForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "patch_size": 4, "num_hidden_layers": _NO},
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "FalconForCausalLM": {"head_dim": _NO},
    "FocalNetForImageClassification": {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "FunnelForMaskedLM": {"num_hidden_layers": _NO, "block_sizes": [1, 1], "num_decoder_layers": 1, "n_head": 4, "d_head": 8, "d_inner": 48},
    "GPTJForCausalLM": _ROTARY,
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_hidden_layers": _NO},
    "GraniteMoeHybridForCausalLM": _MAMBA_HYBRID | {"layer_types": ["mamba", "attention", "mamba"]},
    "LevitForImageClassification": {"num_attention_heads": [2, 2, 2], "hidden_sizes": [16, 24, 32], "key_dim": [8, 8, 8], "depths": [1, 1, 1], "patch_size": _NO, "image_size": 64},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 48},
    "LongT5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "MobileViTV2ForImageClassification": {"image_size": 64, "patch_size": 2},
    "PoolFormerForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "patch_size": 7},
    "ProphetNetForConditionalGeneration": {"num_hidden_layers": _NO, "ngram": 2},
    "PvtForImageClassification": {"num_attention_heads": [1, 1, 2, 2], "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": _NO},
    "PvtV2ForImageClassification": {"num_attention_heads": [1, 1, 2, 2], "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "patch_size": _NO, "image_size": 64},
    "RegNetForImageClassification": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1], "groups_width": 16},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"], "num_hidden_layers": _NO, "local_attn_chunk_length": 4, "attention_head_size": 8},
    "ResNetForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "embedding_size": 8},
    "SegformerForImageClassification": {"num_attention_heads": [1, 1, 2, 2], "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "patch_size": _NO},
    "SwinForImageClassification": {"num_attention_heads": _NO, "num_hidden_layers": _NO, "num_heads": [2, 4], "depths": [2, 2], "embed_dim": 16, "window_size": 4, "patch_size": 2},
    "SwitchTransformersForConditionalGeneration": {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "Swinv2ForImageClassification": {"num_attention_heads": _NO, "num_hidden_layers": _NO, "num_heads": [2, 4], "depths": [2, 2], "embed_dim": 16, "window_size": 4, "patch_size": 2},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "XLNetLMHeadModel": {"max_position_embeddings": _NO, "d_inner": 48, "head_dim": _NO, "d_head": 8},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_d_state": 8, "num_mem_blocks": 1, "head_dim": _NO, "attention_head_dim": 16, "attention_hidden_size": 64, "chunk_size": 8},
} | {f"{name}ForSequenceClassification": _WAVES for name in "Data2VecAudio Hubert SEW SEWD UniSpeech UniSpeechSat Wav2Vec2 Wav2Vec2Conformer WavLM".split()}  # fmt: skip


def small(kind: Any, **overrides: Any) -> Any:
    """A config of this class with every size that it has made small."""
    default = kind()
    chosen = {name: value for name, value in SMALL.items() if hasattr(default, name)} | overrides
    return kind(**{name: value for name, value in chosen.items() if value is not _NO})
