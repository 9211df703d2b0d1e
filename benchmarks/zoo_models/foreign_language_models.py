"""Models of sequences and tables, of libraries that the old zoo does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_models.foreign_entry import Registry, clip_images, ids, rows, sequence
from zoo_models.specimen import Call, Specimen

__all__ = ["specimens"]

registry = Registry("language")
add = registry.add


def specimens() -> list[Specimen]:
    return registry.found


# -- x-transformers -----------------------------------------------------------------------------------------------

_DROPPED: dict[str, Any] = {"attn_dropout": 0.1, "ff_dropout": 0.1, "layer_dropout": 0.3}


def _decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=64,
        max_seq_len=32,
        emb_dropout=0.1,
        attn_layers=Decoder(dim=24, depth=3, heads=2, attn_dim_head=8, **options),
    )


@add("x-transformers", ids(12), ids(16))
def x_decoder_layer_dropout() -> nn.Module:
    return _decoder(**_DROPPED)


@add("x-transformers", ids(12), ids(16))
def x_rotary_swiglu() -> nn.Module:
    return _decoder(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, **_DROPPED)


@add("x-transformers", ids(12), ids(16))
def x_alibi_talking_heads() -> nn.Module:
    return _decoder(alibi_pos_bias=True, attn_pre_talking_heads=True, **_DROPPED)


@add("x-transformers", ids(12), ids(16))
def x_hyper_connections() -> nn.Module:
    return _decoder(num_residual_streams=2, **_DROPPED)


@add("x-transformers", ids(12), ids(16))
def x_dynamic_tanh_lime() -> nn.Module:
    return _decoder(use_dynamic_tanh=True, integrate_layers=True, attn_dropout=0.1)


@add("x-transformers", ids(12))
def x_autoregressive_masked() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    return AutoregressiveWrapper(_decoder(**_DROPPED), mask_prob=0.15)


@add("x-transformers", ids(12), ids(16))
def x_encoder_sandwich() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=24, depth=3, heads=2, attn_dim_head=8, sandwich_coef=2, rel_pos_bias=True, **_DROPPED)
    return TransformerWrapper(num_tokens=64, max_seq_len=32, num_memory_tokens=3, attn_layers=layers)


@add("x-transformers", lambda n: Call((torch.rand(n, 3, 32, 32),)))
def x_vision() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=5, attn_layers=Encoder(dim=24, depth=3, heads=2, **_DROPPED)
    )


@add("x-transformers", lambda n: Call((torch.randint(1, 64, (n, 10)), torch.randint(1, 64, (n, 9)))))
def x_translator() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(
        dim=24, tie_token_emb=True, enc_num_tokens=64, enc_depth=2, enc_heads=2, enc_max_seq_len=16, dec_num_tokens=64, dec_depth=2,
        dec_heads=2, dec_max_seq_len=16, enc_layer_dropout=0.2, dec_layer_dropout=0.2,
    )  # fmt: skip


@add("x-transformers", sequence(10, 6), sequence(13, 6))
def x_continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(
        dim_in=6, dim_out=5, max_seq_len=16, attn_layers=Encoder(dim=24, depth=2, heads=2, **_DROPPED)
    )


# -- lucidrains ---------------------------------------------------------------------------------------------------


@add("performer-pytorch", ids(16), ids(24))
def performer() -> nn.Module:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=64, max_seq_len=32, dim=16, depth=2, heads=2, causal=False, nb_features=8, feature_redraw_interval=2, emb_dropout=0.1,
        ff_dropout=0.1, attn_dropout=0.1,
    )  # fmt: skip


@add("performer-pytorch", ids(16))
def performer_reversible() -> nn.Module:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=64,
        max_seq_len=16,
        dim=16,
        depth=2,
        heads=2,
        causal=False,
        nb_features=8,
        reversible=True,
        ff_dropout=0.1,
    )


@add("linformer", ids(16))
def linformer() -> nn.Module:
    from linformer import LinformerLM

    return LinformerLM(
        num_tokens=64, dim=16, seq_len=16, depth=2, heads=2, k=8, one_kv_head=True, share_kv=True, dropout=0.1
    )


@add("linformer", ids(16))
def linformer_reversible() -> nn.Module:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=64, dim=16, seq_len=16, depth=2, heads=2, k=8, reversible=True, dropout=0.1)


@add("reformer-pytorch", ids(32))
def reformer() -> nn.Module:
    from reformer_pytorch import ReformerLM

    return ReformerLM(num_tokens=64, dim=16, depth=2, max_seq_len=32, heads=2, bucket_size=8, n_hashes=2, causal=True, ff_dropout=0.1,
                      layer_dropout=0.3)  # fmt: skip


@add("reformer-pytorch", sequence(32, 16))
def lsh_attention() -> nn.Module:
    from reformer_pytorch import LSHSelfAttention

    return nn.Sequential(
        LSHSelfAttention(dim=16, heads=2, bucket_size=8, n_hashes=2), nn.LayerNorm(16), nn.Linear(16, 4)
    )


@add("linear-attention-transformer", ids(32))
def linear_attention() -> nn.Module:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(
        num_tokens=64, dim=16, heads=2, depth=2, max_seq_len=32, causal=True, ff_dropout=0.1, attn_layer_dropout=0.1, attn_dropout=0.1,
        n_local_attn_heads=1, local_attn_window_size=8,
    )  # fmt: skip


@add("sinkhorn-transformer", ids(32))
def sinkhorn() -> nn.Module:
    from sinkhorn_transformer import SinkhornTransformerLM

    return SinkhornTransformerLM(
        num_tokens=64, dim=16, heads=2, depth=2, max_seq_len=32, bucket_size=8, layer_dropout=0.2, ff_dropout=0.1
    )


@add("routing-transformer", ids(32))
def routing() -> nn.Module:
    from routing_transformer import RoutingTransformerLM

    return RoutingTransformerLM(num_tokens=64, dim=16, heads=2, depth=2, max_seq_len=32, window_size=8, causal=True, attn_dropout=0.1,
                                ff_dropout=0.1, layer_dropout=0.2)  # fmt: skip


@add("nystrom-attention", sequence(16, 16), sequence(20, 16))
def nystromformer() -> nn.Module:
    from nystrom_attention import Nystromformer

    return Nystromformer(dim=16, dim_head=8, heads=2, depth=2, num_landmarks=4, attn_dropout=0.1, ff_dropout=0.1)


@add("local-attention", ids(16), ids(24))
def local_transformer() -> nn.Module:
    from local_attention import LocalTransformer

    return LocalTransformer(num_tokens=64, max_seq_len=32, dim=16, depth=2, heads=2, dim_head=8, causal=True, local_attn_window_size=8,
                            attn_dropout=0.1, ff_dropout=0.1)  # fmt: skip


@add("g-mlp-pytorch", ids(16))
def gmlp_survival() -> nn.Module:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=64, dim=16, depth=4, seq_len=16, circulant_matrix=True, act=nn.Tanh(), prob_survival=0.6)


@add("st-moe-pytorch", sequence(8, 16))
def st_moe() -> nn.Module:
    from st_moe_pytorch import MoE, SparseMoEBlock

    return SparseMoEBlock(
        MoE(dim=16, num_experts=4, gating_top_n=2, threshold_train=0.2), add_ff_before=True, add_ff_after=True
    )


@add("mixture-of-experts", sequence(8, 16))
def mixture_of_experts() -> nn.Module:
    from mixture_of_experts import MoE

    return MoE(dim=16, num_experts=4, hidden_dim=24)


@add("soft-moe-pytorch", sequence(8, 16))
def soft_moe() -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return nn.Sequential(nn.Linear(16, 16), SoftMoE(dim=16, seq_len=8, num_experts=2, dropout=0.2), nn.Linear(16, 4))


@add("gateloop-transformer", ids(12), ids(15))
def gateloop() -> nn.Module:
    from gateloop_transformer import Transformer

    return Transformer(num_tokens=64, dim=16, depth=2, dim_head=8, heads=2, use_gate_looped_attn=True)


@add("colt5-attention", sequence(24, 16))
def colt5() -> nn.Module:
    from colt5_attention import ConditionalRoutedTransformerBlock

    return ConditionalRoutedTransformerBlock(
        16, num_heavy_ff_tokens=4, num_heavy_attn_tokens_q=4, num_heavy_attn_tokens_kv=4, light_dim_head=8, light_heads=2,
        light_window_size=8, heavy_dim_head=8, heavy_heads=2,
    )  # fmt: skip


@add("titans-pytorch", ids(16))
def titans_memory() -> nn.Module:
    from titans_pytorch import MemoryAsContextTransformer

    return MemoryAsContextTransformer(num_tokens=64, dim=16, depth=2, segment_len=8, num_persist_mem_tokens=2, num_longterm_mem_tokens=2,
                                      heads=2, dim_head=8, neural_memory_layers=(2,))  # fmt: skip


@add("memory-efficient-attention-pytorch", sequence(16, 16), sequence(24, 16))
def memory_efficient() -> nn.Module:
    from memory_efficient_attention_pytorch import Attention

    return nn.Sequential(
        Attention(dim=16, dim_head=8, heads=2, causal=True, memory_efficient=True, q_bucket_size=8, k_bucket_size=8),
        nn.Linear(16, 4),
    )


@add("recurrent-memory-transformer-pytorch", ids(12))
def recurrent_memory() -> nn.Module:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return RecurrentMemoryTransformer(
        num_tokens=64, num_memory_tokens=3, dim=16, depth=2, causal=True, dim_head=8, heads=2, seq_len=16
    )


@add("coca-pytorch", lambda n: Call((torch.randint(1, 64, (n, 8)),), {"images": torch.rand(n, 3, 32, 32)}))
def coca() -> nn.Module:
    from coca_pytorch import CoCa
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.simple_vit import SimpleViT

    body = SimpleViT(image_size=32, patch_size=8, num_classes=5, dim=24, depth=2, heads=2, mlp_dim=32)
    return CoCa(dim=16, img_encoder=Extractor(body, return_embeddings_only=True, detach=False), image_dim=24, num_tokens=64,
                unimodal_depth=1, multimodal_depth=1, dim_head=8, heads=2, num_img_queries=4)  # fmt: skip


@add("tab-transformer-pytorch", lambda n: Call((torch.randint(0, 4, (n, 3)), torch.randn(n, 4))))
def tab_transformer() -> nn.Module:
    from tab_transformer_pytorch import TabTransformer

    return TabTransformer(
        categories=(4, 5, 6), num_continuous=4, dim=16, dim_out=2, depth=2, heads=2, mlp_act=nn.ReLU(), attn_dropout=0.1
    )


@add("tab-transformer-pytorch", lambda n: Call((torch.randint(0, 4, (n, 3)), torch.randn(n, 4))))
def ft_transformer() -> nn.Module:
    from tab_transformer_pytorch import FTTransformer

    return FTTransformer(
        categories=(4, 5, 6), num_continuous=4, dim=16, dim_out=2, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1
    )


@add("rtdl_revisiting_models", lambda n: Call((torch.randn(n, 4), None)))
def rtdl_ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(n_cont_features=4, cat_cardinalities=[], d_out=2, **FTTransformer.get_default_kwargs(1))


@add("rtdl_revisiting_models", rows(6))
def rtdl_resnet() -> nn.Module:
    from rtdl_revisiting_models import ResNet

    return ResNet(
        d_in=6, d_out=2, n_blocks=2, d_block=12, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.3, dropout2=0.1
    )


@add("pytorch-tabnet", rows(6))
def tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(
        6, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=2, momentum=0.1, group_attention_matrix=torch.eye(6)
    )


@add("iTransformer", sequence(12, 5))
def i_transformer() -> nn.Module:
    from iTransformer import iTransformer

    return iTransformer(num_variates=5, lookback_len=12, depth=2, dim=16, pred_length=4, dim_head=8, heads=2, attn_dropout=0.1,
                        ff_dropout=0.1, use_reversible_instance_norm=True)  # fmt: skip


@add("xlstm", sequence(8, 16))
def xlstm() -> nn.Module:
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

    block = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2))
    return xLSTMBlockStack(
        xLSTMBlockStackConfig(mlstm_block=block, context_length=8, num_blocks=2, embedding_dim=16, dropout=0.1)
    )


# -- peft, sentence-transformers, open_clip -----------------------------------------------------------------------


def _tokens(length: int) -> Any:
    def inputs(n: int) -> Call:
        tokens = torch.randint(3, 60, (n, length))
        return Call((), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()})

    return inputs


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2))
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes))
    return model


def _peft(base: nn.Module, kind: str, **options: Any) -> nn.Module:
    import peft

    model: nn.Module = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    return model


@add("peft", _tokens(10), _tokens(13))
def lora_dropout() -> nn.Module:
    return _peft(
        _gpt2(), "LoraConfig", r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["c_attn"], fan_in_fan_out=True
    )


@add("peft", _tokens(10), _tokens(13))
def dora() -> nn.Module:
    return _peft(_llama(), "LoraConfig", r=2, lora_dropout=0.2, use_dora=True, target_modules=["q_proj", "v_proj"])


@add("peft", _tokens(10), _tokens(13))
def ia3() -> nn.Module:
    return _peft(
        _llama(), "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )


@add("peft", _tokens(10), _tokens(13))
def prefix_tuning() -> nn.Module:
    return _peft(_gpt2(), "PrefixTuningConfig", num_virtual_tokens=3)


@add("peft", _tokens(10), _tokens(13))
def prompt_tuning() -> nn.Module:
    return _peft(_llama(), "PromptTuningConfig", num_virtual_tokens=3)


@add("peft", _tokens(10), _tokens(13))
def loha() -> nn.Module:
    return _peft(_llama(), "LoHaConfig", r=2, rank_dropout=0.2, module_dropout=0.2, target_modules=["q_proj", "v_proj"])


@add("peft", _tokens(10), _tokens(13))
def oft() -> nn.Module:
    return _peft(_llama(), "OFTConfig", oft_block_size=4, r=0, module_dropout=0.2, target_modules=["q_proj", "v_proj"])


@add("peft", _tokens(10), _tokens(13))
def vera() -> nn.Module:
    return _peft(_llama(), "VeraConfig", r=2, vera_dropout=0.2, target_modules=["q_proj", "v_proj"])


@add("peft", _tokens(10), _tokens(13))
def adalora() -> nn.Module:
    return _peft(
        _llama(),
        "AdaLoraConfig",
        init_r=4,
        target_r=2,
        total_step=10,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
    )


@add("peft", _tokens(10), _tokens(13))
def adaption_prompt() -> nn.Module:
    return _peft(_llama(), "AdaptionPromptConfig", adapter_len=2, adapter_layers=2)


@add(
    "sentence-transformers",
    lambda n: Call(
        ({"input_ids": torch.randint(3, 60, (n, 9)), "attention_mask": torch.ones(n, 9, dtype=torch.long)},)
    ),
)
def sentence_encoder() -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
    from transformers import BertConfig, BertModel

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
            self.auto_model = BertModel(BertConfig(vocab_size=64, **sizes))

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            features["token_embeddings"] = self.auto_model(**features).last_hidden_state
            return features

    return nn.Sequential(Tokens(), Pooling(16, "mean"), Dense(16, 8), Normalize())


def _tags(length: int) -> Any:
    return lambda n: Call((torch.randn(n, length, 4), torch.randint(0, 4, (n, length))), {"reduction": "mean"})


@add("pytorch-crf", _tags(7), _tags(9))
def crf() -> nn.Module:
    from torchcrf import CRF

    return CRF(4, batch_first=True)


@add("entmax", sequence(6, 8), sequence(9, 8))
def entmax_attention() -> nn.Module:
    from entmax import Entmax15, Sparsemax

    return nn.Sequential(nn.Linear(8, 12), Entmax15(dim=-1), nn.Dropout(0.2), nn.Linear(12, 6), Sparsemax(dim=-1))


@add("pytorch-lightning", rows(8))
def lightning_module() -> nn.Module:
    import pytorch_lightning as lightning

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, rate: float = 0.3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Sequential(
                nn.Linear(8, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x + self.hparams.rate * torch.randn_like(x))  # type: ignore[no-any-return]

    return Net()


@add("open_clip_torch", clip_images(32, 12))
def clip_custom_text() -> nn.Module:
    from open_clip.model import CustomTextCLIP

    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, "ls_init_value": 0.1}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2, "ls_init_value": 0.1}
    return CustomTextCLIP(16, vision, text, init_logit_bias=-1.0)
