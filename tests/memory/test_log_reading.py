"""Reading logs: every version's lines, several ranks, cut and foreign text, hostile text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import FileFormatError
from labkit.memory.logs import read_log, read_log_file
from labkit.memory.logs.patterns import PATTERNS
from labkit.memory.logs.read import MAX_LINE

GIB = 2**30
LOGS = Path(__file__).parent / "data" / "logs"


def gib(value: float) -> int:
    return round(value * GIB)


@pytest.mark.parametrize(
    ("name", "version", "facts"),
    [
        (
            "v0-0.6.5-llama3-8b", "0.6.5",
            {
                "total_bytes": gib(79.22), "weights_bytes": gib(14.96), "non_torch_bytes": gib(1.79),
                "activation_bytes": gib(1.26), "available_kv_bytes": gib(53.29), "num_gpu_blocks": 27284,
                "num_swap_blocks": 2048, "max_concurrency": 53.29, "cuda_graphs_bytes": gib(0.23),
            },
        ),
        (
            "v0-0.6.3-llama3-8b-3090", "0.6.3",
            {
                "total_bytes": gib(23.58), "outside_bytes": gib(0.38), "peak_torch_bytes": gib(17.98),
                "available_kv_bytes": gib(2.89), "kv_cache_tokens": 23648, "max_model_len": 29000,
            },
        ),
        (
            "v1-0.11.0-gpt-oss-120b", "0.11.0",
            {"needed_bytes": gib(4.54), "available_kv_bytes": gib(1.71), "estimated_length": 48608},
        ),
        (
            "v1-0.19.0-gemma3-27b-h100", "0.19.0",
            {
                "free_bytes": gib(78.68), "total_bytes": gib(79.19), "requested_bytes": gib(75.23),
                "activation_bytes": gib(3.99), "non_torch_bytes": gib(0.26), "kv_cache_tokens": 36560,
                "padding_layers": 8, "cuda_graphs_bytes": gib(1.14), "graphs_estimate_bytes": gib(1.05),
            },
        ),
        (
            "v1-0.29-consumed", "0.29.0",
            {
                "consumed_bytes": gib(15.53), "non_torch_bytes": gib(15.53) - gib(15.27), "kv_cache_tokens": 38592,
                "max_concurrency": 4.71, "available_kv_bytes": gib(5.3), "max_num_seqs": 256,
            },
        ),
        (
            "v1-0.19.0-sampler-oom", "0.19.0",
            {"failed_bytes": 786 * 2**20, "free_at_failure_bytes": 552 * 2**20, "process_bytes": gib(78.65),
             "max_num_seqs": 1024},
        ),
    ],
)  # fmt: skip
def test_every_memory_line_of_a_log(name, version, facts):
    record = read_log_file(LOGS / f"{name}.log")
    assert record.version == version
    stated = {**record.facts, **record.flags}
    assert {key: stated.get(key) for key in facts} == facts


def test_flags_come_from_the_engines_own_lines():
    record = read_log_file(LOGS / "v0-0.6.5-llama3-8b.log")
    assert record.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert dict(record.flags) == {
        "dtype": "bfloat16", "max_model_len": 8192, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "enforce_eager": False, "kv_cache_dtype": "auto", "enable_prefix_caching": False,
        "enable_chunked_prefill": False, "gpu_memory_utilization": 0.9,
    }  # fmt: skip


def test_flags_of_a_command_line_and_its_sizes():
    text = (
        "+ vllm serve Qwen/Qwen3-8B --max-model-len 16k -tp 2 --gpu-memory-utilization=0.85 --kv-cache-dtype fp8 "
        "--no-enable-prefix-caching --enforce-eager --max-num-seqs 64 --api-key secret"
    )
    record = read_log(text)
    assert record.model == "Qwen/Qwen3-8B"
    assert dict(record.flags) == {
        "max_model_len": 16000, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.85, "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 64,
    }  # fmt: skip


def test_the_length_error_with_and_without_the_unmatched_bracket():
    for bracket in ("(", ""):
        record = read_log(
            f"ValueError: To serve at least one request with the model's max seq len (65536), {bracket}9.48 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (4.42 GiB). Based on the available "
            "memory, the estimated maximum model length is 11656."
        )
        assert (record.facts["max_model_len"], record.facts["needed_bytes"]) == (65536, gib(9.48))
        assert (record.facts["available_kv_bytes"], record.facts["estimated_length"]) == (gib(4.42), 11656)


def test_interleaved_ranks_keep_their_numbers_and_the_poorest_binds():
    record = read_log_file(LOGS / "v0-0.8.0-pp2-two-ranks.log")
    assert {rank: values["weights_bytes"] for rank, values in record.ranks.items()} == {
        "PP1 TP0": gib(10.3), "PP0 TP0": gib(10.8),
    }  # fmt: skip
    # All of rank 1: its pool is the smaller one.
    assert record.facts["available_kv_bytes"] == gib(14.26)
    assert record.facts["weights_bytes"] == gib(10.3)
    assert record.facts["activation_bytes"] == gib(1.77)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ValueError: No available memory for the cache blocks. Try increasing", "no_kv_memory"),
        ("AssertionError: Error in memory profiling. Initial free memory 10", "memory_moved"),
        ("vllm: error: unrecognized arguments: --swap-space 4", "unknown_flag"),
        ("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (940).", "too_few_state_blocks"),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0", "dtype_unsupported"),
    ],
)
def test_errors_by_their_texts(text, cause):
    assert read_log(text).errors == (cause,)


def test_a_cut_log_says_so():
    whole = (LOGS / "v1-0.19.0-gemma3-27b-h100.log").read_text()
    end = whole.index("(EngineCore pid=99) DEBUG 04-01 10:02:00")
    record = read_log(whole[:end])
    assert record.facts["weights_bytes"] == gib(51.45)
    assert any("ends before the KV cache is sized" in note for note in record.notes)
    begin = whole.index("(EngineCore pid=99)")
    assert any("version" in note for note in read_log(whole[begin:]).notes)


@pytest.mark.parametrize("text", ["", "\n\n", "hello world", "llama_model_load: 14 GiB", "\x00\x01\x02" * 100])
def test_foreign_text_is_no_vllm_log(text):
    record = read_log(text)
    assert not record.is_vllm
    assert not record.facts


def test_another_programs_out_of_memory_is_no_vllm_log():
    record = read_log(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.58 "
        "GiB of which 1.00 GiB is free."
    )
    assert (record.errors, record.facts["failed_bytes"]) == (("out_of_memory",), 2 * GIB)
    assert not record.is_vllm


def test_a_message_that_is_wrapped_over_lines_keeps_its_numbers():
    record = read_log(
        "Memory profiling takes 11.20 seconds.\nTotal non KV cache memory: 20.19GiB; torch peak memory increase: "
        "1.42GiB;\nnon-torch forward increase memory: 0.51GiB; weights memory: 18.26GiB.\n"
    )
    assert dict(record.facts) == {
        "total_non_kv_bytes": gib(20.19), "activation_bytes": gib(1.42), "non_torch_bytes": gib(0.51),
        "weights_bytes": gib(18.26),
    }  # fmt: skip


def test_colours_control_and_bidirectional_characters_do_not_hide_numbers_and_do_not_survive():
    text = (
        "\x1b[36m(EngineCore pid=1)\x1b[0m \x1b]0;owned\x07INFO Available KV cache memory: 19.53 GiB\n"
        "non-default args: {'model': 'evil\u202emodel\x1b[31m', 'max_model_len': 8192}\n"
    )
    record = read_log(text)
    assert record.facts["available_kv_bytes"] == gib(19.53)
    assert record.model is None or not set(record.model) & {"\x1b", "\u202e"}


def test_limits_are_stated(tmp_path):
    with pytest.raises(FileFormatError, match=r"no file|cannot read"):
        read_log_file(tmp_path / "none.log")
    with pytest.raises(FileFormatError):
        read_log_file(tmp_path)
    big = tmp_path / "big.log"
    with big.open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(FileFormatError) as refused:
        read_log_file(big)
    assert (refused.value.needed, refused.value.available) == ("at most 64.0 MiB", "65.0 MiB")


def test_an_endless_line_is_cut_and_said(tmp_path):
    path = tmp_path / "long.log"
    path.write_text("x" * 10 * 2**20 + "\nINFO Available KV cache memory: 2.00 GiB\n")
    record = read_log_file(path)
    assert record.facts["available_kv_bytes"] == 2 * GIB
    assert (record.num_lines, any("were cut" in note for note in record.notes)) == (2, True)


@pytest.mark.parametrize(
    "filler",
    ["9" * MAX_LINE, "9." * (MAX_LINE // 2), " " * MAX_LINE, "(" * MAX_LINE, "1,234" * 3000, "'model': '" * 1500],
)
def test_time_is_linear_in_the_line_for_every_pattern(filler):
    # A backtracking pattern takes minutes on such lines; the whole table takes milliseconds of CPU time.
    start = time.process_time()
    for pattern in PATTERNS:
        read_log(f"{pattern.needle}{filler}"[:MAX_LINE])
        read_log(f"{filler[: MAX_LINE - 80]}{pattern.needle}")
    assert time.process_time() - start < 20


def test_mutated_logs_give_an_explanation_or_labkits_error(tmp_path):
    from tests.reader_fuzz import run_target
    from tests.reader_targets import logs

    outcome = run_target(logs.TARGETS[0], 1500, 3, tmp_path)
    assert (outcome.inputs, outcome.failures) == (1500, [])
    assert outcome.accepted > 1000


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=400))
def test_any_text_gives_a_record(text):
    assert read_log(text).num_lines == len(text.splitlines())
