"""The model catalogue: schema, the published parameter counts, names in any spelling."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from labkit.errors import FileFormatError, UnknownNameError
from labkit.memory.tensors import count_parameters
from labkit.specs import load_model, model_names
from labkit.specs.families import CATALOGUE_FOLDER
from labkit.specs.model_catalogue import catalogue_model, check_entry, find_name

SCHEMA = json.loads((CATALOGUE_FOLDER / "models.schema.json").read_text())
CATALOGUE = json.loads((CATALOGUE_FOLDER / "models.json").read_text())
# Published totals, and KV bytes of one token at 16 bit over all layers, from the model cards' own arithmetic.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "google/gemma-2-9b-it": 9_241_705_984,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "openai/gpt-oss-20b": 20_914_757_184,
}


def test_catalogue_matches_its_schema():
    jsonschema.validate(CATALOGUE, SCHEMA)
    assert len(CATALOGUE["models"]) >= 36


@pytest.mark.parametrize("name", model_names())
def test_every_entry_reproduces_its_parameter_count(name):
    spec = catalogue_model(name)
    assert count_parameters(spec) == CATALOGUE["models"][name]["total_params"] == spec.num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert count_parameters(load_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("google/gemma-3-12b-it", 8, 40, 1024),
        ("google/gemma-3-27b-it", 10, 52, 1024),
        ("google/gemma-3-270m", 3, 15, 512),
        ("google/gemma-2-9b-it", 21, 21, 4096),
        ("openai/gpt-oss-20b", 12, 12, 128),
        ("mistralai/Mistral-7B-v0.1", 0, 32, 4096),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32, 0, None),
        ("microsoft/Phi-3.5-mini-instruct", 32, 0, None),
        ("Qwen/Qwen2.5-7B-Instruct", 28, 0, None),
    ],
)
def test_layer_kinds(name, full, sliding, window):
    layers = load_model(name).layers
    assert [layer.kind for layer in layers].count("full") == full
    assert [layer.kind for layer in layers].count("sliding") == sliding
    assert {layer.window for layer in layers if layer.kind == "sliding"} == ({window} if window else set())


def test_gpt_oss_and_gemma_2_slide_in_layer_0():
    assert load_model("openai/gpt-oss-20b").layers[0].kind == "sliding"
    assert load_model("google/gemma-2-9b-it").layers[0].kind == "sliding"
    assert [layer.kind for layer in load_model("google/gemma-3-12b-it").layers[:6]] == ["sliding"] * 5 + ["full"]


def test_mla_head_sizes():
    spec = load_model("deepseek-ai/DeepSeek-V3")
    layer = spec.layers[3]
    assert (layer.kind, layer.kv_lora_rank, layer.qk_rope_head_dim, layer.v_head_dim) == ("mla", 512, 64, 128)
    assert [entry.num_experts for entry in spec.layers[:4]] == [0, 0, 0, 256]
    assert (spec.weight_format.kind, spec.weight_format.group_size) == ("fp8", 128 * 128)
    assert load_model("deepseek-ai/DeepSeek-V2-Lite").layers[0].q_lora_rank is None


@pytest.mark.parametrize("spelling", ["Qwen/Qwen3-8B", "qwen3-8b", "QWEN/QWEN3-8B", "qwen/qwen3-8b/"])
def test_names_in_any_spelling(spelling):
    assert find_name(spelling) == "Qwen/Qwen3-8B"


def test_aliases_mean_models_of_the_same_shape():
    assert load_model("Llama-3.3-70B-Instruct") is load_model("meta-llama/Llama-3.1-70B-Instruct")
    assert load_model("deepseek-ai/DeepSeek-R1").name == "deepseek-ai/DeepSeek-V3"
    every = [name for entry in CATALOGUE["models"].values() for name in entry.get("aliases", ())]
    assert len(every) == len(set(every))
    assert not set(every) & set(CATALOGUE["models"])


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3.5-397B-A17B", 397), ("zai-org/GLM-4.5-Air", 106), ("moonshotai/Kimi-K2.5", 1030)],
)
def test_counts_that_only_the_name_or_the_card_states(name, billions):
    assert count_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_unknown_name_names_the_nearest(monkeypatch):
    with pytest.raises(UnknownNameError) as caught:
        load_model("Qwen/Qwen3-9B")
    assert caught.value.works == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("bad", ["", "   ", "a\0b", None, 7, "/no/such/folder", "nothing.gguf", "no.json", "x" * 5000])
def test_bad_sources_are_clear_errors(bad):
    with pytest.raises((UnknownNameError, FileFormatError)):
        load_model(bad)


def test_an_entry_of_ones_own_is_checked():
    entry = CATALOGUE["models"]["Qwen/Qwen3-8B"]
    check_entry("my/model", entry)
    for broken in (
        {key: value for key, value in entry.items() if key != "source"},
        {**entry, "total_params": 0},
        {**entry, "colour": "red"},
        [],
    ):
        with pytest.raises(FileFormatError):
            check_entry("my/model", broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"_about": "", "models": {"my/model": broken}}, SCHEMA)


def test_what_is_remembered_is_said():
    assert any("not verified" in note for note in load_model("microsoft/phi-4").notes)


def test_no_unsafe_key_is_in_the_catalogue():
    text = Path(CATALOGUE_FOLDER / "models.json").read_text()
    assert "auto_map" not in text
    assert "trust_remote_code" not in text


@pytest.mark.parametrize(
    ("name", "kind", "bits"),
    [("Qwen/Qwen3-32B-AWQ", "awq", 4), ("qwen3-32b-awq", "awq", 4),
     ("RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic", "fp8", 8)],
)  # fmt: skip
def test_a_quantised_copy_that_the_hub_does_not_give_is_the_catalogues_model_in_its_format(
    name, kind, bits, monkeypatch
):
    monkeypatch.setattr("labkit.specs.model_loading._hub_file", lambda *_: (None, "the hub is switched off"))
    found = load_model(name)
    assert (found.weight_format.kind, found.weight_format.bits) == (kind, bits)
    base = load_model("Qwen/Qwen3-32B" if "32" in name else "Qwen/Qwen2.5-7B-Instruct")
    assert (found.layers, found.vocab_size) == (base.layers, base.vocab_size)
    with pytest.raises(UnknownNameError, match="switched off"):
        load_model("nobody/NoSuchModel-AWQ")
