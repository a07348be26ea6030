"""Record what each minor release of vLLM needs, from the metadata of its wheels: `labkit/doctor/vllm_wheels.json`.

Only metadata is read (`pip install --dry-run --report`, PEP 658): no wheel of vLLM or torch is downloaded. Run it again
after a release:

    python tools/record_vllm_wheels.py [--only 0.33] [--out FILE]

What metadata does not hold, the capabilities that the binaries were built for, stays as it is in
`labkit/doctor/vllm_builds.json`, with its source.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "labkit" / "doctor" / "vllm_wheels.json"
FIRST_MINOR = (0, 6)
_RELEASE = re.compile(r"0\.(\d+)\.(\d+)(?:\.post(\d+))?")
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
# What pip says where the index has the version and no wheel of it for that Python.
_NO_WHEEL = ("No matching distribution", "ResolutionImpossible")
_WANTED = ("torch", "torchvision", "transformers", "xformers", "flashinfer-python", "numpy", "triton")


class PipError(Exception):
    """pip failed; the message is what it said."""


def pip(*words: str) -> str:
    """Standard output of pip.

    Raises:
        PipError: pip failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise PipError(f"pip {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def latest_patches() -> dict[str, str]:
    """Minor release → its newest patch release on the index."""
    listing = pip("index", "versions", "vllm")
    line = next(text for text in listing.splitlines() if text.startswith("Available versions:"))
    newest: dict[str, tuple[tuple[int, int], str]] = {}
    for version in (word.strip() for word in line.partition(":")[2].split(",")):
        found = _RELEASE.fullmatch(version)
        if not found or (0, int(found[1])) < FIRST_MINOR:
            continue
        key = (int(found[2]), int(found[3] or 0))
        minor = f"0.{found[1]}"
        if minor not in newest or key > newest[minor][0]:
            newest[minor] = (key, version)
    return {minor: version for minor, (_, version) in newest.items()}


def metadata_of(requirement: str, python: str = "3.12") -> dict[str, Any]:
    """pip's report on the wheel that it would take for Linux x86_64: file name and core metadata."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(17, 40)] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    report = pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--only-binary", ":all:",
        "--python-version", python, "--implementation", "cp", "--target", "/nonexistent",
        *(word for name in platforms for word in ("--platform", name)), "--report", "-", requirement,
    )  # fmt: skip
    (entry,) = json.loads(report[report.index("{") :])["install"]
    return {"wheel": entry["download_info"]["url"].rpartition("/")[2], **entry["metadata"]}


def requirement(metadata: dict[str, Any], name: str) -> str | None:
    """The version range that a wheel asks of `name` on Linux x86_64 without extras, "" for any; None if none."""
    for line in metadata.get("requires_dist", ()):
        text, _, marker = line.partition(";")
        if "extra ==" in marker or ("platform_machine" in marker and "x86_64" not in marker):
            continue
        found = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^)]*)\)?", text.strip())
        if found and found[1].lower().replace("_", "-") == name:
            return found[2].replace(" ", "")
    return None


def has_wheel(wanted: str, python: str) -> bool:
    """Whether the index has a wheel for that Python."""
    try:
        metadata_of(wanted, python)
    except PipError as error:
        if not any(text in str(error) for text in _NO_WHEEL):
            raise
        return False
    return True


def facts_of_torch(torch: str) -> dict[str, Any]:
    """The CUDA runtime that torch's wheel asks for, such as "12.8", its platform tag, and Pythons that have a wheel."""
    metadata = metadata_of(f"torch=={torch}")
    cuda = None
    for line in metadata.get("requires_dist", ()):
        found = re.match(r"(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)(?:\[[^]]*\])?\s*\(?==(\d+\.\d+)", line)
        cuda = cuda or (found[1] if found else None)
    pythons = [python for python in PYTHONS if has_wheel(f"torch=={torch}", python)]
    return {"cuda": cuda, "torch_platform": platform_of(metadata), "torch_pythons": pythons}


def platform_of(metadata: dict[str, Any]) -> str:
    """The platform tag of the wheel's file name."""
    return metadata["wheel"].removesuffix(".whl").rpartition("-")[2]


def record(version: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row of the table."""
    metadata = metadata_of(f"vllm=={version}")
    needs = {name: found for name in _WANTED if (found := requirement(metadata, name)) is not None}
    torch = needs.get("torch", "").removeprefix("==")
    if torch and torch not in known:
        known[torch] = facts_of_torch(torch)
    return {
        "version": version,
        "wheel": metadata["wheel"],
        "python": metadata.get("requires_python"),
        "platform": platform_of(metadata),
        "torch": torch or None,
        **known.get(torch, {"cuda": None, "torch_platform": None, "torch_pythons": []}),
        "requires": {name: value for name, value in needs.items() if name != "torch"},
    }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one minor release, the others are kept")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["releases"] if options.out.exists() and options.only else {}
    torch: dict[str, dict[str, Any]] = {}
    for minor, version in sorted(latest_patches().items(), key=lambda item: int(item[0].split(".")[1])):
        if options.only in (None, minor):
            known[minor] = record(version, torch)
            print(json.dumps(known[minor]), flush=True)
    table = {
        "source": "metadata of the wheels on PyPI for CPython 3.12, Linux x86_64; newest patch of each minor release",
        "recorded": datetime.now(UTC).date().isoformat(),
        "made_by": "tools/record_vllm_wheels.py",
        "releases": dict(sorted(known.items(), key=lambda item: int(item[0].split(".")[1]))),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
