"""Recurrent states of Mamba, gated-delta-net, short-convolution and linear-attention layers, from config.json."""

from __future__ import annotations

import math

from labkit.specs.config_fields import ConfigFields
from labkit.specs.families import Family
from labkit.specs.model_spec import StateSpec

_MAX = 2**24


def read_state(fields: ConfigFields, family: Family, notes: list[str]) -> StateSpec:
    """State of one layer for one request, as vLLM's `mamba_utils.py` shapes it (MambaStateShapeCalculator)."""
    hidden = fields.integer("hidden_size", "n_embd", "d_model", maximum=_MAX)
    if fields.has("linear_conv_kernel_dim") and fields.has("linear_num_value_heads"):
        return _gated_delta_net(fields, hidden)
    if family.model_type == "kimi_linear" or fields.has("linear_attn_config"):
        return _kimi_delta(fields, hidden)
    if fields.has("conv_L_cache"):
        return _short_convolution(fields, hidden)
    if fields.has("lru_width") or family.model_type == "recurrent_gemma":
        return _griffin(fields, hidden)
    if family.model_type in ("minimax", "MiniMaxText01", "minimax_text_01"):
        return _lightning(fields, hidden)
    if _mamba2_heads(fields):
        return _mamba2(fields, hidden)
    if not any(fields.has(name) for name in ("mamba_d_state", "state_size", "ssm_state_size")):
        notes.append("the state of the recurrent layers is not described; Mamba 1 with 16 states is assumed")
    return _mamba1(fields, hidden, family)


def _mamba2_heads(fields: ConfigFields) -> int | None:
    names = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    heads = fields.optional_integer(*names, maximum=_MAX)
    return heads or (fields.optional_integer("num_heads", maximum=_MAX) if fields.has("n_groups") else None)


def _state_dtype(fields: ConfigFields) -> str:
    return fields.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="auto").removeprefix("torch.")


def _mamba1(fields: ConfigFields, hidden: int, family: Family) -> StateSpec:
    expand = fields.integer("mamba_expand", "expand", default=2, maximum=64)
    inner = expand * hidden
    if family.model_type in ("mamba", "falcon_mamba"):
        inner = fields.integer("intermediate_size", "d_inner", default=inner, maximum=_MAX)
    states = fields.integer("mamba_d_state", "state_size", "ssm_state_size", default=16, maximum=2**16)
    kernel = fields.integer("mamba_d_conv", "conv_kernel", "d_conv", default=4, maximum=1024)
    rank_value = fields.raw("mamba_dt_rank", "time_step_rank")
    rank = math.ceil(hidden / 16)
    if rank_value not in (None, "auto"):
        rank = fields.integer("mamba_dt_rank", "time_step_rank", maximum=_MAX)
    bias = fields.flag("mamba_proj_bias", "use_bias")
    parameters = (
        2 * inner * hidden + inner * hidden + inner * kernel + inner * (rank + 2 * states)
        + rank * inner + inner + inner * states + inner
    )  # fmt: skip
    parameters += inner if fields.flag("mamba_conv_bias", "use_conv_bias", default=True) else 0
    parameters += (2 * inner + hidden) if bias else 0
    parameters += rank + 2 * states if family.model_type == "jamba" else 0
    return StateSpec(
        "mamba1", ((kernel - 1, inner), (inner, states)), ("auto", _state_dtype(fields)), (1, 0), parameters
    )


def _mamba2(fields: ConfigFields, hidden: int) -> StateSpec:
    heads = _mamba2_heads(fields) or 1
    expand = fields.integer("mamba_expand", "expand", default=2, maximum=64)
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim") + (() if fields.has("mamba_n_heads") else ("head_dim",))
    stated = fields.raw(*names)
    width = expand * hidden // heads if stated in (None, "auto") else fields.integer(*names, maximum=2**16)
    inner = fields.integer("mamba_d_ssm", default=heads * width, maximum=_MAX)
    groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1, maximum=2**16)
    states = fields.integer("mamba_d_state", "ssm_state_size", "state_size", default=128, maximum=2**16)
    kernel = fields.integer("mamba_d_conv", "conv_kernel", default=4, maximum=1024)
    channels = inner + 2 * groups * states
    projected = inner + channels + heads
    parameters = projected * hidden + inner * hidden + channels * kernel + 3 * heads
    parameters += channels if fields.flag("mamba_conv_bias", "use_conv_bias", default=True) else 0
    parameters += projected + hidden if fields.flag("mamba_proj_bias", "use_bias", "add_bias_linear") else 0
    parameters += inner if fields.flag("mamba_rms_norm", default=True) else 0
    shapes = ((kernel - 1, channels), (heads, width, states))
    return StateSpec("mamba2", shapes, ("auto", _state_dtype(fields)), (1, 0), parameters)


def _gated_delta_net(fields: ConfigFields, hidden: int) -> StateSpec:
    key_heads = fields.integer("linear_num_key_heads", maximum=2**16)
    value_heads = fields.integer("linear_num_value_heads", maximum=2**16)
    key_dim = fields.integer("linear_key_head_dim", maximum=2**16)
    value_dim = fields.integer("linear_value_head_dim", maximum=2**16)
    kernel = fields.integer("linear_conv_kernel_dim", maximum=1024)
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    projections = (channels + values + 2 * value_heads) * hidden + values * hidden
    parameters = projections + channels * kernel + 2 * value_heads + value_dim
    shapes = ((kernel - 1, channels), (value_heads, key_dim, value_dim))
    return StateSpec("gdn", shapes, ("auto", _state_dtype(fields)), (1, 0), parameters)


def _kimi_delta(fields: ConfigFields, hidden: int) -> StateSpec:
    section = fields.section("linear_attn_config")
    if section is None:
        section = fields.only("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    heads = section.integer("num_heads", "linear_num_heads", default=32, maximum=2**16)
    width = section.integer("head_dim", "linear_head_dim", default=128, maximum=2**16)
    kernel = section.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4, maximum=1024)
    inner = heads * width
    # q, k, v, o; three convolutions; low-rank decay and output gates; beta, A, dt bias and the output norm.
    parameters = 4 * inner * hidden + 3 * inner * kernel + 2 * (hidden * width + width * inner)
    parameters += hidden * heads + heads + inner + width
    shapes = ((kernel - 1, inner),) * 3 + ((heads, width, width),)
    return StateSpec("linear", shapes, ("auto", "auto", "auto", "float32"), (1, 1, 1, 0), parameters)


def _short_convolution(fields: ConfigFields, hidden: int) -> StateSpec:
    length = fields.integer("conv_L_cache", maximum=1024)
    channels = fields.integer("conv_dim", default=hidden, maximum=_MAX)
    parameters = 3 * channels * hidden + channels * hidden + channels * length
    parameters += 3 * channels + hidden + channels if fields.flag("conv_bias") else 0
    return StateSpec("short_conv", ((length - 1, channels),), ("auto",), (1,), parameters)


def _griffin(fields: ConfigFields, hidden: int) -> StateSpec:
    width = fields.integer("lru_width", default=hidden, maximum=_MAX)
    kernel = fields.integer("conv1d_width", default=4, maximum=1024)
    heads = fields.integer("num_attention_heads", default=1, maximum=2**16)
    gates = 2 * (heads * (width // heads) ** 2 + width) + width
    parameters = 2 * (hidden * width + width) + width * hidden + hidden + width * kernel + width + gates
    return StateSpec("linear", ((kernel - 1, width), (width,)), ("auto", "float32"), (1, 0), parameters)


def _lightning(fields: ConfigFields, hidden: int) -> StateSpec:
    heads = fields.integer("num_attention_heads", maximum=2**16)
    width = fields.integer("head_dim", default=max(1, hidden // heads), maximum=2**16)
    inner = heads * width
    return StateSpec("linear", ((heads, width, width),), ("float32",), (0,), 5 * inner * hidden + inner)
