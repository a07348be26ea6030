"""Which layers have experts, how many and how wide, from the many ways in which config.json says it."""

from __future__ import annotations

from dataclasses import replace

from labkit.specs.config_fields import ConfigFields
from labkit.specs.families import Family
from labkit.specs.model_spec import LayerSpec, MoeSpec

_MAX_WIDTH = 2**24
_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_CHOSEN_NAMES = (
    "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token", "num_selected_experts",
)  # fmt: skip
_SHARED_COUNT_NAMES = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH_NAMES = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip


def read_experts(fields: ConfigFields, family: Family) -> MoeSpec | None:
    """The experts of the model's MoE layers, or None for a dense model."""
    count = _first(fields, _COUNT_NAMES)
    if count <= 1 or (fields.has("enable_moe_block") and not fields.flag("enable_moe_block")):
        return None
    width = _first(fields, ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"))
    width = width or fields.integer("intermediate_size", "ffn_dim", maximum=_MAX_WIDTH)
    return MoeSpec(
        num_experts=count,
        num_experts_per_tok=min(count, max(1, _first(fields, _CHOSEN_NAMES))),
        intermediate_size=width,
        shared_intermediate_size=_shared_width(fields, family, width),
        shared_gate=family.model_type in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"),
        router_bias=family.model_type in ("gpt_oss", "ernie4_5_moe"),
        expert_bias=family.model_type == "gpt_oss",
        dense_beside=family.model_type in ("gemma4_text", "gemma4", "longcat_flash"),
    )


def _shared_width(fields: ConfigFields, family: Family, expert_width: int) -> int:
    if family.model_type in ("llama4_text", "llama4"):
        return fields.integer("intermediate_size", maximum=_MAX_WIDTH)
    stated = _first(fields, _SHARED_WIDTH_NAMES)
    shared = _first(fields, _SHARED_COUNT_NAMES) or (family.model_type == "hunyuan_v1_moe")
    if stated:
        return stated * max(1, shared) if family.model_type == "nemotron_h" else stated
    return shared * expert_width


def with_experts(
    fields: ConfigFields, family: Family, layers: list[LayerSpec], moe: MoeSpec | None
) -> tuple[LayerSpec, ...]:
    """`layers` with the width of their MLPs and the number of their experts."""
    widths = _dense_widths(fields, family, layers)
    chosen = _expert_layers(fields, family, len(layers)) if moe is not None else frozenset()
    placed = []
    for index, layer in enumerate(layers):
        experts = moe.num_experts if moe is not None and index in chosen else 0
        placed.append(replace(layer, num_experts=experts, intermediate_size=widths[index]))
    return tuple(placed)


def dense_width(fields: ConfigFields, family: Family) -> int:
    """Width of the dense MLP; 0 for a model without one."""
    if family.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return 0
    if family.model_type in ("llama4_text", "llama4"):
        return fields.integer("intermediate_size_mlp", "intermediate_size", maximum=_MAX_WIDTH)
    if family.model_type == "lfm2" and fields.flag("block_auto_adjust_ff_dim"):
        return _adjusted_width(fields)
    if family.model_type == "recurrent_gemma":
        return fields.integer("intermediate_size", maximum=_MAX_WIDTH) // 2
    if isinstance(fields.raw("intermediate_size"), list):
        return max(fields.integers("intermediate_size", maximum=_MAX_WIDTH), default=0)
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim", "mlp_hidden_size")
    stated = fields.optional_integer(*names, maximum=_MAX_WIDTH)
    if stated is None:
        ratio = fields.integer("expansion_ratio", "mlp_ratio", default=4, maximum=64)
        stated = ratio * fields.integer("hidden_size", "n_embd", "d_model", "dim", maximum=_MAX_WIDTH)
    return stated


def _adjusted_width(fields: ConfigFields) -> int:
    """LFM 2 rounds two thirds of the stated width up to a multiple (Lfm2MLP)."""
    width = int(2 * fields.integer("intermediate_size", maximum=_MAX_WIDTH) / 3)
    if fields.has("block_ffn_dim_multiplier"):
        width = int(fields.number("block_ffn_dim_multiplier", default=1.0, minimum=0, maximum=64) * width)
    multiple = fields.integer("block_multiple_of", default=256)
    return multiple * ((width + multiple - 1) // multiple)


def _dense_widths(fields: ConfigFields, family: Family, layers: list[LayerSpec]) -> list[int | None]:
    """Widths that differ from the model's: 0 without an MLP, None where there is no difference."""
    if family.model_type == "nemotron_h":
        words = _block_words(fields)[: len(layers)]
        return [None if word in ("-", "mlp", "e", "moe") else 0 for word in words]
    if family.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return [0] * len(layers)
    if family.model_type == "zamba2":
        return [None if layer.kind != "state" else 0 for layer in layers]
    if isinstance(fields.raw("intermediate_size"), list):
        listed = fields.integers("intermediate_size", maximum=_MAX_WIDTH)
        return [listed[min(index, len(listed) - 1)] if listed else None for index in range(len(layers))]
    if fields.flag("use_double_wide_mlp"):
        wide = 2 * fields.integer("intermediate_size", maximum=_MAX_WIDTH)
        return [wide if layer.shares_kv_with is not None else None for layer in layers]
    return [None] * len(layers)


def _expert_layers(fields: ConfigFields, family: Family, count: int) -> frozenset[int]:
    """Indices of the layers whose MLP has experts; `count` layers in all."""
    if family.model_type == "longcat_flash":
        return frozenset(range(0, count, 2))
    if family.model_type == "nemotron_h":
        return frozenset(index for index, word in enumerate(_block_words(fields)) if word in ("e", "moe"))
    listed = fields.texts("mlp_layer_types")
    if listed:
        return frozenset(index for index, word in enumerate(listed) if word in ("sparse", "moe"))
    if isinstance(fields.raw("moe_layers"), list):
        return frozenset(fields.integers("moe_layers"))
    if isinstance(fields.raw("moe_layer_freq"), list):
        return frozenset(index for index, one in enumerate(fields.integers("moe_layer_freq")) if one == 1)
    if fields.has("interleave_moe_layer_step"):
        step = fields.integer("interleave_moe_layer_step", minimum=0)
        return frozenset(range(step - 1, count, step)) if step else frozenset()
    if fields.has("expert_layer_period"):
        offset = fields.integer("expert_layer_offset", default=0, minimum=0)
        return frozenset(range(offset, count, fields.integer("expert_layer_period")))
    return _expert_layers_by_step(fields, count) - frozenset(fields.integers("mlp_only_layers"))


def _expert_layers_by_step(fields: ConfigFields, count: int) -> frozenset[int]:
    if fields.has("moe_layer_interval"):
        first = fields.integer("moe_layer_start_index", default=0, minimum=0)
        last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
        every = fields.integer("moe_layer_interval")
        end = last if last >= 0 else count - 1
        return frozenset(index for index in range(count) if first <= index <= end and (index + 1) % every == 0)
    dense_first = _first(fields, ("first_k_dense_replace", "num_dense_layers"))
    frequency = fields.integer("moe_layer_freq", default=1)
    step = fields.integer("decoder_sparse_step", default=1)
    return frozenset(index for index in range(dense_first, count) if index % frequency == 0 and (index + 1) % step == 0)


def _block_words(fields: ConfigFields) -> list[str]:
    """Nemotron-H's layers: words, or one letter each."""
    words = fields.texts("layers_block_type", "layer_types") or tuple(fields.text("hybrid_override_pattern"))
    return [word.casefold() for word in words]


def _first(fields: ConfigFields, names: tuple[str, ...]) -> int:
    """The first stated number; lists (one entry a layer) count by their largest entry; 0 where silent."""
    if isinstance(fields.raw(*names), list):
        return max(fields.integers(*names, maximum=_MAX_WIDTH), default=0)
    return fields.optional_integer(*names, maximum=_MAX_WIDTH) or 0
