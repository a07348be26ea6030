"""The family catalogue says what transformers' own classes fill in, and names only traits that labkit reads."""

from __future__ import annotations

import pytest

from labkit.specs.families import family_names, find_family

TRAITS = {
    "attention_bias", "attention_sinks", "embedding_norm", "encoder", "final_norm", "gated_mlp", "head_bias",
    "mlp_bias", "norm", "norm_offset", "norms_per_layer", "output_gate", "positions", "qk_norm", "qk_norm_full_width",
    "qkv_bias", "sandwich_norms", "scale_embeddings",
}  # fmt: skip


@pytest.fixture(scope="module")
def mapping():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


@pytest.mark.parametrize("name", family_names())
def test_defaults_are_those_of_the_class(mapping, name):
    if name not in mapping:
        pytest.skip(f"this transformers has no {name}")
    stated = mapping[name]().to_dict()
    differing = {key: value for key, value in find_family(name).defaults.items() if stated.get(key) != value}
    assert differing == {}


@pytest.mark.parametrize("name", family_names())
def test_traits_are_known_words(name):
    assert set(find_family(name).traits) <= TRAITS


def test_names_of_wrappers_and_copies_lead_to_a_family():
    assert find_family("gemma3").defaults == find_family("gemma3_text").defaults
    assert find_family("kimi_k2").traits == find_family("deepseek_v3").traits
    assert find_family("qwen2_5_vl").known
    assert not find_family("brand_new").known
