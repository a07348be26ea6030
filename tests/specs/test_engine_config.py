"""`EngineConfig`: vLLM's names and defaults, ranges, round trips; names of variants and presets."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import FileFormatError, LabkitError, OutOfRangeError, UnknownNameError, UnsupportedError
from labkit.specs import (
    EngineConfig,
    get_preset,
    gpu_names,
    load_workload,
    name_of,
    preset,
    preset_names,
    preset_traffic,
)
from labkit.specs.presets import presets

KNOBS = {knob.name: knob for knob in EngineConfig.knobs()}


def values_of(knob):
    """Legal values of one knob, its ends among them."""
    if knob.kind is bool:
        legal = st.booleans()
    elif knob.choices:
        legal = st.sampled_from(knob.choices)
    elif knob.kind is str:
        legal = st.sampled_from(["awq", "fp8"])
    else:
        low, high = knob.minimum, knob.maximum if knob.maximum is not None else 2**40
        legal = st.integers(int(low), int(high)) if knob.kind is int else st.floats(low, high)
    return legal | st.none() if knob.optional else legal


CONFIGS = st.fixed_dictionaries({}, optional={name: values_of(knob) for name, knob in KNOBS.items()})


@given(CONFIGS)
def test_round_trip_and_names_list_exactly_the_differences(values):
    config = EngineConfig(**values)
    assert EngineConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    changed = EngineConfig().differences(config)
    assert set(changed) == {name for name, value in config.to_dict().items() if value != getattr(EngineConfig(), name)}
    name = name_of(config)
    assert (name == "starting settings") == (not changed)
    if len(name) < 199:
        assert name.count(", ") == max(0, len(changed) - 1)
    assert name_of(config, config) == "starting settings"


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"kv_cache_dtype": "fp8", "block_size": 32}, "fp8 KV, block 32"),
        ({"max_model_len": 4096, "enforce_eager": True}, "length 4,096, eager"),
        ({"gpu_memory_utilization": 0.85}, "utilization 0.85"),
        ({"enable_prefix_caching": False, "max_num_seqs": 64}, "seqs 64, no prefix caching"),
        ({"swap_space": 4.0, "preemption_mode": "swap"}, "swap 4 GiB, preempt by swap"),
    ],
)
def test_names_of_variants(knobs, name):
    assert name_of(EngineConfig(**knobs)) == name


def test_name_says_when_a_knob_goes_back():
    baseline = EngineConfig(max_model_len=4096, enforce_eager=True)
    assert name_of(EngineConfig(), baseline) == "default length, graphs"


@pytest.mark.parametrize(
    ("knob", "says"),
    [
        ("cpu_offload_gb", "weights in host memory"),
        ("max_loras", "adapters"),
        ("num_speculative_tokens", "speculative"),
    ],
)
def test_vllms_knobs_that_move_memory_and_are_not_planned_are_refused_by_name(knob, says):
    """`cpu_offload_gb` is no misspelt `cpu_memory_gib`."""
    with pytest.raises(UnsupportedError, match=says) as refused:
        EngineConfig(**{knob: 10})
    assert refused.value.knob == knob
    assert "vLLM's flag" in refused.value.works


def test_defaults_are_vllms():
    config = EngineConfig()
    assert (config.block_size, config.gpu_memory_utilization, config.kv_cache_dtype) == (16, 0.92, "auto")
    assert (config.enable_chunked_prefill, config.enable_prefix_caching, config.enforce_eager) == (True, True, False)


def test_unknown_knob_names_the_nearest():
    with pytest.raises(UnknownNameError, match="max_model_len"):
        EngineConfig(max_model_length=5)
    with pytest.raises(TypeError):
        EngineConfig(nonsense=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0), ("max_model_len", -5), ("max_model_len", 1.5), ("max_model_len", "long"),
        ("max_model_len", True), ("max_model_len", 2**40), ("block_size", None), ("block_size", 0),
        ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.5), ("gpu_memory_utilization", float("nan")),
        ("kv_cache_dtype", "fp4"), ("kv_cache_dtype", 8), ("enforce_eager", "yes"), ("swap_space", -1),
        ("max_num_seqs", 10**400), ("preemption_mode", "magic"), ("dtype", ""), ("cpu_memory_gib", 0),
    ],
)  # fmt: skip
def test_values_out_of_range_name_knob_and_range(name, value):
    with pytest.raises(OutOfRangeError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.knob == name
    assert "allowed is" in str(caught.value)
    with pytest.raises(ValueError, match=name):
        EngineConfig().replace(**{name: value})


def test_whole_floats_are_whole_numbers():
    assert EngineConfig(max_num_seqs=64.0).max_num_seqs == 64
    assert isinstance(EngineConfig(max_num_seqs=64.0).max_num_seqs, int)


def test_from_dict_names_what_a_newer_version_wrote():
    assert EngineConfig.from_dict({"block_size": 32}) == EngineConfig(block_size=32)
    with pytest.raises(UnknownNameError) as caught:
        EngineConfig.from_dict({"block_size": 32, "warp_drive": 9, "\x1b[31m": 1})
    assert "warp_drive" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    for bad in (None, [], "x", 3):
        with pytest.raises(FileFormatError):
            EngineConfig.from_dict(bad)


def test_every_knob_is_described():
    for knob in EngineConfig.knobs():
        assert len(knob.help) > 20
        assert knob.flag is None or knob.flag == "--" + knob.name.replace("_", "-")


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_have_a_trace(name):
    config = preset(name)
    assert config != EngineConfig()
    assert config.max_num_batched_tokens >= config.max_num_seqs
    entry = next(entry for entry in presets() if entry.name == name)
    assert load_workload(entry.workload, limit=5).requests
    assert preset(name.upper(), EngineConfig(block_size=64)).block_size == 64


@pytest.mark.parametrize("gpu", gpu_names())
@pytest.mark.parametrize("name", preset_names())
def test_each_preset_plans_on_each_card_or_says_why_not(gpu, name):
    from labkit.memory import plan
    from labkit.specs import load_gpu, load_model

    def reason() -> LabkitError | None:
        try:
            made = plan(load_model("Qwen/Qwen2.5-7B-Instruct"), load_gpu(gpu), preset(name), engine="vllm")
        except LabkitError as error:
            return error
        assert made.config.max_model_len == preset(name).max_model_len
        return None

    refused = reason()
    assert refused is None or refused.works or refused.needed or refused.knob


def test_unknown_preset():
    with pytest.raises(UnknownNameError) as caught:
        preset("chatt")
    assert caught.value.works == "chat"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_traffic_goal_and_flags(name):
    entry, traffic = get_preset(name), preset_traffic(name)
    assert len(traffic.requests) == entry.take["limit"]
    assert max(one.input_tokens + one.output_tokens for one in traffic.requests) <= entry.knobs["max_model_len"]
    assert entry.goal in ("output_tokens_per_s", "requests_per_s")
    assert len(entry.limits) <= 1
    assert all(0 < value <= 60 for value in entry.limits.values())
    assert entry.goal_words.startswith("most ")
    for knob, values in entry.space.items():
        for value in values:
            assert getattr(preset(name).replace(**{knob: value}), knob) == value
