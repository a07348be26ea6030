"""The recorded flags against what vLLM's release notes, issues and `vllm serve` runs are known to say.

Facts with another source than the recorder: `--swap-space` left in 0.18 (vLLM PR 36216), the default utilization is
0.92 since 0.20 (0.9 before), 16 removed flags end `vllm serve` 0.33 with exit status 2 (each was run).
"""

from __future__ import annotations

import pytest

from labkit.advice import check_command, flag_history, flags_for, known_versions
from labkit.advice.flags import effective_default, recorded_version, version_tuple
from labkit.errors import OutOfRangeError
from labkit.specs.engine_config import EngineConfig


def test_every_minor_version_from_0_6_to_0_33_is_recorded():
    assert {version_tuple(version)[1] for version in known_versions()} == set(range(6, 34))


@pytest.mark.parametrize(
    ("version", "known"), [("0.6.3", True), ("0.17.1", True), ("0.18.0", False), ("0.33.0", False)]
)
def test_swap_space_is_known_up_to_0_17(version, known):
    assert ("--swap-space" in flags_for(version)) == known


@pytest.mark.parametrize(("version", "default"), [("0.6.0", 0.9), ("0.19.1", 0.9), ("0.20.0", 0.92), ("0.33.0", 0.92)])
def test_default_utilization_by_version(version, default):
    assert effective_default("--gpu-memory-utilization", version) == default


@pytest.mark.parametrize(
    "name",
    [
        "--swap-space", "--preemption-mode", "--num-scheduler-steps", "--max-seq-len-to-capture", "--cuda-graph-sizes",
        "--max-num-partial-prefills", "--task",
    ],
)  # fmt: skip
def test_flags_that_vllm_0_33_refuses_have_a_history(name):
    history = flag_history(name)
    assert history.until is not None
    assert history.difference
    problems = check_command(f"vllm serve m {name} 4", "0.33.0")
    assert problems[0].startswith(f"{name} is not in vLLM 0.33.0: it is known from")


@pytest.mark.parametrize(
    "flag", ["--kv-offloading-size", "--kv-cache-memory-bytes", "--max-cudagraph-capture-size", "--cpu-offload-gb"]
)
def test_flags_that_vllm_0_33_takes(flag):
    assert check_command(["vllm", "serve", "m", flag, "4"], "0.33.0") == ()


def test_fp8_kv_is_a_choice_in_every_version_and_newer_types_only_where_they_exist():
    for version in known_versions():
        assert check_command(["--kv-cache-dtype", "fp8"], version) == ()
    assert check_command(["--kv-cache-dtype", "int8_per_token_head"], "0.19.1") != ()
    assert check_command(["--kv-cache-dtype", "int8_per_token_head"], "0.20.0") == ()


def test_every_knob_with_a_flag_is_a_flag_of_the_newest_version():
    missing = {knob.flag for knob in EngineConfig.knobs() if knob.flag} - set(flags_for("0.33.0"))
    assert missing == set()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("vllm serve m --max-num-seqs 1k", "--max-num-seqs needs a plain whole number, not '1k'"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs needs a value"),
        ("vllm serve m --max-num-seqs --enforce-eager", "--max-num-seqs needs a value"),
        ("vllm serve m --blok-size 3", "--blok-size is not in vLLM 0.33.0; did you mean --block-size?"),
        ("vllm serve m --dtype float8", "--dtype takes auto, half, float16, bfloat16, float, float32, not 'float8'"),
        ("vllm serve m --gpu-memory-utilization lots", "--gpu-memory-utilization needs a plain number, not 'lots'"),
    ],
)
def test_the_recorded_parser_refuses(command, problem):
    assert check_command(command, "0.33.0") == (problem,)


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m",
        "vllm serve 'a b' --max-model-len=4096 --no-enable-prefix-caching --port 8000",
        "vllm serve m -tp 2 --device-memory-utilization 0.5",
        "# a comment\nvllm serve m \\\n  --enforce-eager",
        "vllm serve m --disable-prefix-caching --enable-sliding-window --hf-token",
    ],
)
def test_the_recorded_parser_takes(command):
    assert check_command(command, "0.33.0") == ()


def test_inverse_forms_are_new_in_0_33():
    assert check_command("vllm serve m --disable-prefix-caching", "0.32.0") != ()


@pytest.mark.parametrize(
    ("asked", "recorded", "is_noted"),
    [
        ("0.33.0", "0.33.0", False), ("v0.33", "0.33.0", False), ("0.18.0", "0.18.1", False), ("0.6.3", "0.6.0", False),
        ("0.34.1", "0.33.0", True), ("1.0", "0.33.0", True), ("0.5.4", "0.6.0", True), ("0.8.5.post1", "0.8.5", False),
    ],
)  # fmt: skip
def test_the_nearest_recorded_version_stands_in_and_is_said(asked, recorded, is_noted):
    found, note = recorded_version(asked)
    assert (found, bool(note)) == (recorded, is_noted)


@pytest.mark.parametrize("text", ["", "latest", "0", "0.33.0; rm -rf /", "0." + "9" * 9, "\x1b[31m0.3"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(OutOfRangeError, match="is no vLLM version"):
        recorded_version(text)


def test_an_unknown_flag_has_no_history():
    assert flag_history("--no-such-flag") is None
