"""Environment and cards of faked machines: every check says what it saw, why, and what mends it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from labkit.doctor.accelerator import accelerator_checks
from labkit.doctor.check import Check, Examination, joined
from labkit.doctor.environment import environment_checks, hub_cache
from labkit.doctor.machine import FixedMachine, Machine, Memory, Output, Package, System, TorchFacts
from labkit.doctor.nvml_facts import CardFacts, CardProcess, NvmlFacts
from labkit.doctor.which_vllm import releases
from labkit.versions import cuda_of_version_file

GIB = 2**30
H100 = CardFacts(
    0, "NVIDIA H100", "GPU-1", (9, 0), 80 * GIB, 79 * GIB, 40, 90, (), True, False, ()
)  # fmt: skip
VLLM = Package("0.19.1", ("torch==2.10.0", "transformers<5,>=4.56.0", 'ray; extra == "ray"'))
WELL = FixedMachine(
    packages={"vllm": VLLM, "transformers": Package("4.57.0"), "torch": Package("2.10.0")},
    torch_facts=TorchFacts("2.10.0", "12.8"),
    nvml_facts=NvmlFacts(driver="570.124.06", cuda=(12, 8), cards=(H100,)),
    library_paths={"libcudart.so.": ("/v/nvidia/cuda_runtime/lib/libcudart.so.12",)},
    loadable=frozenset({"libcuda.so.1"}),
    disks={"/dev/shm": Memory(16 * GIB, 16 * GIB), "~/.cache/huggingface/hub": Memory(500 * GIB, 400 * GIB)},
    files={"/proc/mounts": "/dev/sda1 / ext4 rw 0 0\n", "/proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n"},
)


def _all(machine) -> dict[str, Check]:
    return {check.name: check for check in [*environment_checks(machine), *accelerator_checks(machine)]}


def _cards(**changes) -> NvmlFacts:
    return replace(WELL.nvml_facts, cards=(replace(H100, **changes),))


def test_a_good_machine_has_nothing_to_mend():
    found = _all(WELL)
    assert {name: check for name, check in found.items() if check.status != "ok"} == {}
    assert Examination("x", tuple(found.values())).exit_code == 0


def _system(**changes) -> System:
    return replace(WELL.system_facts, **changes)


# What is broken → (the check that says so, its status, words of cause or evidence, words of the fix).
BROKEN = {
    "old driver": ({"nvml_facts": replace(WELL.nvml_facts, driver="470.82")},
                   "driver-runtime", "problem", "too old", "570.26"),
    "driver of an older minor": ({"nvml_facts": replace(WELL.nvml_facts, driver="535.104")},
                                 "driver-runtime", "warning", "minor-version compatibility", "570.26"),
    "CPU torch on a card": ({"torch_facts": TorchFacts("2.10.0+cpu", None)},
                            "driver-runtime", "problem", "CPU build", "pip install"),
    "torch changed after vLLM": ({"torch_facts": TorchFacts("2.11.0", "12.8")},
                                 "torch-pin", "problem", "undefined symbol", "torch==2.10.0"),
    "torch removed": ({"torch_facts": None}, "torch-pin", "problem", "missing", "torch==2.10.0"),
    "new transformers": ({"packages": WELL.packages | {"transformers": Package("5.24.0")}},
                         "vllm-requirements", "problem", "transformers<5", "vllm==0.19.1"),
    "no transformers": ({"packages": {"vllm": VLLM}}, "vllm-requirements", "problem", "installed: none", "vllm=="),
    "no libcudart": ({"library_paths": {}}, "libcudart", "problem", "libcudart.so.12 is missing", "torch==2.10.0"),
    "libcudart of CUDA 13": ({"library_paths": {"libcudart.so.": ("/x/libcudart.so.13",)}},
                             "libcudart", "problem", "only /x/libcudart.so.13", "no symlinks"),
    "utility driver only": ({"loadable": frozenset()}, "libcuda", "problem", "Failed to infer device type",
                            "NVIDIA_DRIVER_CAPABILITIES=compute"),
    "libcuda off the path": ({"loadable": frozenset(), "library_paths": WELL.library_paths | {
                              "libcuda.so": ("/usr/lib/wsl/lib/libcuda.so.1",)}},
                             "libcuda", "problem", "does not look there", "LD_LIBRARY_PATH=/usr/lib/wsl/lib"),
    "same torch for another CUDA": ({"torch_facts": TorchFacts("2.10.0+cu130", "13.0"),
                                     "library_paths": {"libcudart.so.": ("/x/libcudart.so.13",)},
                                     "nvml_facts": replace(WELL.nvml_facts, driver="580.95")},
                                    "cuda-pair", "problem", "libcudart.so.12 cannot be opened", "no symlinks"),
    "old Python": ({"system_facts": _system(python="3.9.1")}, "python", "warning", "takes Python", "3.12"),
    "macOS": ({"system_facts": _system(name="Darwin")}, "python", "warning", "Linux", "container"),
    "old glibc": ({"system_facts": _system(glibc="2.17")}, "glibc", "warning", "GLIBC", "vllm-openai"),
    "Alpine": ({"system_facts": _system(glibc=None)}, "glibc", "warning", "musl", "Debian"),
    "WSL": ({"system_facts": _system(kernel="5.15-microsoft-standard-WSL2")}, "wsl", "warning", "UVA",
            "VLLM_WSL2_ENABLE_PIN_MEMORY=1"),
    "system's Python": ({"system_facts": _system(in_virtual_environment=False)}, "virtual-environment", "warning",
                        "torch", "venv"),
    "64 MiB of shared memory": ({"disks": {"/dev/shm": Memory(64 * 2**20, 64 * 2**20)}}, "shared-memory", "warning",
                                "64 MiB", "--ipc=host"),
    "full shared memory": ({"disks": {"/dev/shm": Memory(16 * GIB, 0)}}, "shared-memory", "warning", "0 B free",
                           "--shm-size"),
    "few open files": ({"open_files": 1024}, "open-files", "warning", "1,024", "ulimit -n 65535"),
    "little host memory": ({"host_memory": Memory(8 * GIB, 2 * GIB)}, "host-memory", "warning", "2.00 GiB", "end"),
    "full disk": ({"disks": WELL.disks | {"~/.cache/huggingface/hub": Memory(100 * GIB, GIB)}}, "disk", "warning",
                  "1.00 GiB", "HF_HOME"),
    "no network": ({"hub": False}, "hub", "warning", "no network", "HF_HUB_OFFLINE=1"),
    "home that nobody may write to": ({"read_only": frozenset({"/nonexistent"}), "variables": {"HOME": "/nonexistent"}},
                                      "store-place", "warning", "may not write to /nonexistent", "LABKIT_HOME"),
    "store on NFS": ({"files": {"/proc/mounts": "/dev/sda1 / ext4 rw\nhost:/x /home nfs4 rw\n"},
                      "variables": {"HOME": "/home/me"}}, "store-place", "warning", "nfs4", "LABKIT_HOME"),
    "store at the mount itself": ({"files": {"/proc/mounts": "/dev/sda1 / ext4 rw\nhost:/x /mnt/runs nfs4 rw\n"},
                                  "variables": {"LABKIT_HOME": "/mnt/runs"}}, "store-place", "warning", "nfs4",
                                 "LABKIT_HOME"),
    "no container toolkit": ({"outputs": {"docker --version": Output(0, "Docker 27")}}, "container", "warning",
                             "could not select device driver", "nvidia-ctk runtime configure"),
    "container without a card": ({"files": {"/.dockerenv": ""}, "variables": {"NVIDIA_VISIBLE_DEVICES": "all"},
                                  "nvml_facts": NvmlFacts(reason="not found")}, "container", "problem",
                                 "without the NVIDIA runtime", "--gpus all"),
    "driver not given to the container": ({"files": {"/proc/driver/nvidia/version": "570"},
                                           "nvml_facts": NvmlFacts(reason="NVML Shared Library Not Found")},
                                          "cards", "problem", "user-space library", "nvidia-ctk"),
    "driver half updated": ({"nvml_facts": NvmlFacts(reason="Driver/library version mismatch")}, "cards", "problem",
                            "updated", "reboot"),
    "no card": ({"nvml_facts": NvmlFacts(driver="570.1")}, "cards", "problem", "counts no card", "--gpus all"),
    "hidden cards": ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "cards", "problem", "hides", "unset"),
    "RTX 5090 with CUDA 12.6": ({"nvml_facts": _cards(capability=(12, 0)), "torch_facts": TorchFacts("2.7.0", "12.6")},
                                "torch-build-0", "problem", "no kernel image", "12.8"),
    "torch says its own architectures": ({"torch_facts": TorchFacts("2.10.0", "12.8", ("sm_80", "sm_86"))},
                                         "torch-build-0", "problem", "sm_80, sm_86", "which-vllm"),
    "P100": ({"nvml_facts": _cards(capability=(6, 0))}, "vllm-build-0", "problem", "6.0", "below 7.0"),
    "V100 with a new vLLM": ({"nvml_facts": _cards(capability=(7, 0)),
                              "packages": WELL.packages | {"vllm": Package("0.21.0", VLLM.requires)}},
                             "vllm-build-0", "problem", "7.0", "which-vllm"),
    "T4": ({"nvml_facts": _cards(capability=(7, 5))}, "formats-0", "warning", "bfloat16 needs capability 8.0",
           "--dtype half"),
    "hot card": ({"nvml_facts": _cards(temperature_c=86)}, "temperature-0", "warning", "86 °C", "cooling"),
    "throttled card": ({"nvml_facts": _cards(throttling=("hardware thermal limit",))}, "temperature-0", "problem",
                       "hardware thermal limit", "cooling"),
    "another process": ({"nvml_facts": _cards(processes=(CardProcess(77, "python", 30 * GIB),))}, "processes-0",
                        "warning", "77 python (30.0 GiB)", "kill 77"),
    "another container": ({"nvml_facts": _cards(free_bytes=20 * GIB)}, "processes-0", "warning", "another container",
                          "fuser"),
    "MIG": ({"nvml_facts": _cards(mig=True)}, "mig-0", "warning", "one slice", "MIG-<uuid>"),
    "no persistence": ({"nvml_facts": _cards(persistence=False)}, "persistence", "warning", "unloads", "-pm 1"),
    "counters for root only": ({"files": {"/proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}},
                               "hardware-counters", "warning", "only root", "NVreg_Restrict"),
    "nvcc of another major": ({"outputs": {"nvcc --version": Output(0, "Cuda tools, release 11.8, V11.8.89")}},
                              "cuda-toolkit", "warning", "nvcc 11.8", "12.8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_cause_and_fix(name):
    changes, check_name, status, seen, fix = BROKEN[name]
    check = _all(replace(WELL, **changes))[check_name]
    assert check.status == status, check
    assert seen in f"{check.evidence} {check.cause}", check
    assert fix in check.fix, check
    assert check.evidence
    assert check.cause


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_changes_the_exit_code(name):
    changes, _, status, _, _ = BROKEN[name]
    found = Examination("x", tuple(_all(replace(WELL, **changes)).values()))
    assert found.exit_code >= {"warning": 1, "problem": 2}[status]


def test_a_bare_machine_says_what_could_not_be_looked_at():
    bare = FixedMachine(nvml_facts=NvmlFacts(reason="NVML does not start: Driver Not Loaded"))
    found = _all(bare)
    assert found["cards"].status == "unknown"
    assert "Driver Not Loaded" in found["cards"].evidence
    assert found["driver-runtime"].status == "unknown"
    assert "torch is not installed" in found["driver-runtime"].evidence
    assert found["shared-memory"].status == "unknown"
    assert found["disk"].status == "unknown"
    assert [check for check in found.values() if check.status == "problem"] == []


def test_a_card_that_says_nothing_gives_no_numbers():
    silent = replace(WELL, nvml_facts=NvmlFacts(driver="570.1", cards=(CardFacts(0, "card"),)))
    found = _all(silent)
    for name in ("torch-build-0", "vllm-build-0", "formats-0", "temperature-0", "processes-0"):
        assert found[name].status == "unknown", found[name]
        assert " 0 " not in found[name].evidence
    assert found["persistence"].status == "unknown"


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}, "/c"),
    ],
)
def test_the_hub_cache_is_where_the_hubs_library_has_it(variables, place):
    assert hub_cache(FixedMachine(variables=variables)) == place


def test_offline_by_choice_is_no_warning():
    offline = replace(WELL, hub=False, variables={"HF_HUB_OFFLINE": "1"})
    assert _all(offline)["hub"].status == "ok"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.10.0'\ncuda: Optional[str] = '12.8'\nhip = None\n", "12.8"),
        ("cuda = None\n", None),
        ("", None),
        (None, None),
    ],
)
def test_torchs_cuda_is_read_without_importing_it(text, cuda):
    assert cuda_of_version_file(text) == cuda


def test_rows_put_the_worst_first_and_escape_control_characters():
    found = Examination("t", (Check("a", "ok", "fine"), Check("b", "problem", "x\x1b[31m\n", "c", "f")))
    assert found.rows() == [["problem", "b", "x[31m ", "c", "f"], ["ok", "a", "fine", "", ""]]
    assert found.sentence == "t: 1 problem, 1 well; first: c"
    assert joined("both", [found, found]).exit_code == 2
    assert Examination("t", ()).exit_code == 0
    assert Examination("t", (Check("a", "unknown", "x"),)).exit_code == 0


LOOKS = ("system", "environ", "run", "read", "exists", "package", "torch", "nvml", "libraries", "loads", "memory",
         "disk", "open_files_limit", "hub_answers")  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_that_fails_leaves_the_others(name):
    class Failing(FixedMachine):
        pass

    def fails(*arguments, **keywords):
        raise PermissionError("not allowed \x1b[31m")

    setattr(Failing, name, fails)
    machine = Failing(**{field: getattr(WELL, field) for field in WELL.__dataclass_fields__})
    found = [*environment_checks(machine), *accelerator_checks(machine)]
    failed = [check for check in found if "not allowed" in check.evidence]
    assert failed
    assert {check.status for check in failed} == {"unknown"}
    assert len(found) > len(failed) + 3


def test_this_process_on_the_card_is_not_told_to_be_ended():
    own = CardProcess(os.getpid(), "python", 30 * GIB)
    machine = replace(WELL, nvml_facts=_cards(processes=(own,), free_bytes=50 * GIB))
    assert _all(machine)["processes-0"].status == "ok"
    machine = replace(WELL, nvml_facts=_cards(processes=(own, CardProcess(99, "x", GIB)), free_bytes=50 * GIB))
    assert f"kill {os.getpid()}" not in _all(machine)["processes-0"].fix


def test_the_c_library_that_the_wheels_need_is_enough():
    needed = ".".join(str(number) for number in releases()[-1].glibc)
    assert _all(replace(WELL, system_facts=_system(glibc=needed)))["glibc"].status == "ok"


def test_a_folder_that_is_not_there_is_judged_by_its_parent(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path) or False)
    assert not Machine().can_write(str(tmp_path / "a" / "b"))
    assert asked == [tmp_path]
