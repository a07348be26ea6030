"""`labkit doctor --which-vllm`: from driver, card, Python and C library to the vLLM releases whose wheels run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from labkit.doctor.check import Check, Examination
from labkit.doctor.cuda_rules import (
    builds,
    clean_install,
    dotted,
    needed_driver,
    numbers,
    runs_on,
    smallest_driver,
    torch_architectures,
    vllm_architectures,
)
from labkit.doctor.machine import AnyMachine

# Wheels tagged manylinux1 were renamed, not built for it: these were linked on Ubuntu 20.04.
GLIBC_OF_RENAMED = (2, 31)


@dataclass(frozen=True)
class Release:
    """One row of the table: what the wheel of the newest patch of a minor release needs.

    Attributes:
        python: version range, such as ">=3.10,<3.14".
        platform, torch_platform: tags of the wheels.
        torch, cuda: the exact torch and the CUDA of its wheel.
        torch_pythons: Pythons for which that torch has a wheel, such as "3.12".
        requires: version ranges of other packages.
    """

    version: str
    python: str | None
    platform: str
    torch: str | None
    cuda: str | None
    torch_platform: str | None
    torch_pythons: tuple[str, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()

    @property
    def glibc(self) -> tuple[int, ...]:
        """The C library that both wheels need."""
        return max(glibc_of_platform(self.platform), glibc_of_platform(self.torch_platform or ""))

    def takes_python(self, python: str) -> bool:
        """Whether the wheel's range holds this Python, and its torch has a wheel for it."""
        try:
            takes = SpecifierSet(self.python or "").contains(python, prereleases=True)
        except InvalidSpecifier:
            return False
        return takes and dotted(numbers(python)[:2]) in self.torch_pythons


@dataclass(frozen=True)
class Verdict:
    """Whether a release runs here.

    Attributes:
        reasons: why it does not; () where it does.
        warnings: what will be missing although it runs.
    """

    release: Release
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """True where nothing speaks against it."""
        return not self.reasons


def glibc_of_platform(tag: str) -> tuple[int, ...]:
    """(2, 28) of "manylinux_2_28_x86_64"."""
    found = re.search(r"manylinux_(\d+)_(\d+)", tag)
    if found:
        return int(found[1]), int(found[2])
    if "manylinux2014" in tag:
        return (2, 17)
    return GLIBC_OF_RENAMED if "manylinux1" in tag else (0,)


@lru_cache(maxsize=1)
def recorded() -> str:
    """The day on which the table was read."""
    return str(json.loads(files(__package__).joinpath("vllm_wheels.json").read_text())["recorded"])


@lru_cache(maxsize=1)
def releases() -> tuple[Release, ...]:
    """The table `vllm_wheels.json`, oldest first."""
    table = json.loads(files(__package__).joinpath("vllm_wheels.json").read_text())["releases"]
    return tuple(
        Release(
            row["version"], row["python"], row["platform"], row["torch"], row["cuda"], row["torch_platform"],
            tuple(row["torch_pythons"]),
            tuple(row["requires"].items()),
        )
        for row in table.values()
    )  # fmt: skip


def judge(
    release: Release,
    *,
    python: str,
    glibc: str | None,
    driver: str | None,
    capability: tuple[int, int] | None,
    architecture: str = "x86_64",
) -> Verdict:
    """Whether a release's wheels run on a machine; what is None was not looked at and speaks against nothing."""
    reasons, warnings = [], []
    if not release.takes_python(python):
        pythons = f"{release.torch_pythons[0]} to {release.torch_pythons[-1]}" if release.torch_pythons else "none"
        reasons.append(
            f"takes Python {release.python} and torch {release.torch} has wheels for {pythons}: not {python}"
        )
    if architecture != "x86_64":
        warnings.append(f"the table holds wheels for x86_64, here is {architecture}")
    if glibc is not None and numbers(glibc) < release.glibc:
        reasons.append(f"needs glibc {dotted(release.glibc)}, here is {glibc}")
    if driver is not None and release.cuda:
        smallest, native = smallest_driver(release.cuda), needed_driver(release.cuda)
        if smallest and numbers(driver) < numbers(smallest):
            reasons.append(f"CUDA {release.cuda} needs driver {smallest} or newer, here is {driver}")
        elif native and numbers(driver) < numbers(native):
            warnings.append(f"driver {driver} runs CUDA {release.cuda} by minor-version compatibility, without PTX")
    if capability is not None:
        reasons += _card_reasons(release, capability)
    return Verdict(release, tuple(reasons), tuple(warnings))


def _card_reasons(release: Release, capability: tuple[int, int]) -> list[str]:
    torch = torch_architectures(release.torch or "", release.cuda)
    return [
        f"{what} of CUDA {release.cuda} has no kernels for {dotted(capability)}"
        for what, built in (
            (f"torch {release.torch}", torch),
            (f"vLLM {release.version}", vllm_architectures(release.version)),
        )
        if built and not runs_on(built, capability)
    ]


def find_vllm(machine: AnyMachine) -> Examination:
    """Which vLLM releases run on a machine, the command that installs the newest, or how to build from source."""
    system, nvml = machine.system(), machine.nvml()
    capabilities = sorted({card.capability for card in nvml.cards if card.capability})
    verdicts = [
        judge(
            release, python=system.python, glibc=system.glibc, driver=nvml.driver,
            capability=capabilities[0] if capabilities else None, architecture=system.architecture,
        )
        for release in releases()
    ]  # fmt: skip
    running = [verdict for verdict in verdicts if verdict.runs]
    checks = [_seen(machine, capabilities), _answer(running, verdicts, capabilities)]
    facts = {
        "recorded": recorded(),
        "runs": [verdict.release.version for verdict in running],
        "newest": running[-1].release.version if running else None,
        "command": install_command(running[-1].release) if running else None,
        "torch_cuda_arch_list": arch_list(capabilities),
        "releases": [_row(verdict) for verdict in reversed(verdicts)],
    }
    return Examination("vLLM releases for this machine", tuple(checks), facts)


def check_wanted(machine: AnyMachine, version: str) -> Check:
    """Whether one wanted release runs here, and the torch that it pins against the installed one."""
    name = "wanted-vllm"
    row = next((row for row in releases() if numbers(row.version)[:2] == numbers(version)[:2]), None)
    if row is None:
        known = f"{releases()[0].version} to {releases()[-1].version}"
        return Check(name, "unknown", f"vLLM {version} is not in the table ({known})", "not recorded")
    system, nvml = machine.system(), machine.nvml()
    verdict = judge(
        row, python=system.python, glibc=system.glibc, driver=nvml.driver, architecture=system.architecture,
        capability=min((card.capability for card in nvml.cards if card.capability), default=None),
    )  # fmt: skip
    torch = machine.torch()
    evidence = (
        f"vLLM {row.version} pins torch {row.torch} (CUDA {row.cuda}); installed: {torch.version if torch else 'none'}"
    )
    if not verdict.runs:
        return Check(name, "problem", evidence, "; ".join(verdict.reasons), "labkit doctor --which-vllm")
    if torch is not None and machine.package("vllm") is None and torch.version.partition("+")[0] != row.torch:
        return Check(
            name, "warning", evidence, "installing it here would replace this environment's torch",
            install_command(row),
        )  # fmt: skip
    return Check(name, "warning" if verdict.warnings else "ok", evidence, "; ".join(verdict.warnings),
                 "" if machine.package("vllm") else install_command(row))  # fmt: skip


def _seen(machine: AnyMachine, capabilities: list[tuple[int, int]]) -> Check:
    system, nvml = machine.system(), machine.nvml()
    parts: list[str] = [f"Python {system.python}", f"glibc {system.glibc or 'unknown'}", system.architecture]
    missing: list[str] = []
    for what, value in (("driver", nvml.driver), ("card", ", ".join(dotted(entry) for entry in capabilities))):
        (parts if value else missing).append(f"{what} {value}" if value else what)
    if not missing:
        return Check("machine", "ok", ", ".join(parts))
    return Check("machine", "unknown", ", ".join(parts), f"not seen: {' and '.join(missing)} ({nvml.reason})")


def _answer(running: list[Verdict], verdicts: list[Verdict], capabilities: list[tuple[int, int]]) -> Check:
    if running:
        best = running[-1]
        blind = "" if capabilities else "by Python and glibc alone, since no card was seen: "
        evidence = (
            f"{blind}{len(running)} of {len(verdicts)} recorded minor releases run; newest: vLLM "
            f"{best.release.version} with torch {best.release.torch}, CUDA {best.release.cuda}"
        )
        return Check(
            "answer",
            "warning" if best.warnings else "ok",
            evidence,
            "; ".join(best.warnings),
            install_command(best.release),
        )
    newest = verdicts[-1]
    architectures = arch_list(capabilities)
    cause = f"no recorded wheel runs: vLLM {newest.release.version} {'; '.join(newest.reasons)}"
    if architectures is None:
        return Check("answer", "problem", "none of the recorded releases runs", cause, _advice(newest, capabilities))
    needs_build = all("kernels" in reason for verdict in verdicts[-3:] for reason in verdict.reasons)
    fix = source_command(newest.release, architectures) if needs_build else _advice(newest, capabilities)
    return Check("answer", "problem", "none of the recorded releases runs", cause, fix)


def _advice(newest: Verdict, capabilities: list[tuple[int, int]]) -> str:
    if capabilities and capabilities[0] < (7, 0):
        return f"capability {dotted(capabilities[0])} is below vLLM's floor of 7.0: use another card"
    steps = []
    text = " ".join(newest.reasons)
    if "driver" in text and newest.release.cuda:
        steps.append(f"update the host's driver to {needed_driver(newest.release.cuda)} or newer")
    if "Python" in text:
        steps.append("uv venv --python 3.12")
    if "glibc" in text:
        steps.append("run the container vllm/vllm-openai, which brings its own C library")
    return "; ".join(steps) or "use another machine"


def _row(verdict: Verdict) -> dict[str, str]:
    """One release as text, for tables."""
    release = verdict.release
    return {
        "vllm": release.version,
        "runs": "yes" if verdict.runs else "no",
        "torch": release.torch or "",
        "cuda": release.cuda or "",
        "python": release.python or "",
        "glibc": dotted(release.glibc),
        "transformers": dict(release.requires).get("transformers", ""),
        "why": "; ".join((*verdict.reasons, *verdict.warnings)),
    }


def install_command(release: Release) -> str:
    """The command that installs a release with its torch from one index."""
    return clean_install(release.version)


def arch_list(capabilities: list[tuple[int, int]]) -> str | None:
    """`TORCH_CUDA_ARCH_LIST` for the cards; None where there is none or vLLM's build takes none of them."""
    known = {name for names in builds()["source_architectures"].values() for name in names}
    words = [dotted(entry) for entry in capabilities if dotted(entry) in known]
    return " ".join(words) if words and len(words) == len(capabilities) else None


def source_command(release: Release, architectures: str) -> str:
    """The commands that build a release for cards that its wheel leaves out."""
    return (
        f"git clone --branch v{release.version} --depth 1 https://github.com/vllm-project/vllm && cd vllm && "
        f'TORCH_CUDA_ARCH_LIST="{architectures}" MAX_JOBS=8 uv pip install -e . --torch-backend=auto'
    )
