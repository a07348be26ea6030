"""From a machine to the releases that run on it: the table is recorded, the rules are those of wheels and drivers."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from labkit.doctor.cuda_rules import (
    needed_driver,
    numbers,
    runs_on,
    smallest_driver,
    torch_architectures,
    vllm_architectures,
)
from labkit.doctor.machine import FixedMachine, System, TorchFacts
from labkit.doctor.nvml_facts import CardFacts, NvmlFacts
from labkit.doctor.which_vllm import check_wanted, find_vllm, glibc_of_platform, judge, recorded, releases


def _machine(capability, driver, python="3.12.4", glibc="2.39") -> FixedMachine:
    cards = (CardFacts(0, "card", capability=capability),) if capability else ()
    nvml = NvmlFacts(driver=driver, cards=cards, reason="" if driver else "no NVML")
    return FixedMachine(system_facts=System(python, glibc, "x86_64", "6.8"), nvml_facts=nvml)


def _minors(found) -> list[int]:
    return [int(version.split(".")[1]) for version in found.facts["runs"]]


def test_the_table_holds_every_minor_release_once_and_is_whole():
    rows = releases()
    assert [int(row.version.split(".")[1]) for row in rows] == list(range(6, 34))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", recorded())
    for row in rows:
        assert row.torch
        assert needed_driver(row.cuda)
        assert torch_architectures(row.torch, row.cuda), row
        assert vllm_architectures(row.version), row
        assert str(SpecifierSet(row.python))
        assert row.glibc >= (2, 17)
        assert "transformers" in dict(row.requires)


# Known pairs of vLLM's release notes and installation pages.
@pytest.mark.parametrize(
    ("minor", "torch", "cuda"),
    [(6, "2.5.1", "12.4"), (8, "2.6.0", "12.4"), (10, "2.8.0", "12.8"), (11, "2.9.0", "12.8"), (20, "2.11.0", "13.0")],
)
def test_known_pairs_of_vllm_torch_and_cuda(minor, torch, cuda):
    row = next(row for row in releases() if row.version.startswith(f"0.{minor}."))
    assert (row.torch, row.cuda) == (torch, cuda)


@pytest.mark.parametrize(
    ("capability", "driver", "newest", "oldest"),
    [
        ((9, 0), "580.95", 33, 6),  # H100, a driver of CUDA 13
        ((9, 0), "570.124", 19, 6),  # the last release on CUDA 12
        ((9, 0), "525.60.13", 19, 6),  # CUDA 12 by minor-version compatibility
        ((12, 0), "570.124", 19, 10),  # RTX 5090: torch with CUDA 12.8 begins with 0.10
        ((12, 0), "580.95", 33, 10),
        ((10, 3), "580.95", 33, 10),  # B300 runs code of 10.0
        ((7, 5), "580.95", 33, 6),  # T4
        ((8, 9), "580.95", 33, 6),  # L4 runs code of 8.6
        ((7, 0), "580.95", 19, 6),  # V100: torch 2.11 and CUDA 13 dropped it
    ],
)
def test_cards_and_drivers_get_their_releases(capability, driver, newest, oldest):
    minors = _minors(find_vllm(_machine(capability, driver)))
    assert (max(minors), min(minors)) == (newest, oldest)


@pytest.mark.parametrize(
    ("python", "minors"),
    [("3.8.10", []), ("3.9.2", [6, 7, 8, 9, 10]), ("3.10.1", list(range(6, 32))), ("3.14.0", list(range(20, 34)))],
)
def test_pythons_get_their_releases(python, minors):
    assert _minors(find_vllm(_machine((9, 0), "580.95", python=python))) == minors


def test_an_old_c_library_leaves_the_wheels_that_were_linked_to_it():
    assert _minors(find_vllm(_machine((9, 0), "580.95", glibc="2.17"))) == []
    found = _minors(find_vllm(_machine((9, 0), "580.95", glibc="2.28")))
    assert 33 in found
    assert 20 not in found, "its wheel is manylinux_2_35"


def test_the_answer_names_versions_and_the_command():
    found = find_vllm(_machine((9, 0), "570.124"))
    answer = next(check for check in found.checks if check.name == "answer")
    assert found.exit_code == 0
    assert "0.19.1 with torch 2.10.0, CUDA 12.8" in answer.evidence
    assert answer.fix.endswith("pip install vllm==0.19.1")
    assert found.facts["newest"] == "0.19.1"
    rows = {row["vllm"]: row for row in found.facts["releases"]}
    assert rows["0.33.0"]["runs"] == "no"
    assert "needs driver 580.65 or newer, here is 570.124" in rows["0.33.0"]["why"]


def test_an_older_minor_driver_is_a_warning_that_says_what_is_missing():
    found = find_vllm(_machine((9, 0), "535.104"))
    answer = next(check for check in found.checks if check.name == "answer")
    assert answer.status == "warning"
    assert "without PTX" in answer.cause


@pytest.mark.parametrize(
    ("capability", "driver", "fix"),
    [
        ((6, 0), "580.95", "below vLLM's floor of 7.0"),
        ((9, 0), "470.82", "update the host's driver to 580.65"),
        ((11, 0), "590.44", 'TORCH_CUDA_ARCH_LIST="11.0"'),
    ],
)
def test_where_no_wheel_runs_it_says_what_to_do(capability, driver, fix):
    found = find_vllm(_machine(capability, driver))
    answer = next(check for check in found.checks if check.name == "answer")
    assert found.exit_code == 2
    assert fix in answer.fix
    assert found.facts["runs"] == []


def test_without_a_card_it_answers_by_python_and_c_library_and_says_so():
    found = find_vllm(_machine(None, None))
    assert _minors(found) == list(range(6, 34))
    assert found.checks[0].status == "unknown"
    assert "no card was seen" in found.checks[1].evidence


def test_the_weaker_of_two_cards_decides():
    machine = _machine((9, 0), "580.95")
    two = (CardFacts(0, "a", capability=(9, 0)), CardFacts(1, "b", capability=(7, 0)))
    assert max(_minors(find_vllm(replace(machine, nvml_facts=NvmlFacts(driver="580.95", cards=two))))) == 19


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["8.0"], (8, 0), True), (["8.0"], (8, 6), True), (["8.6"], (8, 0), False), (["8.0"], (9, 0), False),
        (["9.0+PTX"], (12, 0), True), (["9.0"], (12, 0), False), (["12.0"], (12, 1), True), (["sm_90"], (9, 0), True),
        (["compute_90"], (10, 0), True), (["sm_90a"], (9, 0), True), (["sm_100"], (10, 3), True), ([], (9, 0), False),
        (["nonsense"], (9, 0), False),
    ],
)  # fmt: skip
def test_binaries_run_from_their_minor_on_and_ptx_on_newer_cards(built, capability, runs):
    assert runs_on(built, capability) is runs


@pytest.mark.parametrize(
    ("tag", "glibc"),
    [("manylinux_2_28_x86_64", (2, 28)), ("manylinux2014_x86_64", (2, 17)), ("manylinux1_x86_64", (2, 31)), ("", (0,)),
     ("manylinux_2_17_x86_64.manylinux2014_x86_64", (2, 17))],
)  # fmt: skip
def test_manylinux_tags(tag, glibc):
    assert glibc_of_platform(tag) == glibc


def test_drivers():
    assert needed_driver("12.8") == "570.26"
    assert needed_driver("12.7") == "560.28"
    assert needed_driver("10.2") is None
    assert smallest_driver("12.8") == "525.60"
    assert smallest_driver("") is None
    assert numbers("v0.19.1rc2+cu128") == (0, 19, 1)
    assert numbers(None) == ()


def test_another_processor_is_said():
    release = releases()[-1]
    verdict = judge(release, python="3.12.1", glibc="2.39", driver="580.95", capability=(9, 0), architecture="aarch64")
    assert "x86_64" in verdict.warnings[0]


def test_the_recorder_reads_ranges_as_metadata_writes_them():
    place = Path(__file__).parents[2] / "tools" / "record_vllm_wheels.py"
    loaded = importlib.util.spec_from_file_location("record_vllm_wheels", place)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    metadata = {
        "wheel": "vllm-0.6.0-cp38-abi3-manylinux1_x86_64.whl",
        "requires_dist": [
            'torch==2.9.0+cpu; platform_machine == "ppc64le"', "torch==2.4.0", "transformers (>=4.43.2,<5)",
            'ray[adag]>=2; extra == "x"', "ray>=2.9", "numba ; python_version < '3.13'",
        ],
    }  # fmt: skip
    found = {name: module.requirement(metadata, name) for name in ("torch", "transformers", "ray", "numba", "numpy")}
    assert found == {"torch": "==2.4.0", "transformers": ">=4.43.2,<5", "ray": ">=2.9", "numba": "", "numpy": None}
    assert module.platform_of(metadata) == "manylinux1_x86_64"


@pytest.mark.parametrize(
    ("version", "torch", "driver", "status", "word"),
    [
        ("0.19", None, "570.124", "ok", ""),
        ("0.19.0", TorchFacts("2.10.0+cu128", "12.8"), "570.124", "ok", ""),
        ("0.19", TorchFacts("2.13.0", "13.0"), "570.124", "warning", "replace this environment's torch"),
        ("0.33.0", None, "570.124", "problem", "needs driver 580.65"),
        ("0.19", None, "535.104", "warning", "without PTX"),
        ("0.99", None, "570.124", "unknown", "not recorded"),
        ("x", None, "570.124", "unknown", "not recorded"),
    ],
)
def test_a_wanted_release(version, torch, driver, status, word):
    check = check_wanted(replace(_machine((9, 0), driver), torch_facts=torch), version)
    assert check.status == status, check
    assert word in check.cause


@pytest.mark.parametrize(
    ("machine", "steps"),
    [
        (_machine((9, 0), "580.95", glibc="2.17"), ("container",)),
        (_machine((9, 0), "450.80"), ("driver",)),
        (_machine((9, 0), "580.95", python="3.6.1"), ("uv venv",)),
        (_machine((9, 0), "450.80", python="3.6.1", glibc="2.17"), ("container", "driver", "uv venv")),
        (_machine((6, 0), "580.95"), ("below vLLM's floor of 7.0",)),
    ],
)
def test_where_nothing_runs_only_what_would_help_is_advised(machine, steps):
    fix = {check.name: check for check in find_vllm(machine).checks}["answer"].fix
    every = ("container", "driver", "uv venv", "below vLLM's floor of 7.0")
    assert {step for step in every if step in fix} == set(steps), fix
