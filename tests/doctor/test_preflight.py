"""The daily checklist: each point with its value, its reason, and a mark where the guide is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.doctor.machine import FixedMachine, Memory, Output
from labkit.doctor.nvml_facts import CardFacts, CardProcess, NvmlFacts
from labkit.doctor.preflight import preflight_of, run_preflight
from labkit.errors import UnknownNameError
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import RequestSpec, Workload

GIB = 2**30
MODEL = load_model("meta-llama/Llama-3.1-8B-Instruct")
H100 = load_gpu("H100 SXM")
MACHINE = FixedMachine()


def _checks(machine=MACHINE, gpu=H100, workload=None, server=None, **knobs):
    config = EngineConfig(**{"gpu_memory_utilization": 0.9, "max_model_len": 8192, **knobs})
    found = run_preflight(MODEL, gpu, config, machine, workload=workload, server=server)
    return {check.name: check for check in found.checks}


def _traffic(*lengths: tuple[int, int]) -> Workload:
    return Workload("t", tuple(RequestSpec(float(i), a, b) for i, (a, b) in enumerate(lengths)))


def test_a_sound_configuration_passes_every_point():
    found = _checks(workload=_traffic((1000, 200), (3000, 100)))
    assert {name: check for name, check in found.items() if check.status != "ok"} == {}
    assert set(found) == {
        "fit", "utilization", "max-model-len", "block-size", "batched-tokens", "traffic", "fp8-kv", "dtype", "parallel",
        "eager", "log-level", "ram", "files",
    }  # fmt: skip
    assert all(check.evidence for check in found.values())


POINTS = {
    "too long for the card": ({"max_model_len": 131072, "gpu": load_gpu("L4")}, "fit", "problem", "short of",
                              "--max-model-len"),
    "longer than the model": ({"max_model_len": 200_000}, "max-model-len", "problem", "longer than the model",
                              "131072"),
    "all of the card": ({"gpu_memory_utilization": 1.0}, "utilization", "warning", "safe for this card", "0.98"),
    "not free": ({"gpu": replace(H100, free_bytes=40 * GIB)}, "utilization", "problem", "does not start", "0.5"),
    "budget below the requests": ({"max_num_batched_tokens": 100, "max_num_seqs": 128}, "plan", "problem",
                                  "vLLM refuses", "128"),
    "eager": ({"enforce_eager": True}, "eager", "warning", "several times slower", "leave it out"),
    "fp8 on an A100": ({"kv_cache_dtype": "fp8", "gpu": load_gpu("A100-80GB")}, "fp8-kv", "warning", "below 8.9",
                       "auto"),
    "bfloat16 on a T4": ({"gpu": load_gpu("T4"), "max_model_len": 256}, "dtype", "problem", "C23", "--dtype half"),
    "debug log": ({"machine": replace(MACHINE, variables={"VLLM_LOGGING_LEVEL": "debug"})}, "log-level", "warning",
                  "written out", "unset"),
    "few files": ({"machine": replace(MACHINE, open_files=1024)}, "files", "warning", "connection", "65535"),
    "little memory": ({"machine": replace(MACHINE, host_memory=Memory(8 * GIB, 4 * GIB))}, "ram", "warning",
                      "largest shard", "end other programs"),
    "prompt over the step without chunks": ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192,
                                             "workload": _traffic((9000, 1))}, "batched-tokens", "problem",
                                            "longest prompt", "chunked"),
    "requests longer than the limit": ({"workload": _traffic((9000, 1), (10, 1))}, "traffic", "warning",
                                       "1 requests (50 %)", "--max-model-len 9001"),
    "no traffic": ({}, "traffic", "unknown", "not compared", "--workload"),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTS)
def test_each_point_names_value_reason_and_cure(name):
    options, check_name, status, reason, fix = POINTS[name]
    check = _checks(**options)[check_name]
    assert check.status == status, check
    assert reason in check.cause, check
    assert fix in check.fix, check


def test_where_the_guide_is_wrong_is_marked_and_is_no_fault():
    found = _checks(max_model_len=8190, max_num_batched_tokens=2048, workload=_traffic((4000, 100)))
    marked = {name: check.cause for name, check in found.items() if "guide is wrong" in check.cause}
    assert set(marked) == {"block-size", "batched-tokens", "utilization"}
    assert {found[name].status for name in marked} == {"ok"}
    assert "holds 14 of 16 tokens" in found["block-size"].evidence


def test_this_machines_cards_are_looked_at():
    card = CardFacts(0, "H100", "GPU-9", (9, 0), 80 * GIB, 60 * GIB, 91, 90, (), processes=(CardProcess(4, "x", GIB),))
    machine = replace(MACHINE, nvml_facts=NvmlFacts(driver="570.1", cards=(card,)))
    gpu = replace(H100, origin="nvml", uuid="GPU-9")
    found = _checks(machine=machine, gpu=gpu, tensor_parallel_size=2)
    assert found["temperature-0"].status == "warning"
    assert found["processes-0"].status == "warning"
    assert found["utilization"].status == "problem"
    assert "60.0 GiB are free" in found["utilization"].evidence
    assert found["parallel"].status == "problem"
    assert "2 ranks, 1 cards" in found["parallel"].evidence


@pytest.mark.parametrize(
    ("pages", "health", "metrics"),
    [
        ({}, "problem", "problem"),
        ({"health": Output(200, ""), "metrics": Output(200, "vllm:num_requests_running 1")}, "ok", "ok"),
        ({"health": Output(503, ""), "metrics": Output(200, "go_threads 1")}, "problem", "warning"),
    ],
)
def test_a_running_server_is_asked(pages, health, metrics):
    machine = replace(MACHINE, pages={f"http://s:8000/{name}": page for name, page in pages.items()})
    found = _checks(machine=machine, server="http://s:8000/")
    assert (found["health"].status, found["metrics"].status) == (health, metrics)


def test_a_configuration_that_vllm_refuses_is_one_problem_and_the_host_is_still_looked_at():
    found = _checks(tensor_parallel_size=7)
    assert found["plan"].status == "problem"
    assert "ram" in found


def test_names_of_the_command_line():
    found = preflight_of(
        "meta-llama/Llama-3.1-8B-Instruct", "H100 SXM", {"max_model_len": 4096}, MACHINE, trace="azure-2023-conv"
    )
    checks = {check.name: check for check in found.checks}
    assert "0.92 ×" in checks["utilization"].evidence, "the version's own default"
    assert checks["traffic"].status in ("ok", "warning")
    with pytest.raises(UnknownNameError):
        preflight_of("no-such-model-xyz", "H100 SXM", {}, MACHINE)


@pytest.mark.parametrize(
    ("celsius", "status", "marked"), [(60, "ok", False), (75, "ok", True), (84, "ok", True), (86, "warning", False)]
)
def test_the_guides_temperature_is_marked_where_the_card_bears_more(celsius, status, marked):
    card = CardFacts(0, "H100", "GPU-9", (9, 0), 80 * GIB, 80 * GIB, celsius, 90, (), processes=())
    check = _checks(machine=replace(MACHINE, nvml_facts=NvmlFacts(driver="570.1", cards=(card,))))["temperature-0"]
    assert check.status == status
    assert ("guide is wrong" in check.cause) is marked
