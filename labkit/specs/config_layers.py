"""Which kind of token mixing each layer has, and its heads, from the many ways in which config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from labkit.errors import FileFormatError
from labkit.specs.config_fields import ConfigFields
from labkit.specs.config_states import read_state
from labkit.specs.families import Family
from labkit.specs.model_spec import LayerSpec, RopeSpec
from labkit.text import plain

MAX_LAYERS = 4096
_MAX_HEADS = 2**16
_KINDS: Mapping[str, str] = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "indexed_attention": "full",
    "deepseek_sparse_attention": "full", "minimax_m3_sparse": "full", "sliding_attention": "sliding",
    "sliding": "sliding", "local": "sliding", "chunked_attention": "chunked", "linear_attention": "state",
    "mamba": "state", "mamba2": "state", "recurrent": "state", "conv": "state", "short_conv": "state", "gdn": "state",
    "hybrid": "parallel", "mlp": "none", "moe": "none", "m": "state", "*": "full", "-": "none", "e": "none",
}  # fmt: skip
_STATE_FAMILIES = ("mamba", "mamba2", "falcon_mamba")


def read_layers(fields: ConfigFields, family: Family, rope_local: RopeSpec | None) -> tuple[list[LayerSpec], list[str]]:
    """Token mixing of every layer, without MLPs, and notes on what was assumed."""
    notes: list[str] = []
    kinds = _read_kinds(fields, family, notes)
    window = _read_window(fields, kinds, notes)
    if family.flag("encoder", fields) or fields.raw("use_bidirectional_attention") in (True, "all"):
        kinds = ["encoder"] * len(kinds)
    needs_state = any(kind in ("state", "parallel") for kind in kinds)
    state = read_state(fields, family, notes) if needs_state else None
    makers = {kind: _make_layer(fields, family, kind, window, notes) for kind in set(kinds) - {"state", "none"}}
    made = {**makers, "state": LayerSpec("state", state=state), "none": LayerSpec("none")}
    if "parallel" in made:
        made["parallel"] = replace(made["parallel"], kind="full", state=state)
    if rope_local is not None and "sliding" in made:
        made["sliding"] = replace(made["sliding"], rope_theta=rope_local.theta)
    layers = _without_positions(fields, family, [made[kind] for kind in kinds])
    if family.model_type == "longcat_flash":
        # One LongCat layer holds two attentions and two dense MLPs around one set of experts.
        layers = [layer for layer in layers for _ in range(2)]
    layers = _with_overrides(fields, layers)
    return _with_shared_kv(fields, layers), notes


def _read_kinds(fields: ConfigFields, family: Family, notes: list[str]) -> list[str]:
    pattern = fields.text("hybrid_override_pattern", default="") if fields.has("hybrid_override_pattern") else ""
    listed = fields.texts("layer_types", "layers_block_type", "block_types") or tuple(pattern)
    stated = fields.optional_integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", minimum=1)
    if fields.own("num_hidden_layers", "n_layer", "n_layers", "num_layers") is None and listed:
        stated = len(listed)
    if stated is None:
        raise FileFormatError(f"{fields.where} does not say num_hidden_layers")
    if stated > MAX_LAYERS:
        raise FileFormatError(f"num_hidden_layers in {fields.where} is {stated}", needed=f"at most {MAX_LAYERS}")
    if listed:
        return _kinds_from_list(fields, listed, stated, notes)
    return _kinds_from_rules(fields, family, stated)


def _kinds_from_list(fields: ConfigFields, listed: tuple[str, ...], count: int, notes: list[str]) -> list[str]:
    if fields.has("block_types"):
        listed = tuple(listed[index % len(listed)] for index in range(count))
    if len(listed) < count:
        raise FileFormatError(
            f"layer_types in {fields.where} names too few layers", needed=f"{count}", available=f"{len(listed)}"
        )
    kinds = []
    for word in listed[:count]:
        kind = _KINDS.get(word.casefold())
        if kind is None:
            notes.append(f"layer type {plain(word, 40)!r} is not known; full attention is assumed")
        kinds.append(kind or "full")
    return kinds


def _kinds_from_rules(fields: ConfigFields, family: Family, count: int) -> list[str]:
    """Families that give a rule instead of a list; `index` counts layers from 0."""
    marks = fields.integers("hybrid_layer_pattern", maximum=1)
    if marks:
        # MiMo: 1 for a sliding layer.
        return ["sliding" if index < len(marks) and marks[index] else "full" for index in range(count)]
    full_only = _full_attention_layers(fields, family, count)
    if full_only is not None:
        return ["full" if index in full_only else "state" for index in range(count)]
    if family.model_type == "falcon_h1":
        return ["parallel"] * count
    if fields.has("attention_chunk_size"):
        return ["chunked" if rotates else "full" for rotates in _rotating_layers(fields, count)]
    if not fields.has("sliding_window") and not fields.has("local_attention"):
        return ["full"] * count
    if not fields.flag("use_sliding_window", default=True):
        return ["full"] * count
    if fields.has("max_window_layers"):
        first = fields.integer("max_window_layers", minimum=0)
        return ["sliding" if index >= first else "full" for index in range(count)]
    period = _sliding_period(fields, family)
    if family.model_type == "modernbert":
        every = fields.integer("global_attn_every_n_layers", default=3)
        return ["full" if index % every == 0 else "sliding" for index in range(count)]
    return ["sliding" if period == 0 or (index + 1) % period else "full" for index in range(count)]


def _full_attention_layers(fields: ConfigFields, family: Family, count: int) -> frozenset[int] | None:
    """Layers with attention in a model whose other layers keep a recurrent state; None for other models."""
    if family.model_type in _STATE_FAMILIES:
        return frozenset()
    if fields.has("attn_layer_period"):
        period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", default=0, minimum=0)
        return frozenset(index for index in range(count) if index % period == offset)
    if fields.has("attn_layer_indices") or family.model_type == "bamba":
        return frozenset(fields.integers("attn_layer_indices"))
    if fields.has("full_attn_idxs"):
        return frozenset(fields.integers("full_attn_idxs"))
    if fields.has("attn_type_list"):
        return frozenset(index for index, kind in enumerate(fields.integers("attn_type_list")) if kind == 1)
    linear = fields.section("linear_attn_config")
    if linear is not None and linear.has("full_attn_layers"):
        return frozenset(index - 1 for index in linear.integers("full_attn_layers"))
    if fields.has("linear_conv_kernel_dim"):
        every = fields.integer("full_attention_interval", default=4)
        return frozenset(range(every - 1, count, every))
    if family.model_type == "minimax":
        return frozenset(range(0, count, 2))
    return None


def _sliding_period(fields: ConfigFields, family: Family) -> int:
    """Every how many layers one has full attention; 0 where all layers slide."""
    value = fields.raw("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(value, str) and value:
        return len(value)
    if value is not None:
        return fields.integer("sliding_window_pattern", "_sliding_window_pattern", minimum=0)
    return {"gemma2": 2, "gpt_oss": 2, "gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6, "cohere2": 4}.get(
        family.model_type, 0
    )


def _read_window(fields: ConfigFields, kinds: list[str], notes: list[str]) -> int | None:
    if "chunked" in kinds:
        return fields.integer("attention_chunk_size")
    if "sliding" not in kinds:
        return None
    if not fields.flag("use_sliding_window", default=True):
        return None
    window = fields.optional_integer(
        "sliding_window", "attention_window_size", "local_attention", "sliding_window_size", "window_size", minimum=0
    )
    longest = fields.optional_integer("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions")
    if window and longest and window >= longest:
        notes.append(f"the sliding window of {window:,} tokens is not below the longest request: no effect")
        return None
    return window or None


def _make_layer(fields: ConfigFields, family: Family, kind: str, window: int | None, notes: list[str]) -> LayerSpec:
    own_window = window if kind in ("sliding", "chunked") else None
    actual = "full" if kind in ("sliding", "parallel") and own_window is None else kind
    if fields.has("kv_lora_rank"):
        return _make_mla(fields, own_window)
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", maximum=_MAX_HEADS)
    kv_heads = _read_kv_heads(fields, heads)
    head_dim = fields.optional_integer("head_dim", "attention_head_dim", "kv_channels", maximum=2**16)
    if not head_dim:
        hidden = fields.integer("hidden_size", "n_embd", "d_model", "dim", maximum=2**24)
        if hidden % heads:
            raise FileFormatError(f"{fields.where} gives no head_dim, and {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
        if not family.known:
            notes.append(f"head_dim is not stated; hidden_size / num_attention_heads = {head_dim} is assumed")
    layer = LayerSpec(actual, heads, kv_heads, head_dim, window=own_window)  # type: ignore[arg-type]
    return _sized_by_kind(fields, layer)


def _sized_by_kind(fields: ConfigFields, layer: LayerSpec) -> LayerSpec:
    """Families whose sliding and full layers have different heads (Gemma 4, MiMo)."""
    value_dim = fields.optional_integer("v_head_dim", maximum=2**16)
    if value_dim and value_dim != layer.head_dim:
        layer = replace(layer, v_head_dim=value_dim)
    if layer.kind == "sliding" and fields.has("swa_num_key_value_heads"):
        head_dim = fields.integer("swa_head_dim", default=layer.head_dim, maximum=2**16)
        value_dim = fields.integer("swa_v_head_dim", default=layer.v_head_dim or head_dim, maximum=2**16)
        return replace(
            layer,
            num_heads=fields.integer("swa_num_attention_heads", default=layer.num_heads, maximum=_MAX_HEADS),
            num_kv_heads=fields.integer("swa_num_key_value_heads", maximum=_MAX_HEADS),
            head_dim=head_dim,
            v_head_dim=None if value_dim == head_dim else value_dim,
        )
    if layer.kind == "full" and (fields.has("global_head_dim") or fields.has("num_global_key_value_heads")):
        shares = fields.flag("attention_k_eq_v")
        kv_heads = fields.integer("num_global_key_value_heads", default=layer.num_kv_heads, maximum=_MAX_HEADS)
        return replace(
            layer,
            head_dim=fields.integer("global_head_dim", default=layer.head_dim, maximum=2**16),
            num_kv_heads=kv_heads if shares else layer.num_kv_heads,
            shares_key_value=shares,
        )
    return layer


def _read_kv_heads(fields: ConfigFields, heads: int) -> int:
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    attention = fields.section("attn_config")
    if attention is not None and attention.has("kv_n_heads"):
        return attention.integer("kv_n_heads", maximum=_MAX_HEADS)
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num")
    kv_heads = fields.integer(*names, default=heads, maximum=_MAX_HEADS)
    if kv_heads > heads or heads % kv_heads:
        raise FileFormatError(
            f"num_key_value_heads in {fields.where}: {heads} query heads cannot share {kv_heads} evenly"
        )
    return kv_heads


def _make_mla(fields: ConfigFields, window: int | None) -> LayerSpec:
    heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    rope, nope = (
        fields.integer("qk_rope_head_dim", minimum=0, maximum=2**16),
        fields.integer("qk_nope_head_dim", maximum=2**16),
    )
    return LayerSpec(
        "mla",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=rope + nope,
        v_head_dim=fields.integer("v_head_dim", maximum=2**16),
        window=window,
        kv_lora_rank=fields.integer("kv_lora_rank", maximum=2**16),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=nope,
        q_lora_rank=fields.optional_integer("q_lora_rank", maximum=2**20),
        index_head_dim=fields.integer("index_head_dim", default=0, minimum=0, maximum=2**16),
        index_num_heads=fields.integer("index_n_heads", default=0, minimum=0, maximum=_MAX_HEADS),
    )


def _rotating_layers(fields: ConfigFields, count: int) -> list[bool]:
    """`no_rope_layers` holds 1 for layers that do rotate; without it every n-th layer does not."""
    listed = fields.integers("no_rope_layers", maximum=1)
    if listed:
        return [index >= len(listed) or bool(listed[index]) for index in range(count)]
    interval = fields.optional_integer("no_rope_layer_interval")
    return [not interval or (index + 1) % interval != 0 for index in range(count)]


def _without_positions(fields: ConfigFields, family: Family, layers: list[LayerSpec]) -> list[LayerSpec]:
    if family.traits.get("positions", "rope") != "rope":
        return [replace(layer, uses_rope=False) for layer in layers]
    if not fields.has("no_rope_layers") and not fields.has("no_rope_layer_interval"):
        return layers
    return [
        layer if layer.kind == "state" or rotates else replace(layer, uses_rope=False)
        for layer, rotates in zip(layers, _rotating_layers(fields, len(layers)), strict=True)
    ]


def _with_overrides(fields: ConfigFields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """`per_layer_config` of transformers 5: {"05": {"head_dim": 512}}."""
    overrides = fields.section("per_layer_config")
    for key in overrides.keys() if overrides is not None else ():
        own = overrides.section(key) if overrides is not None else None
        if own is None or not key.isdecimal() or len(key) > 6 or int(key) >= len(layers):
            continue
        layer = layers[int(key)]
        layers[int(key)] = replace(
            layer,
            head_dim=own.integer("head_dim", default=layer.head_dim, minimum=0, maximum=2**16),
            num_kv_heads=own.integer("num_key_value_heads", default=layer.num_kv_heads, minimum=0, maximum=_MAX_HEADS),
        )
    return layers


def _with_shared_kv(fields: ConfigFields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """The last layers of Gemma 3n and 4 read the KV of the last layer of their kind that stores one."""
    shared = fields.optional_integer("num_kv_shared_layers", maximum=MAX_LAYERS) or 0
    if not 0 < shared < len(layers):
        return layers
    first = len(layers) - shared
    donors = {layer.kind: index for index, layer in enumerate(layers[:first])}
    return layers[:first] + [replace(layer, shares_kv_with=donors.get(layer.kind)) for layer in layers[first:]]
