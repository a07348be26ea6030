"""Parameters outside the decoder layers that memory still has to hold: towers, per-layer embeddings, positions."""

from __future__ import annotations

from labkit.specs.config_fields import ConfigFields
from labkit.specs.families import Family
from labkit.specs.model_spec import LayerSpec

_MAX = 2**24


def read_extra_weights(
    fields: ConfigFields, outer: ConfigFields, family: Family, layers: tuple[LayerSpec, ...]
) -> tuple[tuple[str, int], ...]:
    """Named parameter counts outside the plain decoder.

    Args:
        fields, family: the text model.
        outer: the whole config, where the vision tower is described.
        layers: the decoder layers.
    """
    hidden = fields.integer("hidden_size", "n_embd", "d_model", "dim", maximum=_MAX)
    found = [
        ("learned positions", _learned_positions(fields, family, hidden)),
        ("embedding norm", _embedding_norm(family, hidden)),
        ("token types and pooler", _encoder_parts(fields, family, hidden)),
        ("alternating updates and low-rank residuals", _alternating_updates(fields, len(layers), hidden)),
        ("activation parameters", 2 * len(layers) if family.model_type == "apertus" else 0),
        ("router columns without expert", _zero_experts(fields, len(layers), hidden)),
        ("per-layer embeddings", _per_layer_embeddings(fields, len(layers), hidden)),
        ("vision tower (estimate)", _vision_tower(outer, hidden)),
    ]
    return tuple((name, count) for name, count in found if count)


def _learned_positions(fields: ConfigFields, family: Family, hidden: int) -> int:
    if family.traits.get("positions") != "learned":
        return 0
    longest = fields.integer("max_position_embeddings", "n_positions", "n_ctx", default=0, minimum=0, maximum=2**31)
    # OPT keeps two rows for padding before the first position.
    return (longest + (2 if family.model_type == "opt" else 0)) * hidden


def _embedding_norm(family: Family, hidden: int) -> int:
    if not family.traits.get("embedding_norm"):
        return 0
    return hidden if family.traits.get("norm") == "layer_no_bias" else 2 * hidden


def _encoder_parts(fields: ConfigFields, family: Family, hidden: int) -> int:
    if not family.traits.get("encoder"):
        return 0
    types = fields.integer("type_vocab_size", default=0, minimum=0, maximum=2**16) * hidden
    has_pooler = family.model_type in ("bert", "roberta", "xlm-roberta")
    return types + (hidden * hidden + hidden if has_pooler else 0)


def _per_layer_embeddings(fields: ConfigFields, num_layers: int, hidden: int) -> int:
    """Gemma 3n and 4: one small embedding a layer, its projections and norms."""
    width = fields.optional_integer("hidden_size_per_layer_input", maximum=_MAX) or 0
    if not width:
        return 0
    vocab = fields.integer("vocab_size_per_layer_input", default=262_144, maximum=2**26)
    table = vocab * num_layers * width
    return table + hidden * num_layers * width + width + num_layers * (2 * hidden * width + hidden)


def _alternating_updates(fields: ConfigFields, num_layers: int, hidden: int) -> int:
    """Gemma 3n's AltUp and LAUREL blocks."""
    copies = fields.optional_integer("altup_num_inputs", maximum=64) or 0
    rank = fields.optional_integer("laurel_rank", maximum=_MAX) or 0
    if not copies:
        return 0
    altup = copies**2 + copies**3 + hidden * copies + 2 * hidden
    return num_layers * (altup + 2 * hidden * rank + hidden) + 2 * (copies - 1) * hidden * hidden


def _zero_experts(fields: ConfigFields, num_layers: int, hidden: int) -> int:
    """LongCat routes to experts that do nothing; one router for two layers as labkit counts them."""
    return num_layers // 2 * hidden * (fields.optional_integer("zero_expert_num", maximum=2**16) or 0)


# Towers whose MLP has a gate and whose positions are rotated, not learned.
_GATED_TOWERS = ("pixtral", "qwen2_5_vl")


def _vision_tower(outer: ConfigFields, text_hidden: int) -> int:
    """A vision transformer of the stated width and depth, its patches, positions and projector.

    A layer has 4 h² + 2 h·i parameters, or 3 h·i with a gate; the projector is h·t, and another t·t where it has two
    layers (all but Gemma's).
    """
    vision = outer.section("vision_config")
    if vision is None:
        return 0
    hidden = vision.optional_integer("embed_dim", "hidden_size", "width", "vt_hidden_size", maximum=_MAX)
    depth = vision.optional_integer("num_hidden_layers", "depth", "layers", "vt_num_hidden_layers", maximum=4096)
    if not hidden or not depth:
        return 0
    ratio = vision.number("mlp_ratio", default=4.0, minimum=0.0, maximum=64.0)
    inner = vision.integer("intermediate_size", "vt_intermediate_size", default=int(ratio * hidden) or 1, maximum=_MAX)
    patch = vision.optional_integer("patch_size", maximum=1024) or 14
    is_gated = vision.text("model_type", default="") in _GATED_TOWERS
    layers = depth * (4 * hidden * hidden + (3 if is_gated else 2) * hidden * inner)
    image = vision.optional_integer("image_size", maximum=2**16) or 0
    positions = 0 if is_gated else (image // patch) ** 2 * hidden
    is_gemma = outer.text("model_type", default="").startswith("gemma")
    projector = hidden * text_hidden + (0 if is_gemma else text_hidden * text_hidden)
    return layers + positions + 3 * patch * patch * hidden + projector
