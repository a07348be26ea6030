"""`model_from_config`: one way from a config.json of any family to a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.errors import FileFormatError, UnsupportedError
from labkit.specs.config_experts import dense_width, read_experts, with_experts
from labkit.specs.config_extras import read_extra_weights
from labkit.specs.config_fields import ConfigFields
from labkit.specs.config_layers import read_layers
from labkit.specs.config_quantization import read_weight_format
from labkit.specs.config_rope import read_rope
from labkit.specs.families import Family, find_family
from labkit.specs.model_spec import LayerSpec, ModelSpec
from labkit.text import plain

_DTYPES = ("float32", "float16", "bfloat16")
_NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "decoder_config", "thinker_config")
_SHARED_WITH_WRAPPER = (
    "tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "compression_config", "bos_token_id",
    "eos_token_id",
)  # fmt: skip
_STRUCTURE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_VOCAB_NAMES = ("vocab_size", "padded_vocab_size")
_HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model", "dim")
_LENGTH_NAMES = (
    "max_position_embeddings", "model_max_length", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx",
    "seq_length",
)  # fmt: skip
_NORM_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation")


def model_from_config(config: Mapping[str, Any], name: str = "model", *, source: str = "config.json") -> ModelSpec:
    """The `ModelSpec` of a config.json; only keys known by name are read.

    Args:
        config: the parsed file. Wrappers of multimodal models are followed to their text model.
        name: how the model is called.
        source: where the config came from, for `ModelSpec.source`.

    Raises:
        FileFormatError: a needed key is missing, or a value has the wrong type or is out of range.
        UnsupportedError: an encoder-decoder model.
    """
    if not isinstance(config, Mapping):
        raise FileFormatError(f"the config of {plain(name, 80)} is a {type(config).__name__}, not a JSON object")
    where = f"the config of {plain(name, 80)}"
    text, wrapper, notes = _find_text_model(config, where)
    family = find_family(_model_type(text, where))
    if not family.known:
        notes.append(f"model type {plain(family.model_type, 60)!r} is not in the catalogue; Llama's layout is assumed")
    fields = _with_defaults(text, wrapper, family, where)
    _note_defaults(text, family, wrapper is not None, notes)
    return _build(fields, ConfigFields(config, where), family, name, source, notes)


def _find_text_model(
    config: Mapping[str, Any], where: str
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, list[str]]:
    if ConfigFields(config, where).flag("is_encoder_decoder"):
        raise UnsupportedError(
            f"{where} describes an encoder-decoder model, whose cross-attention cache labkit does not plan",
            works="a decoder or an encoder model",
        )
    text, wrapper = config, None
    for _ in range(3):
        nested = next((text[key] for key in _NESTED if isinstance(text.get(key), Mapping)), None)
        if nested is None:
            break
        text, wrapper = nested, {**(wrapper or {}), **text}
    notes = [] if wrapper is None else ["a multimodal model: the text part is planned"]
    return text, wrapper, notes


def _model_type(text: Mapping[str, Any], where: str) -> str:
    return ConfigFields(text, where).text("model_type", default="unknown")


def _with_defaults(
    text: Mapping[str, Any], wrapper: Mapping[str, Any] | None, family: Family, where: str
) -> ConfigFields:
    fallback = {key: value for key, value in family.defaults.items() if key != "rope_parameters"}
    for key in _SHARED_WITH_WRAPPER:
        if wrapper is not None and wrapper.get(key) is not None:
            fallback[key] = wrapper[key]
    return ConfigFields(text, where, fallback)


def _note_defaults(text: Mapping[str, Any], family: Family, is_wrapped: bool, notes: list[str]) -> None:
    filled = [key for key in _STRUCTURE if key not in text and key in family.defaults]
    aliases = {"hidden_size": _HIDDEN_NAMES, "num_hidden_layers": ("layer_types", "layers_block_type", "n_layers")}
    filled = [key for key in filled if not any(alias in text for alias in aliases.get(key, ()))]
    if len(filled) == len(_STRUCTURE) and not is_wrapped:
        raise FileFormatError("the config says nothing of the model's shape", needed=", ".join(_STRUCTURE))
    if filled:
        notes.append(f"not stated, so as the class {plain(family.model_type, 60)} has it: {', '.join(filled)}")


def _build(
    fields: ConfigFields, outer: ConfigFields, family: Family, name: str, source: str, notes: list[str]
) -> ModelSpec:
    hidden = fields.integer(*_HIDDEN_NAMES, maximum=2**24)
    rope, rope_local, rope_notes = read_rope(fields, family, _rotated_head_dim(fields, hidden))
    mixers, layer_notes = read_layers(fields, family, rope_local)
    moe = read_experts(fields, family)
    layers = with_experts(fields, family, mixers, moe)
    dtype, dtype_notes = _read_dtype(fields)
    weight_format, format_notes = read_weight_format(fields, dtype)
    architectures = outer.texts("architectures") or fields.texts("architectures")
    return ModelSpec(
        name=name,
        architecture=architectures[0] if architectures else "",
        model_type=family.model_type,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=dense_width(fields, family),
        vocab_size=fields.integer(*_VOCAB_NAMES, maximum=2**26),
        max_position_embeddings=_read_length(fields, notes),
        dtype=dtype,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=not family.known),
        rope=rope,
        rope_local=rope_local,
        moe=moe if any(layer.num_experts for layer in layers) else None,
        weight_format=weight_format,
        bos_token_id=fields.optional_integer("bos_token_id") if not _is_list(fields, "bos_token_id") else None,
        eos_token_ids=_read_stops(fields),
        is_embedding=family.flag("encoder", fields) or any(layer.kind == "encoder" for layer in layers),
        pooling="mean" if any(layer.kind == "encoder" for layer in layers) else "last",
        extra_weights=read_extra_weights(fields, outer, family, layers),
        source=source,
        notes=tuple(dict.fromkeys([*notes, *rope_notes, *layer_notes, *dtype_notes, *format_notes])),
        **_read_traits(fields, family, layers),
    )


def _read_traits(fields: ConfigFields, family: Family, layers: tuple[LayerSpec, ...]) -> dict[str, Any]:
    sandwich = family.flag("sandwich_norms", fields)
    return {
        "rms_norm_eps": fields.number(*_NORM_NAMES, default=1e-6, minimum=0.0, maximum=1.0),
        "hidden_act": fields.text(*_ACTIVATION_NAMES, default="silu"),
        "qkv_bias": family.flag("qkv_bias", fields),
        "attention_bias": family.flag("attention_bias", fields),
        "mlp_bias": family.flag("mlp_bias", fields),
        "qk_norm": family.flag("qk_norm", fields),
        "qk_norm_full_width": family.flag("qk_norm_full_width", fields),
        "output_gate": family.flag("output_gate", fields) and fields.flag("attn_output_gate", default=True),
        "norm": str(family.traits.get("norm", "rms")),
        "norms_per_layer": _count_norms(fields, family, sandwich),
        "final_norm": family.flag("final_norm", fields, default=True),
        "head_bias": family.flag("head_bias", fields),
        "sandwich_norms": sandwich,
        "norm_offset": family.flag("norm_offset", fields),
        "scale_embeddings": family.flag("scale_embeddings", fields),
        "attention_softcap": fields.optional_number("attn_logit_softcapping", minimum=1e-6),
        "final_softcap": fields.optional_number("final_logit_softcapping", "logits_soft_cap", minimum=1e-6),
        "attention_scale": _read_scale(fields, family, layers),
        "attention_sinks": family.flag("attention_sinks", fields),
        "gated_mlp": family.flag("gated_mlp", fields, default=True),
    }


def _count_norms(fields: ConfigFields, family: Family, sandwich: bool) -> int:
    if sandwich:
        return 4
    if family.model_type == "falcon" and fields.flag("parallel_attn") and not fields.flag("new_decoder_architecture"):
        return 1
    return int(family.traits.get("norms_per_layer", 2))


def _read_scale(fields: ConfigFields, family: Family, layers: tuple[LayerSpec, ...]) -> float | None:
    scalar = fields.optional_number("query_pre_attn_scalar", minimum=1e-6)
    if scalar is not None:
        head_dims = {layer.head_dim for layer in layers}
        return None if head_dims == {scalar} else scalar**-0.5
    if family.model_type in ("gemma3n_text", "gemma4_text", "gemma4", "gemma3n"):
        return 1.0
    return fields.optional_number("attention_multiplier", minimum=1e-9)


def _rotated_head_dim(fields: ConfigFields, hidden: int) -> int:
    heads = fields.optional_integer("num_attention_heads", "n_head", "n_heads", maximum=2**16)
    return fields.optional_integer("head_dim", maximum=2**16) or (hidden // heads if heads else 0)


def _read_length(fields: ConfigFields, notes: list[str]) -> int:
    stated = fields.optional_integer(*_LENGTH_NAMES, minimum=1, maximum=2**31)
    if stated is not None:
        return stated
    notes.append("the longest position is not stated; 2^20 tokens assumed")
    return 2**20


def _read_dtype(fields: ConfigFields) -> tuple[str, list[str]]:
    stated = fields.text("dtype", "torch_dtype", default="").removeprefix("torch.")
    stated = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(stated, stated)
    if stated in _DTYPES:
        return stated, []
    if not stated:
        return "bfloat16", ["the dtype is not stated; bfloat16 assumed"]
    return "bfloat16", [f"dtype {plain(stated, 40)!r} is not known; bfloat16 assumed"]


def _is_list(fields: ConfigFields, key: str) -> bool:
    return isinstance(fields.raw(key), list)


def _read_stops(fields: ConfigFields) -> tuple[int, ...]:
    if _is_list(fields, "eos_token_id"):
        return fields.integers("eos_token_id", longest=256)
    single = fields.optional_integer("eos_token_id", minimum=-1)
    return () if single is None or single < 0 else (single,)
