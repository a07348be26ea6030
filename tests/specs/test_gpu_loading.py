"""Cards: catalogue and schema, names in any spelling, NVML with every call failing alone."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jsonschema
import pytest

from labkit.errors import FileFormatError, OutOfRangeError, UnknownNameError
from labkit.specs import cpu_gpu, gpu_names, load_gpu, read_gpus
from labkit.specs.families import CATALOGUE_FOLDER

CATALOGUE = json.loads((CATALOGUE_FOLDER / "gpus.json").read_text())
GIB, MIB = 2**30, 2**20
CALLS = (
    "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetUUID", "nvmlShutdown",
)  # fmt: skip


class NvmlError(Exception):
    """Stands for pynvml.NVMLError and its subclasses."""


def fake_nvml(name="NVIDIA H200", total_mib=143771, reserved_mib=600, broken=(), missing=(), count=2, v2=True):
    def call(answer, label):
        def run(*arguments):
            if label in broken:
                raise NvmlError(label)
            return answer(*arguments) if callable(answer) else answer

        return run

    def memory(handle, version=None):
        values = {"total": total_mib * MIB, "free": (total_mib - reserved_mib - 100) * MIB}
        if version is not None:
            values["reserved"] = reserved_mib * MIB
        return SimpleNamespace(**values)

    library = {
        "nvmlInit": call(None, "nvmlInit"),
        "nvmlShutdown": call(None, "nvmlShutdown"),
        "nvmlDeviceGetCount": call(count, "nvmlDeviceGetCount"),
        "nvmlDeviceGetHandleByIndex": call(lambda index: f"handle-{index}", "nvmlDeviceGetHandleByIndex"),
        "nvmlDeviceGetName": call(name, "nvmlDeviceGetName"),
        "nvmlDeviceGetMemoryInfo": call(memory, "nvmlDeviceGetMemoryInfo"),
        "nvmlDeviceGetCudaComputeCapability": call((9, 0), "nvmlDeviceGetCudaComputeCapability"),
        "nvmlDeviceGetUUID": call(lambda handle: f"GPU-{handle}", "nvmlDeviceGetUUID"),
    }
    if v2:
        library["nvmlMemory_v2"] = 0x2000028
    return SimpleNamespace(**{key: value for key, value in library.items() if key not in missing})


def test_catalogue_matches_its_schema():
    jsonschema.validate(CATALOGUE, json.loads((CATALOGUE_FOLDER / "gpus.schema.json").read_text()))
    assert len(CATALOGUE["gpus"]) == 18


@pytest.mark.parametrize("name", gpu_names())
def test_every_card_loads(name):
    gpu = load_gpu(name)
    low, high = CATALOGUE["gpus"][name]["cuda_visible_total_mib"]
    assert low * MIB <= gpu.total_bytes <= high * MIB
    assert gpu.nvidia_smi_total_bytes > gpu.total_bytes
    assert load_gpu(CATALOGUE["gpus"][name]["name"]) == gpu


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("4090", "RTX 4090"),
        ("H100", "H100 SXM"), ("h100-80gb", "H100 SXM"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("a100", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"), ("rtx4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("t4", "T4"), ("v100", "V100-16GB"), ("  h200 ", "H200"),
    ],
)  # fmt: skip
def test_names_in_any_spelling(spelling, name):
    assert load_gpu(spelling).name == name


def test_totals_are_those_of_vllm_logs():
    # vLLM 0.19 on H100: 79.19 GiB; vLLM 0.25 on H200: 139.8 GiB.
    assert round(load_gpu("H100").total_bytes / GIB, 2) == 79.19
    assert round(load_gpu("H200").total_bytes / GIB, 1) == 139.8


def test_unknown_card_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        load_gpu("RTX 4080")
    assert caught.value.works == "RTX 4090, or a .json file of your card"


@pytest.mark.parametrize("bad", ["", None, 3, "\x1b[31m", "x" * 5000])
def test_bad_names(bad):
    with pytest.raises(UnknownNameError) as caught:
        load_gpu(bad)
    assert "\x1b" not in str(caught.value)


def test_cpu():
    assert load_gpu("cpu:4").total_bytes == 4 * GIB
    assert load_gpu("cpu: 0.5 GiB").total_bytes == GIB // 2
    assert cpu_gpu(2).is_cpu
    for bad in (0, -1, float("nan"), float("inf"), True, "2", None):
        with pytest.raises(OutOfRangeError):
            cpu_gpu(bad)
    with pytest.raises(OutOfRangeError):
        load_gpu("cpu:lots")


def test_nvml_cards_carry_both_totals():
    first, second = read_gpus(fake_nvml())
    assert (first.name, first.origin, first.uuid) == ("H200", "nvml", "GPU-handle-0")
    assert first.nvidia_smi_total_bytes == 143771 * MIB
    assert first.total_bytes == load_gpu("H200").total_bytes
    assert first.free_bytes == (143771 - 700) * MIB
    assert second.uuid == "GPU-handle-1"


@pytest.mark.parametrize("failing", CALLS)
@pytest.mark.parametrize("how", ["broken", "missing"])
def test_each_nvml_call_may_fail_alone(failing, how):
    cards = read_gpus(fake_nvml(**{how: (failing,)}))
    essential = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    assert bool(cards) == (failing not in essential)
    for card in cards:
        assert card.total_bytes > 0
        assert card.free_bytes != 0
        if failing == "nvmlDeviceGetMemoryInfo":
            assert card.free_bytes is None


def test_old_driver_without_second_version_of_memory():
    (card,) = read_gpus(fake_nvml(name="NVIDIA Unknown 9000", total_mib=1000, count=1, v2=False))
    assert (card.name, card.total_bytes) == ("NVIDIA Unknown 9000", 1000 * MIB)


def test_a_slice_of_a_card_is_not_the_card():
    (card,) = read_gpus(fake_nvml(total_mib=18000, reserved_mib=100, count=1))
    assert card.total_bytes == 17900 * MIB


def test_names_from_old_libraries_are_bytes():
    (card,) = read_gpus(fake_nvml(name=b"Tesla T4", total_mib=15360, count=1))
    assert card.name == "T4"


def test_cuda_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [card.uuid for card in read_gpus(fake_nvml())] == ["GPU-handle-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-handle-1,0")
    assert [card.uuid for card in read_gpus(fake_nvml())] == ["GPU-handle-1", "GPU-handle-0"]
    for nothing in ("", "-1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert read_gpus(fake_nvml()) == ()


def test_auto_falls_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr("labkit.specs.gpu_loading.read_gpus", lambda: ())
    assert load_gpu("auto").is_cpu
    monkeypatch.setattr("labkit.specs.gpu_loading.read_gpus", lambda: read_gpus(fake_nvml()))
    assert load_gpu("auto").name == "H200"


A6000 = {"planned_total_mib": 48540, "mem_bandwidth_gb_s": 768, "compute_capability": "8.6", "bf16_dense_tflops": 154.8}


def card_file(folder, **changes):
    path = folder / "RTX A6000.json"
    path.write_text(json.dumps({key: value for key, value in {**A6000, **changes}.items() if value is not None}))
    return path


def test_a_card_of_your_own_comes_from_a_file(tmp_path):
    path = card_file(tmp_path)
    found = load_gpu(str(path))
    assert found == load_gpu(path)
    assert (found.name, found.total_bytes) == ("RTX A6000", 48540 * MIB)
    assert (found.mem_bandwidth_bytes_per_s, found.bf16_flops, found.fp8_flops) == (768e9, 154.8e12, None)
    assert (found.compute_capability, found.is_cpu) == ("8.6", False)
    assert load_gpu(found.lookup) == found
    assert load_gpu(load_gpu("L4").lookup) == load_gpu("L4")
    assert load_gpu(card_file(tmp_path, name="mine", planned_total_mib=1)).name == "mine"


@pytest.mark.parametrize("name", CATALOGUE["gpus"])
def test_an_entry_of_the_catalogue_is_such_a_file(name, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**CATALOGUE["gpus"][name], "name": name}))
    assert dataclasses.replace(load_gpu(path), source="") == load_gpu(name)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"planned_total_mib": None}, FileFormatError, "planned_total_mib"),
        ({"planned_total_mib": 0}, FileFormatError, "planned_total_mib"),
        ({"planned_total_mib": "48 GB"}, FileFormatError, "planned_total_mib"),
        ({"mem_bandwidth_gb_s": -1}, FileFormatError, "mem_bandwidth_gb_s"),
        ({"bf16_dense_tflops": float("nan")}, FileFormatError, "bf16_dense_tflops"),
        ({"compute_capability": "Ampere"}, FileFormatError, "compute_capability"),
        ({"planed_total_mib": 1}, UnknownNameError, "planned_total_mib"),
    ],
)
def test_a_wrong_file_of_a_card_names_the_key(changes, error, words, tmp_path):
    with pytest.raises(error, match=words):
        load_gpu(card_file(tmp_path, **changes))


def test_a_file_of_a_card_that_is_not_there_or_no_json(tmp_path):
    with pytest.raises(FileFormatError, match="no file"):
        load_gpu(str(tmp_path / "none.json"))
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(FileFormatError, match="not a JSON object"):
        load_gpu(tmp_path / "x.json")
