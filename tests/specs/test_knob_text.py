"""Settings as text: round trip, and every broken text named."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import FileFormatError, LabkitError, OutOfRangeError, UnknownNameError
from labkit.specs.engine_config import EngineConfig
from labkit.specs.knob_text import config_from_text, config_to_text, panel_command, parse_knob

KNOBS = {knob.name: knob for knob in EngineConfig.knobs()}


def settings_of():
    choices = {}
    for knob in KNOBS.values():
        if knob.kind is bool:
            values = st.booleans()
        elif knob.choices:
            values = st.sampled_from(knob.choices)
        elif knob.kind is str:
            values = st.none()
        else:
            low, high = knob.minimum, knob.maximum or 1e9
            values = st.integers(int(low), int(min(high, 1e9))) if knob.kind is int else st.floats(low, high)
            values = st.none() | values if knob.optional else values
        choices[knob.name] = values
    return st.fixed_dictionaries({}, optional=choices)


@given(settings_of())
def test_settings_survive_the_way_through_text(settings):
    config = EngineConfig(**settings)
    assert config_from_text(config_to_text(config)) == config


def test_only_what_differs_is_written():
    assert config_to_text(EngineConfig()) == ""
    config = EngineConfig(block_size=32, enable_prefix_caching=False, kv_cache_dtype="fp8")
    assert config_to_text(config) == "block_size=32 kv_cache_dtype=fp8 enable_prefix_caching=off"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("blocksize=32", UnknownNameError, "no knob 'blocksize'"),
        ("block_size=32 future_knob=1", UnknownNameError, "no knob 'future_knob'"),
        ("block_size", FileFormatError, "not of the form name=value"),
        ("block_size='32", FileFormatError, "cannot be read"),
        ("block_size=0", OutOfRangeError, "1 to 8192"),
        ("block_size=", OutOfRangeError, "whole number"),
        ("enforce_eager=maybe", OutOfRangeError, "True or False"),
        ("x" * 5000, FileFormatError, "longer than 4000"),
    ],
)
def test_a_broken_text_says_what_is_wrong(text, kind, said):
    with pytest.raises(kind, match=said):
        config_from_text(text)


def test_an_unknown_knob_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        config_from_text("blocksize=32")
    assert caught.value.works == "block_size"


@given(st.text(max_size=60))
def test_no_text_raises_anything_but_labkit_s_own_errors(text):
    for knob in KNOBS.values():
        with contextlib.suppress(LabkitError):
            parse_knob(knob, text)


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [("max_model_len", "8K", 8192), ("max_model_len", "1M", 2**20), ("max_model_len", "", None),
     ("max_model_len", "8k", 8000), ("max_num_batched_tokens", "25.6k", 25600),  # as vLLM's human_readable_int
     ("swap_space", "1_0", 10.0),
     ("max_num_seqs", "1,024", 1024), ("enforce_eager", "ON", True)],
)  # fmt: skip
def test_what_typed_texts_mean(knob, text, value):
    assert parse_knob(KNOBS[knob], text) == value


@given(settings_of())
def test_settings_survive_the_way_through_a_command(settings):
    config = EngineConfig(**settings)
    command = panel_command(config, model="a model's name", gpu="H100 SXM", workload="x; rm -rf /")
    assert config_from_text(command) == config


def test_the_command_quotes_what_a_shell_would_read():
    command = panel_command(EngineConfig(block_size=32), model="$(touch /tmp/x)", gpu="H100 SXM")
    assert shlex.split(command) == ["labkit", "panel", "block_size=32", "--model=$(touch /tmp/x)", "--gpu=H100 SXM"]
    assert "='$(touch /tmp/x)'" in command
    assert panel_command(EngineConfig(), model="m", gpu="cpu") == "labkit panel --model=m --gpu=cpu"
    with pytest.raises(UnknownNameError, match="warp"):
        config_from_text("labkit panel 'warp=9' --model=m")
