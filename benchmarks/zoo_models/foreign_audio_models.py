"""Audio models of libraries that the old zoo does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_models.foreign_entry import Registry, rows, sequence, waves
from zoo_models.specimen import Call, Specimen

__all__ = ["specimens"]

registry = Registry("audio")
add = registry.add

_ENCODER: dict[str, Any] = {
    "extractor_conv_layer_config": [(8, 10, 5), (8, 3, 2), (8, 2, 2)], "extractor_conv_bias": False, "encoder_embed_dim": 16,
    "encoder_projection_dropout": 0.1, "encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 2, "encoder_num_layers": 4,
    "encoder_num_heads": 2, "encoder_attention_dropout": 0.1, "encoder_ff_interm_features": 24, "encoder_ff_interm_dropout": 0.1,
    "encoder_dropout": 0.1, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.4,
}  # fmt: skip


def specimens() -> list[Specimen]:
    return registry.found


def _wave(length: int) -> Any:
    return lambda n: Call((torch.randn(n, length),))


def _frames(length: int, width: int) -> Any:
    return lambda n: Call((torch.randn(n, length, width), torch.full((n,), length)))


@add("torchaudio", _wave(800), _wave(1000))
def wav2vec2_layer_drop() -> nn.Module:
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model("group_norm", aux_num_out=5, **_ENCODER)


@add("torchaudio", waves(800), waves(1000))
def wav2vec2_lengths() -> nn.Module:
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model("layer_norm", aux_num_out=None, **(_ENCODER | {"encoder_layer_norm_first": True}))


@add("torchaudio", _wave(800), _wave(1000))
def wavlm() -> nn.Module:
    from torchaudio.models import wavlm_model

    return wavlm_model("group_norm", aux_num_out=5, encoder_num_buckets=8, encoder_max_distance=16, **_ENCODER)


@add("torchaudio", lambda n: Call((torch.randn(n, 800), torch.randint(0, 5, (n, 39)))))
def hubert_masked_pretraining() -> nn.Module:
    from torchaudio.models import hubert_pretrain_model

    masks = {"mask_selection": "static", "mask_other": 0.0, "no_mask_overlap": False, "mask_min_space": 1, "mask_channel_prob": 0.3,
             "mask_channel_selection": "static", "mask_channel_other": 0.0, "mask_channel_length": 2, "no_mask_channel_overlap": False,
             "mask_channel_min_space": 1}  # fmt: skip
    return hubert_pretrain_model(
        "group_norm", mask_prob=0.5, mask_length=3, skip_masked=False, skip_nomask=False, num_classes=5, final_dim=8, feature_grad_mult=0.1,
        **masks, **_ENCODER,
    )  # fmt: skip


@add("torchaudio", _frames(12, 8), _frames(15, 8))
def conformer() -> nn.Module:
    from torchaudio.models import Conformer

    return Conformer(input_dim=8, num_heads=2, ffn_dim=16, num_layers=2, depthwise_conv_kernel_size=3, dropout=0.2)


@add("torchaudio", _frames(16, 8))
def emformer() -> nn.Module:
    from torchaudio.models import Emformer

    return Emformer(8, 2, 16, 2, 4, dropout=0.1, right_context_length=0, left_context_length=4, max_memory_size=0)


@add("torchaudio", rows(1, 200), rows(1, 240))
def conv_tasnet() -> nn.Module:
    from torchaudio.models import ConvTasNet

    return ConvTasNet(
        num_sources=2,
        enc_kernel_size=8,
        enc_num_feats=8,
        msk_num_feats=8,
        msk_num_hidden_feats=12,
        msk_num_layers=2,
        msk_num_stacks=2,
    )


@add("torchaudio", rows(1, 1024))
def hybrid_demucs() -> nn.Module:
    from torchaudio.models import HDemucs

    return HDemucs(["a", "b"], audio_channels=1, channels=4, nfft=256, depth=4, time_stride=2, norm_starts=2)


@add("torchaudio", rows(1, 10, 8), rows(1, 14, 8))
def deepspeech() -> nn.Module:
    from torchaudio.models import DeepSpeech

    return DeepSpeech(8, 16, 5, dropout=0.3)


@add(
    "torchaudio",
    lambda n: Call((torch.randint(0, 20, (n, 6)), torch.full((n,), 6), torch.randn(n, 8, 10), torch.full((n,), 10))),
)
def tacotron2() -> nn.Module:
    from torchaudio.models import Tacotron2

    return Tacotron2(
        n_mels=8, n_symbol=20, symbol_embedding_dim=8, encoder_embedding_dim=8, encoder_n_convolution=1, decoder_rnn_dim=12,
        attention_rnn_dim=12, attention_hidden_dim=8, attention_location_n_filter=4, attention_location_kernel_size=3, prenet_dim=8,
        postnet_n_convolution=2, postnet_kernel_size=3, postnet_embedding_dim=8,
    )  # fmt: skip


@add("torchaudio", _wave(400), _wave(500))
def spec_augment() -> nn.Module:
    from torchaudio.transforms import FrequencyMasking, MelSpectrogram, TimeMasking

    return nn.Sequential(
        MelSpectrogram(n_fft=64, n_mels=16), FrequencyMasking(4), TimeMasking(6), nn.Conv1d(16, 12, 3), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv1d(12, 6, 3),
    )  # fmt: skip


@add("torchaudio", _wave(400), _wave(500))
def spec_augment_iid() -> nn.Module:
    from torchaudio.transforms import SpecAugment, Spectrogram

    return nn.Sequential(
        Spectrogram(n_fft=64),
        SpecAugment(2, 6, 2, 6, iid_masks=False),
        nn.Conv1d(33, 12, 3),
        nn.GELU(),
        nn.Conv1d(12, 6, 3),
    )


@add("torchaudio", _wave(600))
def squim() -> nn.Module:
    from torchaudio.models import squim_objective_model

    return squim_objective_model(
        feat_dim=8, win_len=16, d_model=8, nhead=2, hidden_dim=8, num_blocks=1, rnn_type="LSTM", chunk_size=7
    )


@add("torchaudio", lambda n: Call((torch.randn(n, 9, 8), _full(n, 8), torch.randint(0, 9, (n, 3)), _full(n, 3))))
def emformer_transducer() -> nn.Module:
    from torchaudio.models import emformer_rnnt_model

    return emformer_rnnt_model(
        input_dim=8, encoding_dim=12, num_symbols=10, segment_length=4, right_context_length=1, time_reduction_input_dim=8,
        time_reduction_stride=1, transformer_num_heads=2, transformer_ffn_dim=16, transformer_num_layers=1, transformer_dropout=0.1,
        transformer_activation="gelu", transformer_left_context_length=4, transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True, symbol_embedding_dim=8, num_lstm_layers=1,
        lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-5, lstm_dropout=0.1,
    )  # fmt: skip


def _full(n: int, value: int) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.int32)


# -- speechbrain --------------------------------------------------------------------------------------------------


@add("speechbrain", sequence(20, 8), sequence(26, 8))
def ecapa_tdnn() -> nn.Module:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    return ECAPA_TDNN(
        8, lin_neurons=6, channels=[8, 8, 8, 8, 16], attention_channels=4, res2net_scale=2, se_channels=4, dropout=0.2
    )


@add("speechbrain", sequence(24, 8), sequence(32, 8))
def crdnn() -> nn.Module:
    from speechbrain.lobes.models.CRDNN import CRDNN

    return CRDNN(
        input_size=8,
        cnn_blocks=1,
        cnn_channels=(4,),
        time_pooling=True,
        rnn_layers=1,
        rnn_neurons=8,
        dnn_blocks=1,
        dnn_neurons=8,
    )


@add(
    "speechbrain",
    lambda n: Call((torch.randn(n, 10, 8), torch.randint(1, 20, (n, 6)))),
    lambda n: Call((torch.randn(n, 12, 8), torch.randint(1, 20, (n, 7)))),
)
def transformer_asr_layer_drop() -> nn.Module:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    return TransformerASR(tgt_vocab=20, input_size=8, d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, d_ffn=24, dropout=0.1,
                          layerdrop_prob=0.3)  # fmt: skip


@add("speechbrain", lambda n: Call((torch.randn(n, 10, 8), torch.randint(1, 20, (n, 6)))))
def conformer_asr() -> nn.Module:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    return TransformerASR(tgt_vocab=20, input_size=8, d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=1, d_ffn=24, dropout=0.1,
                          encoder_module="conformer", attention_type="RelPosMHAXL", kernel_size=3, normalize_before=True)  # fmt: skip


@add("speechbrain", sequence(24, 8))
def spectrogram_drop() -> nn.Module:
    from speechbrain.augment.freq_domain import SpectrogramDrop
    from speechbrain.lobes.models.Xvector import Xvector

    body = Xvector(
        in_channels=8,
        tdnn_blocks=2,
        tdnn_channels=[8, 16],
        tdnn_kernel_sizes=[3, 1],
        tdnn_dilations=[1, 1],
        lin_neurons=6,
    )
    return nn.Sequential(SpectrogramDrop(2, 4, 1, 3), body)


@add("speechbrain", _wave(600))
def drop_frequencies() -> nn.Module:
    from speechbrain.augment.time_domain import DropFreq

    return nn.Sequential(DropFreq(), nn.Unflatten(1, (1, 600)), nn.Conv1d(1, 4, 5, 3), nn.ReLU(), nn.Conv1d(4, 4, 5, 3))


@add("speechbrain", rows(80, 30))
def metric_gan_generator() -> nn.Module:
    from speechbrain.nnet.CNN import Conv1d
    from speechbrain.nnet.normalization import BatchNorm1d

    return nn.Sequential(
        Conv1d(8, 3, input_shape=(None, 80, 30)),
        BatchNorm1d(input_size=8),
        nn.LeakyReLU(),
        nn.Dropout(0.2),
        Conv1d(4, 3, in_channels=8),
    )


@add("speechbrain", sequence(16, 8), sequence(20, 8))
def dual_path() -> nn.Module:
    from speechbrain.lobes.models.dual_path import Dual_Path_Model, SBTransformerBlock

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = {"num_layers": 1, "d_model": 8, "nhead": 2, "d_ffn": 12, "dropout": 0.1}
            self.body = Dual_Path_Model(
                8, 8, SBTransformerBlock(**block), SBTransformerBlock(**block), num_layers=1, K=6, num_spks=2
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(x.transpose(1, 2))
            return out.transpose(0, 1)

    return Turned()


# -- others -------------------------------------------------------------------------------------------------------


@add("conformer", sequence(12, 16), sequence(15, 16))
def lucid_conformer() -> nn.Module:
    from conformer import Conformer

    return Conformer(
        dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5, attn_dropout=0.1, ff_dropout=0.1, conv_dropout=0.1
    )


@add("encodec", rows(1, 640))
def encodec_autoencoder() -> nn.Module:
    from encodec.modules import SEANetDecoder, SEANetEncoder

    shape: dict[str, Any] = {
        "channels": 1,
        "dimension": 8,
        "n_filters": 4,
        "n_residual_layers": 1,
        "ratios": [4, 2],
        "lstm": 1,
    }
    return nn.Sequential(SEANetEncoder(**shape), SEANetDecoder(**shape))


@add("encodec", rows(8, 20), rows(8, 24))
def encodec_quantizer() -> nn.Module:
    from encodec.quantization.core_vq import ResidualVectorQuantization

    return ResidualVectorQuantization(
        num_quantizers=2, dim=8, codebook_size=8, kmeans_init=True, threshold_ema_dead_code=2
    )


@add("asteroid-filterbanks", rows(1, 256))
def asteroid_filters() -> nn.Module:
    from asteroid_filterbanks import Encoder, FreeFB, ParamSincFB

    return nn.Sequential(
        Encoder(ParamSincFB(8, 32, stride=16)),
        nn.ReLU(),
        nn.Dropout(0.2),
        Encoder(FreeFB(8, 4, stride=2)),
        nn.Conv2d(8, 4, 1),
    )
