"""Checks of what the card's software stands on: Python, C library, packages, shared libraries, container, host."""

from __future__ import annotations

import re
from collections.abc import Callable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from labkit import format as shown
from labkit.doctor.check import Check, looked
from labkit.doctor.cuda_rules import clean_install, dotted, numbers
from labkit.doctor.machine import AnyMachine, Package
from labkit.doctor.which_vllm import releases

GIB = 2**30
SMALL_SHM = 1 * GIB
FEW_FILES = 4096
LITTLE_MEMORY = 8 * GIB
LITTLE_DISK = 20 * GIB


def environment_checks(machine: AnyMachine) -> list[Check]:
    """Every check of the environment, in the order in which failures show."""
    looks: tuple[Callable[[AnyMachine], Check], ...] = (
        check_python, check_glibc, check_virtual_environment, check_torch_pin, check_requirements, check_cuda_pair,
        check_libcudart, check_libcuda, check_container, check_shm, check_wsl, check_open_files,
        check_host_memory, check_disk, check_hub, check_sqlite_place,
    )  # fmt: skip
    return [looked(look, machine) for look in looks]


def check_python(machine: AnyMachine) -> Check:
    """Python against the newest recorded vLLM."""
    newest, system = releases()[-1], machine.system()
    evidence = f"Python {system.python} on {system.name} {system.architecture}"
    if system.name != "Linux":
        return Check(
            "python", "warning", evidence, "vLLM's wheels are for Linux", "use Linux, WSL2 or a container",
        )  # fmt: skip
    if newest.takes_python(system.python):
        return Check("python", "ok", f"{evidence}; vLLM {newest.version} takes {newest.python}")
    return Check(
        "python", "warning", evidence, f"vLLM {newest.version} takes Python {newest.python}",
        "uv venv --python 3.12 && source .venv/bin/activate",
    )  # fmt: skip


def check_glibc(machine: AnyMachine) -> Check:
    """The C library against the newest wheels' manylinux tags."""
    found, newest = machine.system().glibc, releases()[-1]
    needed = newest.glibc
    if found is None:
        return Check(
            "glibc", "warning", "the C library is not glibc (musl, as in Alpine?)",
            "there are no wheels of torch or vLLM for it", "use an image on Debian or Ubuntu: vllm/vllm-openai",
        )  # fmt: skip
    if numbers(found) >= needed:
        return Check("glibc", "ok", f"glibc {found}; wheels of vLLM {newest.version} need {dotted(needed)}")
    return Check(
        "glibc", "warning", f"glibc {found}; wheels of vLLM {newest.version} need {dotted(needed)}",
        "the host's C library is too old for the newest wheels (GLIBC_… not found); it cannot be updated alone",
        "run the container vllm/vllm-openai, or see labkit doctor --which-vllm",
    )  # fmt: skip


def check_virtual_environment(machine: AnyMachine) -> Check:
    """A shared Python is where torch gets replaced by the next pip install."""
    if machine.system().in_virtual_environment:
        return Check("virtual-environment", "ok", "a virtual environment is active")
    return Check(
        "virtual-environment", "warning", "packages go into the system's Python",
        "the next package may change torch under vLLM", "python -m venv .venv && source .venv/bin/activate",
    )  # fmt: skip


def check_torch_pin(machine: AnyMachine) -> Check:
    """The installed torch against the one that the installed vLLM was built with."""
    name, torch, vllm = "torch-pin", machine.torch(), machine.package("vllm")
    if vllm is None:
        return Check(name, "ok", "vLLM is not installed: nothing pins torch")
    pinned = _pinned(vllm, "torch")
    if pinned is None:
        return Check(name, "unknown", f"vLLM {vllm.version} names no torch in its metadata")
    command = f"pip install --force-reinstall vllm=={vllm.version} torch{pinned}"
    if torch is None:
        return Check(name, "problem", f"vLLM {vllm.version} needs torch{pinned}, none is installed", "torch is missing",
                     command)  # fmt: skip
    evidence = f"vLLM {vllm.version} needs torch{pinned}, installed is {torch.version}"
    if _satisfies(torch.version, pinned):
        return Check(name, "ok", evidence)
    return Check(
        name, "problem", evidence,
        "torch was changed after vLLM was installed: its compiled part will say \"undefined symbol\" in _C.abi3.so",
        command,
    )  # fmt: skip


def check_requirements(machine: AnyMachine) -> Check:
    """Other packages that the installed vLLM asks for."""
    name, vllm = "vllm-requirements", machine.package("vllm")
    if vllm is None:
        return Check(name, "ok", "vLLM is not installed")
    wrong = []
    for package in ("transformers", "numpy", "tokenizers", "torchvision", "torchaudio", "xformers", "triton"):
        wanted, installed = _pinned(vllm, package), machine.package(package)
        if wanted is not None and (installed is None or not _satisfies(installed.version, wanted)):
            wrong.append(f"{package}{wanted} (installed: {installed.version if installed else 'none'})")
    if not wrong:
        return Check(name, "ok", f"what vLLM {vllm.version} asks for is there")
    return Check(
        name, "problem", f"vLLM {vllm.version} asks for {', '.join(wrong)}", "packages were changed after vLLM",
        f"pip install --force-reinstall vllm=={vllm.version}",
    )  # fmt: skip


def _pinned(package: Package, name: str) -> str | None:
    """The version range that `package` asks of `name`, "" for any."""
    for line in package.requires:
        try:
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, KeyError, ValueError):
            continue
        if applies and requirement.name.lower().replace("_", "-") == name:
            return str(requirement.specifier)
    return None


def _satisfies(version: str, wanted: str) -> bool:
    try:
        requirement = Requirement(f"x{wanted}")
        return requirement.specifier.contains(Version(version).public, prereleases=True)
    except (InvalidRequirement, InvalidVersion):
        return False


def check_cuda_pair(machine: AnyMachine) -> Check:
    """CUDA of the installed torch against that of the installed vLLM's wheel: equal versions come in several CUDAs."""
    torch, vllm = machine.torch(), machine.package("vllm")
    if torch is None or vllm is None:
        return Check("cuda-pair", "ok", "torch and vLLM are not both installed")
    row = next((row for row in releases() if numbers(row.version)[:2] == numbers(vllm.version)[:2]), None)
    if row is None or not row.cuda:
        return Check("cuda-pair", "unknown", f"vLLM {vllm.version} is not in the table of releases")
    evidence = f"vLLM {vllm.version}'s wheel uses CUDA {row.cuda}, torch {torch.version} {torch.cuda or 'no CUDA'}"
    if torch.cuda is not None and numbers(torch.cuda)[0] == numbers(row.cuda)[0]:
        return Check("cuda-pair", "ok", evidence)
    return Check(
        "cuda-pair", "problem", evidence,
        f"vLLM will say that libcudart.so.{numbers(row.cuda)[0]} cannot be opened (unless it was built here)",
        f"{clean_install(vllm.version)}; make no symlinks",
    )  # fmt: skip


def check_libcudart(machine: AnyMachine) -> Check:
    """The CUDA runtime library of torch's major version, and by which path it is found."""
    name, torch = "libcudart", machine.torch()
    if torch is None or torch.cuda is None:
        return Check(name, "ok", "no CUDA build of torch is installed: no CUDA runtime is needed")
    major = numbers(torch.cuda)[0]
    found = machine.libraries("libcudart.so.")
    fitting = [path for path in found if f"libcudart.so.{major}" in path]
    if fitting:
        return Check(name, "ok", f"libcudart.so.{major} at {fitting[0]}")
    there = f"only {', '.join(found[:3])}" if found else "none found"
    return Check(
        name, "problem", f"torch {torch.version} uses CUDA {torch.cuda}: libcudart.so.{major} is missing ({there})",
        "torch and its CUDA packages were installed from different indexes or releases",
        f"pip install --force-reinstall torch=={torch.version.partition('+')[0]} in a clean environment; no symlinks",
    )  # fmt: skip


def check_libcuda(machine: AnyMachine) -> Check:
    """The driver's own library, which the host gives to a container."""
    name = "libcuda"
    if machine.loads("libcuda.so.1"):
        return Check(name, "ok", "libcuda.so.1 loads")
    places = machine.libraries("libcuda.so")
    if places:
        return Check(
            name, "problem", f"{places[0]} exists and does not load", "the loader does not look there",
            f"export LD_LIBRARY_PATH={places[0].rpartition('/')[0]}:$LD_LIBRARY_PATH",
        )  # fmt: skip
    if machine.nvml().cards:
        return Check(
            name, "problem", "cards are visible, libcuda.so.1 is not",
            "the container got the utility part of the driver only: vLLM says \"Failed to infer device type\"",
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
        )  # fmt: skip
    return Check(name, "unknown", "libcuda.so.1 is not here", "no driver is installed or given to this container")


def check_container(machine: AnyMachine) -> Check:
    """Docker or Kubernetes, and whether the host's container toolkit is there."""
    name = "container"
    inside = machine.exists("/.dockerenv") or machine.exists("/run/.containerenv")
    inside = inside or "KUBERNETES_SERVICE_HOST" in machine.environ()
    if inside:
        visible = machine.environ().get("NVIDIA_VISIBLE_DEVICES")
        if machine.nvml().cards or not visible or visible == "void":
            return Check(name, "ok", f"in a container; NVIDIA_VISIBLE_DEVICES={visible or 'not set'}")
        return Check(
            name, "problem", f"in a container with NVIDIA_VISIBLE_DEVICES={visible} and no card",
            "the image wants cards, the container was started without the NVIDIA runtime",
            "docker run --gpus all …; on the host: sudo nvidia-ctk runtime configure --runtime=docker && sudo "
            "systemctl restart docker",
        )  # fmt: skip
    docker = machine.run("docker", "--version")
    toolkit = machine.run("nvidia-ctk", "--version")
    if docker is None or not machine.nvml().cards:
        return Check(name, "ok", "not in a container; no docker with cards to look at")
    if toolkit is None:
        return Check(
            name, "warning", "docker is here, nvidia-ctk is not",
            'docker will say: could not select device driver "" with capabilities: [[gpu]]',
            "sudo apt-get install -y nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker && "
            "sudo systemctl restart docker",
        )  # fmt: skip
    return Check(name, "ok", f"docker with {toolkit.text.splitlines()[0] if toolkit.text else 'nvidia-ctk'}")


def check_shm(machine: AnyMachine) -> Check:
    """Shared memory: several ranks of one host talk through it."""
    found = machine.disk("/dev/shm")
    if found is None:
        return Check("shared-memory", "unknown", "/dev/shm is not there")
    evidence = f"/dev/shm: {shown.memory(found.free)} free of {shown.memory(found.total)}"
    if found.total >= SMALL_SHM and found.free >= SMALL_SHM // 2:
        return Check("shared-memory", "ok", evidence)
    return Check(
        "shared-memory", "warning", evidence,
        "docker gives 64 MiB: tensor parallelism dies with a bus error or 'unable to write to … /dev/shm'",
        "docker run --ipc=host …, or --shm-size=16g; in Kubernetes an emptyDir with medium: Memory",
    )  # fmt: skip


def check_wsl(machine: AnyMachine) -> Check:
    """vLLM leaves pinned memory off under WSL2, and the driver does not say which process holds what."""
    if "microsoft" not in machine.system().kernel.lower():
        return Check("wsl", "ok", "not under WSL")
    return Check(
        "wsl", "warning", f"kernel {machine.system().kernel}",
        "vLLM leaves pinned host memory off here (UVA is not available); the driver lives in /usr/lib/wsl/lib",
        "export VLLM_WSL2_ENABLE_PIN_MEMORY=1 where vLLM says so, and give WSL memory in %UserProfile%\\.wslconfig",
    )  # fmt: skip


def check_open_files(machine: AnyMachine) -> Check:
    """`ulimit -n`: a socket a request, and files of the shards."""
    limit = machine.open_files_limit()
    if limit < 0 or limit >= FEW_FILES:
        return Check("open-files", "ok", f"ulimit -n is {'unlimited' if limit < 0 else shown.count(limit)}")
    return Check(
        "open-files", "warning", f"ulimit -n is {shown.count(limit)}",
        "every open request holds a socket: Too many open files under load", "ulimit -n 65535",
    )  # fmt: skip


def check_host_memory(machine: AnyMachine) -> Check:
    """Host memory: weights pass through it, and a pool for swapped blocks lives in it."""
    found = machine.memory()
    evidence = f"{shown.memory(found.free)} free of {shown.memory(found.total)}"
    if found.free >= LITTLE_MEMORY:
        return Check("host-memory", "ok", evidence)
    return Check(
        "host-memory", "warning", evidence, "loading weights needs about the largest shard in host memory per rank",
        "end other programs, or lower --max-parallel-loading-workers and --kv-offloading-size",
    )  # fmt: skip


def check_disk(machine: AnyMachine) -> Check:
    """Room where models are stored."""
    place = hub_cache(machine)
    found = machine.disk(place)
    if found is None:
        return Check("disk", "unknown", f"{place} is not readable")
    evidence = f"{shown.memory(found.free)} free for {place}"
    if found.free >= LITTLE_DISK:
        return Check("disk", "ok", evidence)
    return Check(
        "disk", "warning", evidence, "a model of 8 billion parameters takes 15 GiB",
        "export HF_HOME=<folder on a larger disk>, or hf cache prune",
    )  # fmt: skip


def hub_cache(machine: AnyMachine) -> str:
    """Where the hub's library keeps models."""
    variables = machine.environ()
    home = variables.get("HF_HOME") or f"{variables.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return variables.get("HF_HUB_CACHE") or f"{home}/hub"


def check_hub(machine: AnyMachine) -> Check:
    """Whether models can be fetched."""
    if machine.hub_answers():
        return Check("hub", "ok", "the model hub answers")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if machine.environ().get(name)]
    if offline:
        return Check("hub", "ok", f"{', '.join(offline)} set: only local models are used")
    return Check(
        "hub", "warning", "the model hub does not answer", "no network, or a proxy is needed",
        "use a local folder and export HF_HUB_OFFLINE=1, or set HTTPS_PROXY or HF_ENDPOINT",
    )  # fmt: skip


def check_sqlite_place(machine: AnyMachine) -> Check:
    """labkit's run store needs a folder to write to, and a network file system may damage it by broken locks."""
    mounts = machine.read("/proc/mounts")
    place = machine.environ().get("LABKIT_HOME") or machine.environ().get("HOME") or "/"
    if not machine.can_write(place):
        return Check(
            "store-place", "warning", f"this user may not write to {place}", "runs and calibrations are kept there",
            "export LABKIT_HOME=<a folder of yours>",
        )  # fmt: skip
    if mounts is None:
        return Check("store-place", "unknown", "/proc/mounts is not readable")
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 3 and len(words[1]) >= len(best) and _is_under(place, words[1]):
            best, kind = words[1], words[2]
    if not re.fullmatch(r"nfs\d?|cifs|smb3?|fuse\.(?:sshfs|s3fs|gcsfuse)|9p|lustre", kind):
        return Check("store-place", "ok", f"{place} is on {kind or 'a local file system'}")
    return Check(
        "store-place", "warning", f"{place} is on {kind}", "SQLite's locks are not reliable on network file systems",
        "export LABKIT_HOME=<a local folder>, or give --store a database URL",
    )  # fmt: skip


def _is_under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
