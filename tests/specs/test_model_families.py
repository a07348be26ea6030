"""`model_from_config` over every family: parameters as transformers counts them in a small config of its class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.memory.tensors import count_parameters
from labkit.specs import model_from_config

COUNTS = json.loads((Path(__file__).parent / "data" / "family_counts.json").read_text())
FAMILIES = [name for name in COUNTS if not name.startswith("_")]
# ModernBERT's first layer has no norm before attention; Zamba 2 uses one attention block in several layers;
# transformers gives LongCat's experts that do nothing a weight each.
APPROXIMATE = {"modernbert": 1e-4, "zamba2": 5e-3, "longcat_flash": 1e-2}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_those_of_transformers(name):
    spec = model_from_config(COUNTS[name]["config"], name)
    expected = COUNTS[name]["parameters"]
    if name in APPROXIMATE:
        assert count_parameters(spec) == pytest.approx(expected, rel=APPROXIMATE[name])
    else:
        assert count_parameters(spec) == expected


def test_mambas_projections_may_have_biases():
    """MambaMixer: in_proj gives twice the intermediate size (320), out_proj the hidden size (256); eight layers."""
    config = COUNTS["mamba"]["config"]
    with_bias = model_from_config({**config, "use_bias": True}, "mamba")
    assert count_parameters(with_bias) - COUNTS["mamba"]["parameters"] == 8 * (2 * 320 + 256)


@pytest.mark.parametrize("name", FAMILIES)
def test_known_families_need_no_assumption_about_layout(name):
    notes = model_from_config(COUNTS[name]["config"], name).notes
    assert not [note for note in notes if "not in the catalogue" in note or "not known" in note]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3_next", ["state", "state", "state", "full"] * 2),
        ("jamba", ["state", "state", "full", "state"] * 2),
        ("bamba", ["state", "state", "full", "state", "state", "full", "state", "state"]),
        ("nemotron_h", ["state", "none", "full", "none"] * 2),
        ("granitemoehybrid", ["state", "full"] * 4),
        ("lfm2", ["state", "full"] * 4),
        ("mamba", ["state"] * 8),
        ("falcon_h1", ["full"] * 8),
        ("llama4_text", ["chunked", "chunked", "chunked", "full"] * 2),
        ("cohere2", ["sliding", "sliding", "sliding", "full"] * 2),
        ("gpt_oss", ["sliding", "full"] * 4),
        ("deepseek_v3", ["mla"] * 8),
        ("bert", ["encoder"] * 8),
    ],
)
def test_kinds_of_layers(name, kinds):
    assert [layer.kind for layer in model_from_config(COUNTS[name]["config"], name).layers] == kinds


def test_falcon_h1_runs_attention_and_state_side_by_side():
    layer = model_from_config(COUNTS["falcon_h1"]["config"]).layers[0]
    assert layer.state is not None
    assert layer.state.kind == "mamba2"
    assert layer.num_kv_heads == 4


@pytest.mark.parametrize(
    ("name", "kind", "shapes"),
    [
        # Gated delta net: (kernel - 1, channels = 2 * 16 * 128 + 32 * 128), then value heads x key dim x value dim
        ("qwen3_next", "gdn", ((3, 8192), (32, 128, 128))),
        # Mamba 2: channels = 8 * 64 + 2 * 1 * 256
        ("bamba", "mamba2", ((3, 1024), (8, 64, 256))),
        # Mamba 1: inner = 2 * 256
        ("jamba", "mamba1", ((3, 512), (512, 16))),
        ("lfm2", "short_conv", ((2, 256),)),
    ],
)
def test_state_shapes(name, kind, shapes):
    layers = model_from_config(COUNTS[name]["config"]).layers
    state = next(layer.state for layer in layers if layer.state is not None)
    assert (state.kind, state.shapes) == (kind, shapes)


def test_gemma_3n_shares_kv_with_the_last_layer_of_its_kind():
    layers = model_from_config(COUNTS["gemma3n_text"]["config"]).layers
    kinds = [layer.kind for layer in layers]
    assert kinds == ["sliding"] * 4 + ["full"] + ["sliding"] * 3
    assert [layer.shares_kv_with for layer in layers] == [None] * 5 + [3, 3, 3]


def test_gemma_4_full_layers_have_heads_of_their_own():
    layers = model_from_config(COUNTS["gemma4_text"]["config"]).layers
    assert {layer.head_dim for layer in layers if layer.kind == "sliding"} == {256}
    assert {layer.head_dim for layer in layers if layer.kind == "full"} == {512}
