"""Pasted commands: flag by flag as vLLM's recorded parser takes them, and two of them side by side.

Facts from elsewhere: vLLM's `human_readable_int` reads 8k as 8,000 and 8K as 8,192; the default utilization is 0.92
since 0.20 and 0.9 before; fp8 KV takes half the bytes of bf16.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.advice.command_diff import diff_commands, plan_command
from labkit.advice.serve_command import is_command, read_command
from labkit.errors import FileFormatError, LabkitError, UnknownNameError
from labkit.specs import load_gpu, load_workload

A10 = load_gpu("A10")
SERVE = "vllm serve Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("text", "model", "version", "knobs"),
    [
        (f"{SERVE} --max-model-len 8k", "Qwen/Qwen3-8B", "0.33.0", {"max_model_len": 8000}),
        (f"{SERVE} --max_model_len=8K --port 80", "Qwen/Qwen3-8B", "0.33.0", {"max_model_len": 8192}),
        (f"$ HF_HOME=/x {SERVE} \\\n  -tp 2 \\\n  --no-enable-prefix-caching  # two cards", "Qwen/Qwen3-8B", "0.33.0",
         {"tensor_parallel_size": 2, "enable_prefix_caching": False}),
        ("/opt/bin/vllm serve --enforce-eager m", "m", "0.33.0", {"enforce_eager": True}),
        ("python -m vllm.entrypoints.openai.api_server --model a/b --dtype half", "a/b", "0.33.0",
         {"dtype": "float16"}),
        ("docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.19.1 --model a/b --max-num-seqs 64", "a/b", "0.19.1",
         {"max_num_seqs": 64}),
        ("docker run my.host:5000/vllm/vllm-openai:latest serve a/b -q fp8", "a/b", "0.33.0", {"quantization": "fp8"}),
        (f"{SERVE} --enable-chunked-prefill=False", "Qwen/Qwen3-8B", "0.33.0", {"enable_chunked_prefill": False}),
        (SERVE, "Qwen/Qwen3-8B", "0.33.0", {}),
    ],
)  # fmt: skip
def test_what_a_command_says(text, model, version, knobs):
    assert is_command(text)
    found = read_command(text)
    assert (found.model, found.version, dict(found.given), found.refused) == (model, version, knobs, ())


def test_what_is_not_given_is_the_default_of_that_version():
    assert read_command(SERVE).config.gpu_memory_utilization == 0.92
    assert read_command(SERVE, "0.19.1").config.gpu_memory_utilization == 0.9
    assert not read_command(SERVE, "0.6.6").config.enable_chunked_prefill


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--blok-size 32", "did you mean --block-size"),
        ("--swap-space 4", "--swap-space is not in vLLM 0.33.0: it is known from 0.6.0 to 0.17.1"),
        ("--kv-cache-dtype fp9", "would work: fp8"),
        ("--gpu-memory-utilization 95", "0.01 to 1"),
        ("--max-model-len many", "whole number"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
    ],
)
def test_what_vllm_would_refuse_is_said(flags, said):
    found = read_command(f"{SERVE} {flags}")
    assert any(said in text for text in found.refused), found.refused
    assert found.config == read_command(SERVE).config


def test_flags_that_move_memory_and_are_not_planned_are_named():
    found = read_command(f"{SERVE} --cpu-offload-gb 8 --speculative-config '{{}}' --seed 1 --max-model-len auto")
    assert [text.split(" ")[0] for text in found.left_out] == [
        "--cpu-offload-gb", "--speculative-config", "--max-model-len",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "ls -l", "vllm bench", 'vllm serve "m', f"{SERVE} {'x' * 30_000}"])
def test_what_is_no_command_is_refused_with_an_example(text):
    with pytest.raises(FileFormatError) as caught:
        read_command(text)
    assert caught.value.works.startswith("vllm serve ")


@given(st.text(max_size=80))
def test_no_text_raises_anything_but_labkits_own_errors(text):
    with contextlib.suppress(LabkitError):
        read_command(f"vllm serve m {text}")


def test_each_difference_stands_with_its_own_effect():
    first = read_command(f"{SERVE} --max-model-len 8192")
    second = read_command(f"{SERVE} --max-model-len 8192 --kv-cache-dtype fp8 --enforce-eager")
    found = diff_commands(first, second, A10)
    assert [entry.what for entry in found.differences] == ["--kv-cache-dtype", "--enforce-eager"]
    tokens = found.plans[0].kv_cache_tokens
    assert f"KV tokens {tokens:,} → {2 * tokens:,} (+100 %)" in found.differences[0].effect
    assert "requests of 8,192 tokens at once" in found.differences[0].effect
    assert found.plans[1].kv_cache_tokens > 2 * tokens, "eager leaves the graphs' memory to the cache"
    assert found.sentence.startswith("All together on A10: ")


def test_versions_and_models_are_differences_too():
    second = read_command("docker run vllm/vllm-openai:v0.19.1 --model Qwen/Qwen3-0.6B --max-model-len 8192")
    found = diff_commands(read_command(f"{SERVE} --max-model-len 8192"), second, A10)
    assert [entry.what for entry in found.differences] == ["model", "vLLM", "--gpu-memory-utilization"]
    assert found.to_dict()["verdict"] == ["fits", "fits"]


def test_the_rate_comes_from_the_traffic_and_is_said_to_be_simulated():
    traffic = load_workload("azure-2023-conv", limit=6, max_input_tokens=64, max_output_tokens=8)
    first, second = read_command(f"{SERVE} --max-model-len 4096"), read_command(f"{SERVE} --max-model-len 2048")
    assert "tok/s (simulated)" in diff_commands(first, second, A10, traffic).sentence
    # 40,960 tokens of one request do not fit an A10: there is no rate to compare, and the verdict is said.
    does_not = diff_commands(first, read_command(SERVE), A10, traffic)
    assert "fits → does not fit" in does_not.sentence
    assert "tok/s" not in does_not.sentence


def test_equal_commands_and_commands_without_a_model():
    same = diff_commands(read_command(SERVE), read_command("vllm serve qwen3-8b --port 1"), A10)
    assert (same.differences, same.sentence) == (
        (), "Both commands mean the same to the memory and the scheduler.",
    )  # fmt: skip
    with pytest.raises(UnknownNameError, match="names no model"):
        plan_command(read_command("vllm serve --enforce-eager"), A10)


def test_the_size_of_adapters_is_an_8b_model_s():
    """Llama 3.1 8B at rank 16, Q, K and V as products of their own, gate and up too."""
    found = read_command("vllm serve x --enable-lora --max-loras 4", "0.33.0")
    text = next(entry for entry in found.left_out if entry.startswith("--enable-lora"))
    hidden, keys, width = 4096, 1024, 14336
    widths = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden), (hidden, width), (hidden, width),
              (width, hidden)]  # fmt: skip
    counted = 32 * 16 * 2 * sum(inputs + outputs for inputs, outputs in widths) / 2**20
    assert counted == pytest.approx(80, abs=2)
    assert "about 80 MiB each" in text
