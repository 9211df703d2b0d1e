"""`hf:NAME`: a small model of transformers with random weights, by its type or its class; nothing is downloaded.

hf:llama                                    a model for language, or the plain model where the type has none
hf:BertForMaskedLM                          by its class
hf:gpt2,n_layer=8,n_embd=256                with entries of its config
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from typing import Any

from pipecompile.errors import InputError

__all__ = ["transformers_model"]

_SIZES = {
    64: ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "decoder_hidden_size", "word_embed_proj_dim"),
    128: ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    4: (
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
        "num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    16: ("head_dim", "d_kv"),
    512: ("vocab_size",),
    256: ("max_position_embeddings", "n_positions"),
}  # fmt: skip
"""Sizes of a small model: entries of configs with the same meaning under different names."""


def transformers_model(name: str) -> object:
    """Return the model. Raise InputError for an unknown name or entry, with the nearest known one."""
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise InputError("there is no module 'transformers'", hint="pip install transformers") from None
    kind, *settings = [part.strip() for part in name.split(",")]
    model_class, config_class = _classes(library, kind)
    try:
        return model_class(_small_config(config_class, settings))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"hf:{name} cannot be made small: {type(error).__name__}: {error}",
            hint=f"hf:{kind},ENTRY=VALUE with entries of {config_class.__name__}",
        ) from error


def _classes(library: Any, kind: str) -> tuple[Any, Any]:
    """Return what makes the model, and the class of its config."""
    types = library.models.auto.configuration_auto.CONFIG_MAPPING
    if kind in types:
        config_class = types[kind]
        for models in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_MAPPING):
            if config_class in models:
                return models[config_class], config_class
    config_class = getattr(getattr(library, kind, None), "config_class", None) if kind.isidentifier() else None
    if config_class is not None:
        return getattr(library, kind), config_class
    known = [*types.keys(), *(each for each in dir(library) if each.endswith(("Model", "LM", "Classification")))]
    words = re.split(r"[^a-z]+", kind.rpartition("/")[2].lower())  # of a checkpoint: bert-base-uncased
    near = [each for each in words if each in types] or difflib.get_close_matches(kind, known, n=3, cutoff=0.4)
    raise InputError(f"transformers has no model {kind!r}", hint=", ".join(f"hf:{each}" for each in near))


def _small_config(config_class: Any, settings: list[str]) -> Any:
    """Return a config of small sizes, with the settings `entry=value` on top."""
    plain = config_class()
    own = dict(config_class.attribute_map)  # from a common name to that of this class: hidden_size to n_embd
    known = ((entry, size) for size, entries in _SIZES.items() for entry in entries if _is_size(plain, entry))
    sizes: dict[str, Any] = {own.get(entry, entry): size for entry, size in known}
    entries = [setting.partition("=")[0] for setting in settings]
    for setting in settings:
        entry, equals, value = setting.partition("=")
        if entries.count(entry) > 1:
            raise InputError(f"the entry {entry!r} of {config_class.__name__} is there twice", hint=f"{setting}, once")
        if not equals or not hasattr(plain, entry):
            near = difflib.get_close_matches(entry, plain.to_dict(), n=3)
            raise InputError(f"{config_class.__name__} has no entry {entry!r}", hint=", ".join(f"{e}=" for e in near))
        try:
            sizes[own.get(entry, entry)] = json.loads(value)
        except ValueError:
            sizes[own.get(entry, entry)] = value
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(plain, token, None), int):
            sizes.setdefault(token, 0)
    if hasattr(plain, "use_cache"):
        sizes.setdefault("use_cache", False)
    return config_class(**sizes)


def _is_size(config: Any, entry: str) -> bool:
    size = getattr(config, entry, None)
    return isinstance(size, int) and not isinstance(size, bool)
