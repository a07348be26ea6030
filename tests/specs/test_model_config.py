"""`model_from_config`: the traps of real config.json files, quantisation, RoPE in both forms, wrappers, bad input."""

from __future__ import annotations

import json

import pytest

from labkit.errors import FileFormatError, LabkitError, UnsupportedError
from labkit.specs import load_model, model_from_config, strip_unsafe
from labkit.specs.config_fields import MAX_CONFIG_BYTES, parse_config

BASE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def make(**changes):
    return model_from_config({**BASE, **changes}, "m")


def kinds(spec):
    return [layer.kind for layer in spec.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 1024, "use_sliding_window": False}, ["full"] * 4),
        ({"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, ["full"] * 2 + ["sliding"] * 2),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, ["full"] * 4),
        ({"model_type": "mistral", "sliding_window": None}, ["full"] * 4),
        ({"model_type": "mistral", "sliding_window": 1024}, ["sliding"] * 4),
        ({"model_type": "gemma2", "sliding_window": 1024}, ["sliding", "full"] * 2),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, ["sliding", "full"] * 2),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 0}, ["sliding"] * 4),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLLG"}, ["sliding"] * 3 + ["full"]),
        (
            {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64},
            ["full", "sliding"] * 2,
        ),
        (
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64, "use_sliding_window": False},
            ["full"] * 4,
        ),
    ],
)
def test_sliding_window_traps(changes, expected):
    assert kinds(make(**changes)) == expected


def test_head_dim_is_the_stated_one_not_hidden_over_heads():
    assert make(model_type="qwen3", head_dim=128).layers[0].head_dim == 128
    assert make().layers[0].head_dim == 32
    # Qwen 3's class says 128 where the file is silent.
    assert make(model_type="qwen3").layers[0].head_dim == 128


def test_missing_kv_heads_means_as_many_as_query_heads():
    config = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert model_from_config({**config, "model_type": "llama"}).layers[0].num_kv_heads == 8


def test_qwen2_has_biases_on_q_k_v_only():
    spec = make()
    assert (spec.qkv_bias, spec.attention_bias, spec.mlp_bias) == (True, False, False)


def test_rope_in_the_old_form():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = make(rope_theta=1e6, rope_scaling=scaling)
    assert (spec.rope.theta, spec.rope.kind) == (1e6, "yarn")
    assert dict(spec.rope.parameters) == {"factor": 4.0, "original_max_position_embeddings": 1024}


def test_rope_in_the_form_of_transformers_5():
    new = make(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    old = make(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert new.rope == old.rope


def test_two_ropes_by_kind_of_layer():
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    base = {"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 6}
    mixed = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    new = make(**base, rope_parameters=nested)
    both = make(**base, rope_parameters=mixed, rope_theta=1e6, rope_local_base_freq=1e4)
    old = make(**base, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    for spec in (new, old, both):
        assert (spec.rope.theta, spec.rope.kind) == (1e6, "linear")
        assert spec.rope_local is not None
        assert (spec.rope_local.theta, spec.rope_local.kind) == (1e4, "default")
        assert {layer.rope_theta for layer in spec.layers if layer.kind == "sliding"} == {1e4}


def test_partial_rotation():
    assert make(model_type="phi", partial_rotary_factor=0.4).rope.partial_rotary_factor == 0.4
    assert make(model_type="gpt_neox", rotary_pct=0.25).rope.partial_rotary_factor == 0.25
    assert make(model_type="gptj", rotary_dim=8).rope.partial_rotary_factor == 0.25


def test_longrope_keeps_its_lists():
    scaling = {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    spec = make(model_type="phi3", rope_scaling=scaling, original_max_position_embeddings=2048)
    parameters = dict(spec.rope.parameters)
    assert spec.rope.kind == "longrope"
    assert parameters["long_factor"] == (2.0, 4.0)
    assert parameters["original_max_position_embeddings"] == 2048


def test_unknown_rope_is_said():
    spec = make(rope_scaling={"type": "spiral", "factor": 2.0})
    assert spec.rope.kind == "default"
    assert any("spiral" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("section", "kind", "bits", "group", "zeros"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "awq", 4, 128, True),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, "gptq", 4, 32, True),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8, 0, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, 16384, False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8, -1, False),
        ({"quant_method": "fbgemm_fp8"}, "fp8", 8, 0, False),
        ({"quant_method": "mxfp4"}, "mxfp4", 4, 32, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int4", 4, 64, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 8, 0, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4", 4, 16, False),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8", 8, -1, False),
        ({"quant_method": "magic", "bits": 4}, "int4", 4, 128, False),
        ({"bits": 4, "group_size": 64}, "int4", 4, 64, False),
        ({"quant_method": "magic"}, "16bit", 16, 0, False),
    ],
)
def test_weight_formats(section, kind, bits, group, zeros):
    found = make(quantization_config=section).weight_format
    assert (found.kind, found.bits, found.group_size, found.has_zero_points) == (kind, bits, group, zeros)


@pytest.mark.parametrize(
    ("weights", "kind", "bits", "group", "zeros"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8", 8, 0, False),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8", 8, -1, False),
        ({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, "int8", 8, 0, False),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
            "int4",
            4,
            128,
            True,
        ),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4", 4, 16, False),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4", 4, 32, False),
    ],
)
def test_compressed_tensors(weights, kind, bits, group, zeros):
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    found = make(quantization_config={**section, "ignore": ["lm_head", "re:.*self_attn.*"]}).weight_format
    assert (found.kind, found.bits, found.group_size, found.has_zero_points) == (kind, bits, group, zeros)
    assert "attention" in found.unquantized


def test_modules_that_stay_unquantized():
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    found = make(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": listed}).weight_format
    assert set(found.unquantized) == {"attention", "router", "embed", "lm_head", "norm"}
    single = make(quantization_config={"quant_method": "awq", "modules_to_not_convert": ["model.layers.0.mlp"]})
    assert "mlp" not in single.weight_format.unquantized
    # Two layers of four are half of them.
    half = [f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 3) for name in "qkvo"]
    section = {"quant_method": "fp8", "ignored_layers": half}
    assert "attention" in make(quantization_config=section).weight_format.unquantized
    assert (
        "attention" not in make(quantization_config={**section, "ignored_layers": half[:4]}).weight_format.unquantized
    )


def test_float32_models_are_32_bit():
    assert make(torch_dtype="float32").weight_format.kind == "32bit"
    assert model_from_config({**BASE, "torch_dtype": None, "dtype": "torch.float16"}).dtype == "float16"


def test_a_wrapper_leads_to_its_text_model():
    wrapper = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304, "patch_size": 14},
    }  # fmt: skip
    spec = model_from_config(wrapper, "google/gemma-3-12b-it")
    reference = load_model("google/gemma-3-12b-it")
    assert spec.layers == reference.layers
    assert (spec.vocab_size, spec.tie_word_embeddings, spec.eos_token_ids) == (262208, True, (1, 106))
    assert spec.architecture == "Gemma3ForConditionalGeneration"
    assert [name for name, _ in spec.extra_weights] == ["vision tower (estimate)"]
    assert any("text part" in note for note in spec.notes)


def test_experts_in_some_layers():
    spec = make(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1]
    )
    assert [layer.num_experts for layer in spec.layers] == [8, 0, 8, 8]
    step = make(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, decoder_sparse_step=2)
    assert [layer.num_experts for layer in step.layers] == [0, 8, 0, 8]


def test_sliding_layers_with_heads_of_their_own():
    spec = make(
        model_type="mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 0], head_dim=48, v_head_dim=32, sliding_window=128,
        swa_num_attention_heads=8, swa_num_key_value_heads=4, swa_head_dim=24, swa_v_head_dim=16,
    )  # fmt: skip
    assert kinds(spec) == ["full", "sliding", "sliding", "full"]
    sizes = [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.window) for layer in spec.layers[:2]]
    assert sizes == [(2, 48, 32, None), (4, 24, 16, 128)]


def test_an_unknown_family_is_read_and_said():
    spec = make(model_type="brand_new")
    assert kinds(spec) == ["full"] * 4
    assert any("brand_new" in note and "assumed" in note for note in spec.notes)


def test_attention_that_sees_both_ways_is_an_encoder():
    spec = make(model_type="gemma3_text", use_bidirectional_attention=True)
    assert set(kinds(spec)) == {"encoder"}
    assert spec.is_embedding


def test_encoder_decoder_is_refused():
    with pytest.raises(UnsupportedError):
        make(is_encoder_decoder=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0}, {"num_hidden_layers": 10**6}, {"num_hidden_layers": "4"}, {"num_hidden_layers": 4.5},
        {"num_attention_heads": -1}, {"num_key_value_heads": 3}, {"num_key_value_heads": 16}, {"hidden_size": None},
        {"hidden_size": True}, {"hidden_size": 10**30}, {"vocab_size": []}, {"layer_types": ["full_attention"]},
        {"layer_types": "full"}, {"rope_theta": float("nan")}, {"rope_theta": "many"}, {"rope_scaling": [1]},
        {"quantization_config": "awq"}, {"architectures": [1]}, {"model_type": {}}, {"rms_norm_eps": float("inf")},
        {"head_dim": 2**20}, {"eos_token_id": ["a"]}, {"sliding_window": -1, "model_type": "mistral"},
        {"rope_scaling": {"type": "longrope", "short_factor": ["a"]}},
    ],
)  # fmt: skip
def test_bad_values_are_named(changes):
    with pytest.raises(FileFormatError) as caught:
        make(**changes)
    assert next(iter(changes)) in str(caught.value) or "short_factor" in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, [], "text", None])
def test_a_config_without_shape_is_refused(config):
    with pytest.raises(FileFormatError):
        model_from_config(config)


def test_unsafe_keys_are_dropped_at_every_depth():
    config = {"auto_map": {}, "_attn": 1, "keep": {"trust_remote_code": True, "keep": 1}, "trust_remote_code": True}
    assert strip_unsafe(config) == {"keep": {"keep": 1}}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"nul", b"\xff\xfe{\x00}\x00", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' + b'{"a":' * 40 + b"1" + b"}" * 41, b'{"a":' + b"9" * 5000 + b"}", b" " * (MAX_CONFIG_BYTES + 1),
    ],
)  # fmt: skip
def test_broken_files(data):
    with pytest.raises(FileFormatError):
        parse_config(data, "config.json")


def test_a_byte_order_mark_is_accepted():
    assert parse_config(b"\xef\xbb\xbf" + json.dumps(BASE).encode(), "config.json") == BASE


def test_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    spec = load_model(tmp_path)
    assert (spec.weights_bytes, spec.is_embedding) == (8, False)
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert (load_model(tmp_path).is_embedding, load_model(tmp_path).pooling) == (True, "mean")
    (tmp_path / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileFormatError):
        load_model(tmp_path)


def test_a_folder_without_model(tmp_path):
    with pytest.raises(FileFormatError):
        load_model(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(LabkitError):
        load_model(tmp_path / "config.json")


def test_hf_quant_config_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    assert load_model(tmp_path).weight_format.kind == "nvfp4"


def test_gguf(smollm2_gguf):
    spec = load_model(smollm2_gguf)
    assert spec.layers == load_model("SmolLM2-135M-Instruct").layers
    assert (spec.vocab_size, spec.tie_word_embeddings, spec.rope.theta) == (49152, True, 100000.0)


def test_hub_ids_fail_fast_without_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LabkitError, match="switched off"):
        load_model("some-org/some-model")


def test_experts_that_no_layer_has_are_no_experts():
    # NemotronHConfig's own class says 8 routed experts; the 8B and 9B have letters M, - and * alone.
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 256, "vocab_size": 1000,
        "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "max_position_embeddings": 4096,
    }  # fmt: skip
    assert model_from_config({**config, "hybrid_override_pattern": "M-*-"}, "m").moe is None
    assert model_from_config({**config, "hybrid_override_pattern": "ME*E"}, "m").moe is not None
