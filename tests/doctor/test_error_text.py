"""Pasted lines and logs: public cases are answered, unknown text stays unknown, hostile text does no harm."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from labkit.doctor.error_text import covered_cases, explain_error_text, known_errors

CASES = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())["cases"]
BY_ID = {case["id"]: case for case in CASES}
# Words of each case's right answer (its expected_answer) that cause and fix must hold.
WANTED = {
    "E01": ("cuda 12", "reinstall", "torch", "clean", "no symlinks"),
    "E03": ("capability", "12.8", "get_arch_list", "p100"),
    "E04": ("torch", "requires", "--no-build-isolation"),
    "E06": ("driver", "550", "570", "580", "nvidia_disable_require"),
    "E07": ("driver", "update the host's driver", "data-centre"),
    "E09": ("nvidia-ctk runtime configure", "restart docker", "docker run", "libcuda"),
    "E12": ("adapter", "--enable-lora", "--lora-modules", "merge"),
    "E13": ("--dtype half", "p100", "8.0"),
    "D01": ("--kv-offloading-size", "0.19", "leave it out"),
    "D03": ("0.6 to 0.8", "--kv-cache-memory-bytes", "one at a time"),
    "D04": ("0.89", "process"),
    "D05": ("--max-num-seqs", "4 to 16 b", "0.02"),
    "D14": ("--max-model-len", "2368"),
    "D25": ("940", "state block"),
    "D26": ("connector", "max_tokens"),
    "D31": ("--swap-space 0", "--kv-offloading-size"),
}
# What the case's `observed` tells about rather than quotes, as the log has it.
QUOTED = {
    "D01": "vllm serve: error: unrecognized arguments: --swap-space 4",
    "D05": "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
    "D14": "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be "
    "stored in KV cache (2368). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    "D26": "INFO loggers.py: Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 7 reqs",
}


def _answer(text: str) -> str:
    found = explain_error_text(text)
    assert found.exit_code == 2, found
    return " ".join(f"{check.cause} {check.fix}" for check in found.checks).lower()


@pytest.mark.parametrize("case_id", WANTED)
def test_every_public_case_gets_its_cause_and_fix(case_id):
    text = QUOTED.get(case_id, BY_ID[case_id]["observed"])
    answer = _answer(text)
    assert [word for word in WANTED[case_id] if word not in answer] == []


def test_every_environment_case_is_among_them():
    assert {case["id"] for case in CASES if case["kind"] == "environment"} <= set(WANTED)
    assert set(WANTED) <= set(covered_cases())


@pytest.mark.parametrize(
    ("text", "name", "word"),
    [
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file", "libcudart-missing", "CUDA 13"),
        ("ImportError: libcudart.so.11.0: cannot open shared object file", "libcudart-missing", "CUDA 11.0"),
        ("libcudart.so.12 => not found", "libcudart-missing", "CUDA 12"),
        ("ImportError: libcuda.so.1: cannot open shared object file", "libcuda-missing", "driver"),
        ("libc.so.6: version `GLIBC_2.34' not found (required by _C.abi3.so)", "glibc-too-old", "GLIBC_2.34"),
        ("/lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found", "glibc-too-old", "GLIBCXX_3.4.29"),
        ("Error while creating shared memory segment /dev/shm/nccl-5Zb9 (size 9637888)", "shared-memory", "64 MiB"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shared-memory", "64 MiB"),
        ("OSError: [Errno 28] No space left on device: '/root/.cache/x'", "disk-full", "disk"),
        ("RuntimeError: UVA is not available", "uva", "VLLM_WSL2_ENABLE_PIN_MEMORY=1"),
        ("OSError: Can't load tokenizer for 'x/model'. If you were trying", "tokenizer-missing", "GGUF"),
        ("RuntimeError: Failed to infer device type", "no-device", "libcuda"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "shard-cut",
         "cut"),
        ("model type `qwen9` but Transformers does not recognize this architecture", "unknown-architecture", "qwen9"),
        ("Total number of attention heads (14) must be divisible by tensor parallel size (4)", "heads-divisible",
         "14"),
        ("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.", "cards-fell-off", "hardware"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory", "full"),
    ],
)  # fmt: skip
def test_lines_that_people_paste(text, name, word):
    first = explain_error_text(text).checks[0]
    assert first.name == name
    assert word in f"{first.cause} {first.fix}"
    assert first.confidence


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "hello", "INFO 11-30 10:00:00 api_server.py:100] Started server process", "error", "0" * 100_000,
     "GLIBC is nice", "we moved the tokenizer", "driver", "\x00\x1b[31m", "undefined", "killed it"],
)  # fmt: skip
def test_unknown_text_is_said_to_be_unknown(text):
    found = explain_error_text(text)
    assert [(check.name, check.status) for check in found.checks] == [("error-text", "unknown")]
    assert found.exit_code == 0


def test_the_root_stands_before_what_follows_from_it():
    log = "\n".join(
        ["INFO starting"] * 50
        + ["(EngineCore pid=3) ImportError: vllm/_C.abi3.so: undefined symbol: _ZN3c104impl3cow11"]
        + ["RuntimeError: Engine core initialization failed. See root cause above."]
    )
    names = [check.name for check in explain_error_text(log).checks]
    assert names == ["undefined-symbol", "engine-core-failed"]
    assert "line 51" in explain_error_text(log).checks[0].evidence


def test_one_error_a_thousand_times_is_one_answer():
    found = explain_error_text("RuntimeError: UVA is not available\n" * 1000)
    assert len(found.checks) == 1
    assert found.facts["lines"] == 1000


def test_numbers_of_the_log_come_first_where_the_log_has_them():
    found = explain_error_text(BY_ID["D04"]["observed"])
    assert found.checks[0].name == "card-not-free"
    assert "19.8 GiB of 22.0 GiB" in found.checks[0].cause


def test_hostile_text_is_shown_as_plain_text():
    line = (
        "\x1b]0;owned\x07\u202eImportError: libcudart.so.12: cannot open shared object file <script>alert(1)</script>"
    )
    shown = json.dumps(explain_error_text(line).to_dict())
    assert "\\u001b" not in shown
    assert "\\u202e" not in shown


def test_long_lines_cost_little():
    start = time.process_time()
    explain_error_text(["undefined symbol: " * 100_000, "huggingface.co " * 50_000, "a" * 2**20] * 3)
    explain_error_text(["/dev/shm " * 2000] * 200)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("known", known_errors(), ids=lambda known: known.name)
def test_every_entry_is_complete_and_bounded(known):
    assert known.cause
    assert known.fix
    assert known.confidence in ("certain", "likely", "possible")
    assert not re.search(r"(?<!\\)\.[*+]|\\[swdS][*+]", known.pattern.pattern), "repetitions are bounded"
    groups = known.pattern.groups
    for text in (known.cause, known.fix):
        assert all(int(number) < groups for number in re.findall(r"\{(\d)\}", text)), "names a group that is not there"


def test_names_are_unique():
    names = [known.name for known in known_errors()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", ["no-kernel-image"]),
        ("x.so: undefined symbol: ncclCommRegister", ["nccl-symbol"]),
        ("Error 804: forward compatibility was attempted on non supported HW; or driver version is insufficient for",
         ["forward-compatibility", "driver-insufficient"]),
    ],
)  # fmt: skip
def test_a_piece_of_text_is_one_error_and_two_pieces_are_two(text, names):
    assert [check.name for check in explain_error_text(text).checks] == names
