"""Checks of the cards: driver against CUDA, card against the builds, heat, other processes, number formats."""

from __future__ import annotations

import os

from labkit import format as shown
from labkit.doctor.check import Check, looked
from labkit.doctor.cuda_rules import (
    BF16_CAPABILITY,
    FP8_CAPABILITY,
    dotted,
    needed_driver,
    numbers,
    runs_on,
    smallest_driver,
    torch_architectures,
    vllm_architectures,
)
from labkit.doctor.machine import AnyMachine, TorchFacts
from labkit.doctor.nvml_facts import CardFacts, NvmlFacts

HOT_C = 85
_NOTICED_BYTES = 256 * 2**20


def accelerator_checks(machine: AnyMachine) -> list[Check]:
    """Every check of driver and cards; "unknown" where NVML does not say."""
    try:
        facts, torch, vllm = machine.nvml(), machine.torch(), machine.package("vllm")
    except Exception as error:
        # The driver's own library may fail in any way; the rest of the machine is still looked at.
        return [Check("cards", "unknown", f"{type(error).__name__}: {error}", "driver and packages were not readable")]
    checks = [
        looked(check_cards, machine, facts),
        looked(check_driver_runtime, facts, torch),
        looked(check_toolkit, machine, torch),
    ]
    for card in facts.cards:
        checks += [
            looked(check_torch_build, card, torch),
            looked(check_vllm_build, card, vllm.version if vllm else None),
            *(looked(look, card) for look in (check_formats, check_temperature, check_processes, check_mig)),
        ]
    if facts.cards:
        checks += [looked(check_persistence, facts), looked(check_counters, machine)]
    return checks


def check_cards(machine: AnyMachine, facts: NvmlFacts) -> Check:
    """Whether there is a driver and a card, and what hides them."""
    name = "cards"
    if facts.cards:
        words = [f"{card.name} ({_capability(card)}, {shown.memory(card.total_bytes)})" for card in facts.cards]
        visible = machine.environ().get("CUDA_VISIBLE_DEVICES")
        if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
            return Check(
                name, "problem", f"{len(words)} cards, CUDA_VISIBLE_DEVICES={visible!r}",
                "CUDA_VISIBLE_DEVICES hides every card from CUDA", "unset CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
        return Check(name, "ok", f"driver {facts.driver or 'unknown'}: {', '.join(words)}")
    if not facts.reason:
        return Check(
            name, "problem", "NVML starts and counts no card", "no card is given to this machine or container",
            "docker run --gpus all …, or choose a machine with a card",
        )  # fmt: skip
    if "mismatch" in facts.reason.lower():
        return Check(
            name, "problem", facts.reason, "the driver was updated while its old kernel module is still loaded",
            "reboot, or unload and load the nvidia modules",
        )  # fmt: skip
    if machine.exists("/dev/nvidiactl") or machine.exists("/proc/driver/nvidia/version"):
        return Check(
            name, "problem", f"{facts.reason}; the kernel module is loaded",
            "the driver's user-space library (libnvidia-ml.so.1, libcuda.so.1) is not visible here, as in a container "
            "started without the NVIDIA runtime",
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker, then docker run "
            "--gpus all …",
        )  # fmt: skip
    return Check(
        name, "unknown", facts.reason,
        "no NVIDIA driver is visible here: labkit runs on the CPU; checks of cards were left out",
    )  # fmt: skip


def check_driver_runtime(facts: NvmlFacts, torch: TorchFacts | None) -> Check:
    """The driver against the CUDA that torch was built with."""
    name = "driver-runtime"
    if torch is None:
        return Check(name, "unknown", "torch is not installed", "there is no CUDA runtime to compare with")
    if torch.cuda is None:
        if not facts.cards:
            return Check(name, "ok", f"torch {torch.version} is a CPU build and there is no card")
        return Check(
            name, "problem", f"torch {torch.version} is a CPU build, the driver is {facts.driver}",
            "torch came from an index without CUDA", "pip install --force-reinstall torch, in a clean environment",
        )  # fmt: skip
    if facts.driver is None:
        return Check(name, "unknown", f"torch {torch.version} uses CUDA {torch.cuda}; no driver answers", facts.reason)
    evidence = f"driver {facts.driver}, torch {torch.version} uses CUDA {torch.cuda}"
    native, smallest = needed_driver(torch.cuda), smallest_driver(torch.cuda)
    if native is None or smallest is None:
        return Check(name, "unknown", evidence, f"CUDA {torch.cuda} is not in the table of drivers")
    if numbers(facts.driver) >= numbers(native):
        return Check(name, "ok", evidence)
    if numbers(facts.driver) >= numbers(smallest):
        return Check(
            name, "warning", f"{evidence}; CUDA {torch.cuda} came with driver {native}",
            "it runs by minor-version compatibility; code kept as PTX and images that require this CUDA will not",
            f"update the host's driver to {native} or newer",
        )  # fmt: skip
    return Check(
        name, "problem", f"{evidence}, which needs driver {smallest} or newer",
        "the driver is too old for the CUDA runtime (forward compatibility exists on data-centre cards only)",
        f"update the host's driver to {native} or newer, or see `labkit doctor --which-vllm`",
    )  # fmt: skip


def check_toolkit(machine: AnyMachine, torch: TorchFacts | None) -> Check:
    """nvcc against torch's CUDA: it matters only where something is compiled."""
    name = "cuda-toolkit"
    output = machine.run("nvcc", "--version")
    release = None if output is None else output.text.partition("release ")[2].partition(",")[0].strip()
    if not release:
        return Check(name, "ok", "no nvcc on the path: wheels need none, a build from source does")
    if torch is None or torch.cuda is None:
        return Check(name, "ok", f"nvcc {release}; torch has no CUDA to compare with")
    evidence = f"nvcc {release}, torch uses CUDA {torch.cuda}"
    if numbers(release)[:1] == numbers(torch.cuda)[:1]:
        return Check(name, "ok", evidence)
    return Check(
        name, "warning", evidence, "extensions compiled here would link another CUDA major version than torch's",
        f"install CUDA toolkit {torch.cuda}, or set CUDA_HOME to it",
    )  # fmt: skip


def check_torch_build(card: CardFacts, torch: TorchFacts | None) -> Check:
    """The card's capability against what torch was built for."""
    name = f"torch-build-{card.index}"
    if torch is None or torch.cuda is None:
        return Check(name, "unknown", "no CUDA build of torch is installed")
    built = torch.architectures or torch_architectures(torch.version, torch.cuda)
    if card.capability is None or not built:
        return Check(name, "unknown", f"capability of {card.name} or architectures of torch {torch.version} not known")
    evidence = f"{card.name} is {dotted(card.capability)}, torch {torch.version} was built for {', '.join(built)}"
    if runs_on(built, card.capability):
        return Check(name, "ok", evidence)
    return Check(name, "problem", evidence, *_wrong_build(card.capability, "torch"))


def check_vllm_build(card: CardFacts, version: str | None) -> Check:
    """The card's capability against what vLLM's wheel was built for."""
    name = f"vllm-build-{card.index}"
    if version is None:
        return Check(name, "unknown", "vLLM is not installed", "nothing to compare", "labkit doctor --which-vllm")
    built = vllm_architectures(version)
    if card.capability is None or not built:
        return Check(name, "unknown", f"capability of {card.name} or architectures of vLLM {version} not known")
    evidence = f"{card.name} is {dotted(card.capability)}, vLLM {version} was built for {', '.join(built)}"
    if runs_on(built, card.capability):
        return Check(name, "ok", evidence)
    return Check(name, "problem", evidence, *_wrong_build(card.capability, "vLLM"))


def _wrong_build(capability: tuple[int, int], what: str) -> tuple[str, str]:
    cause = f"no kernel image for capability {dotted(capability)} is in this build of {what}"
    if capability >= (10, 0):
        return cause, "take builds with CUDA 12.8 or newer: labkit doctor --which-vllm"
    if capability < (7, 0):
        return cause, "vLLM does not support cards below 7.0: use another card"
    return cause, "labkit doctor --which-vllm names the releases that still have it"


def check_formats(card: CardFacts) -> Check:
    """bfloat16 and FP8 on the card."""
    name = f"formats-{card.index}"
    if card.capability is None:
        return Check(name, "unknown", f"capability of {card.name} not known")
    evidence = f"{card.name} is {dotted(card.capability)}"
    if card.capability < BF16_CAPABILITY:
        return Check(
            name, "warning", f"{evidence}: neither bfloat16 (8.0) nor FP8 (8.9)",
            "bfloat16 needs capability 8.0; models stored in it do not start with dtype auto",
            "vllm serve … --dtype half",
        )  # fmt: skip
    if card.capability < FP8_CAPABILITY:
        return Check(name, "ok", f"{evidence}: bfloat16; FP8 only as storage, not in tensor cores (8.9)")
    return Check(name, "ok", f"{evidence}: bfloat16 and FP8")


def check_temperature(card: CardFacts) -> Check:
    """Heat and what slows the card down."""
    name = f"temperature-{card.index}"
    if card.temperature_c is None and card.throttling is None:
        return Check(name, "unknown", f"{card.name} says neither temperature nor throttling")
    slow = [word for word in card.throttling or () if word != "power cap"]
    evidence = f"{card.temperature_c if card.temperature_c is not None else '?'} °C"
    if card.slowdown_c:
        evidence += f", slows down at {card.slowdown_c} °C"
    if slow:
        return Check(
            name, "problem", f"{evidence}; slowed by {', '.join(slow)}", "the card is too hot or its power is cut",
            "see to the cooling or power supply; nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        )  # fmt: skip
    limit = min(HOT_C, card.slowdown_c - 5) if card.slowdown_c else HOT_C
    if card.temperature_c is not None and card.temperature_c >= limit:
        return Check(name, "warning", evidence, "close to the temperature at which clocks fall", "see to the cooling")
    return Check(name, "ok", evidence + (", power-capped under load" if card.throttling else ""))


def check_processes(card: CardFacts) -> Check:
    """Other processes on the card, and memory that no visible process owns."""
    name = f"processes-{card.index}"
    if card.processes is None and card.free_bytes is None:
        return Check(name, "unknown", f"{card.name} says neither processes nor free memory")
    free = f"{shown.memory(card.free_bytes)} of {shown.memory(card.total_bytes)} free"
    others = [entry for entry in card.processes or () if entry.pid != os.getpid()]
    listed = [f"{entry.pid} {entry.name} ({shown.memory(entry.used_bytes)})" for entry in others]
    if listed:
        return Check(
            name, "warning", f"{free}; {'; '.join(listed[:8])}",
            "vLLM wants gpu-memory-utilization × total free when it starts",
            f"end them ({', '.join(f'kill {entry.pid}' for entry in others[:4])}), or lower "
            "--gpu-memory-utilization to the free share",
        )  # fmt: skip
    if card.processes:
        return Check(name, "ok", f"{free}; only this process")
    used = (card.total_bytes or 0) - (card.free_bytes or 0) if card.free_bytes is not None else 0
    if used > _NOTICED_BYTES + (card.total_bytes or 0) // 50:
        return Check(
            name, "warning", f"{free}; no process is visible",
            "another container, or a process that died without its children, holds memory",
            "on the host: sudo fuser -v /dev/nvidia*, then end what is left",
        )  # fmt: skip
    return Check(name, "ok", f"{free}; no other process")


def check_mig(card: CardFacts) -> Check:
    """MIG slices have less memory, and NVML cannot say everything of them."""
    name = f"mig-{card.index}"
    if card.mig is None:
        return Check(name, "ok", f"{card.name} has no MIG")
    if not card.mig:
        return Check(name, "ok", "MIG is off")
    return Check(
        name, "warning", "MIG is on: this process sees one slice, NVML reports the whole card",
        "memory and processes of a slice are not what NVML prints for the card",
        "nvidia-smi -L names the slices; set CUDA_VISIBLE_DEVICES=MIG-<uuid> and plan with --total-gib of the slice",
    )  # fmt: skip


def check_persistence(facts: NvmlFacts) -> Check:
    """Persistence mode: without it the first start after idle takes seconds more."""
    states = [card.persistence for card in facts.cards]
    if all(state is None for state in states):
        return Check("persistence", "unknown", "the driver does not say")
    if all(state is not False for state in states):
        return Check("persistence", "ok", "persistence mode is on")
    return Check(
        "persistence", "warning", "persistence mode is off", "the driver unloads when the last process ends",
        "sudo nvidia-smi -pm 1",
    )  # fmt: skip


def check_counters(machine: AnyMachine) -> Check:
    """Whether hardware counters (L2 hit rate, DRAM bytes) may be read by this user."""
    name = "hardware-counters"
    text = machine.read("/proc/driver/nvidia/params")
    if text is None:
        return Check(name, "unknown", "the driver's parameters are not readable here")
    if "RmProfilingAdminOnly: 1" in text:
        return Check(
            name, "warning", "RmProfilingAdminOnly: 1", "only root may read counters: L2 hit rates are then simulated",
            "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvprof.conf, then "
            "reboot; in a container --cap-add=SYS_ADMIN",
        )  # fmt: skip
    return Check(name, "ok", "every user may read them")


def _capability(card: CardFacts) -> str:
    return dotted(card.capability) if card.capability else "capability unknown"
