"""`Machine`: all that the doctor looks at, behind one object, so that tests can be any machine.

Nothing here writes, and every look may fail alone: the answer is then None, never a guess.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from labkit.doctor.nvml_facts import NvmlFacts, read_nvml
from labkit.specs.hub_probe import hub_answers
from labkit.versions import cuda_of_version_file

MAX_TEXT = 256 * 1024
_LIBRARY_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
)


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version and what it requires, as its metadata says."""

    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch, without importing it.

    Attributes:
        version: such as "2.13.0+cpu".
        cuda: CUDA of the build, None for a CPU build.
        architectures: "sm_90" and so on where torch is already imported and says them; else ().
    """

    version: str
    cuda: str | None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """What a command printed and its exit status."""

    code: int
    text: str


@dataclass(frozen=True)
class Memory:
    """Bytes in all and free."""

    total: int
    free: int


@dataclass(frozen=True)
class System:
    """What the operating system says of itself.

    Attributes:
        python: version of the interpreter.
        glibc: such as "2.36", None where it is another C library.
        architecture: "x86_64" and so on.
        kernel: release text; holds "microsoft" under WSL.
        in_virtual_environment: a venv or conda environment is active.
    """

    python: str
    glibc: str | None
    architecture: str
    kernel: str
    in_virtual_environment: bool = True
    name: str = "Linux"


class Machine:
    """This machine. Tests give another object with the same methods."""

    def system(self) -> System:
        """Python, C library, processor architecture and kernel."""
        library, version = platform.libc_ver()
        return System(
            python=platform.python_version(),
            glibc=version if library == "glibc" and version else None,
            architecture=platform.machine(),
            kernel=platform.release(),
            in_virtual_environment=sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ,
            name=platform.system(),
        )

    def environ(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def run(self, *words: str, timeout_s: float = 2.0) -> Output | None:
        """Output of a command that only reads; None where there is none or it takes too long."""
        if shutil.which(words[0]) is None:
            return None
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return Output(done.returncode, done.stdout[:MAX_TEXT] + done.stderr[:MAX_TEXT])

    def read(self, path: str) -> str | None:
        """The first 256 KiB of a text file; None where it cannot be read."""
        try:
            with open(path, "rb") as file:
                return file.read(MAX_TEXT).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        """Whether there is something at `path`."""
        try:
            return os.path.lexists(path)
        except ValueError:
            return False

    def can_write(self, folder: str) -> bool:
        """Whether this user may make files in `folder`, or in its nearest parent that exists."""
        place = Path(folder).expanduser()
        return os.access(next((one for one in (place, *place.parents) if one.exists()), Path("/")), os.W_OK | os.X_OK)

    def package(self, name: str) -> Package | None:
        """The installed distribution of that name; it is not imported."""
        try:
            found = metadata.distribution(name)
            return Package(found.version, tuple(found.requires or ()))
        except (metadata.PackageNotFoundError, OSError, TypeError, KeyError):
            return None

    def torch(self) -> TorchFacts | None:
        """The installed torch by its files."""
        package = self.package("torch")
        if package is None:
            return None
        spec = find_spec("torch")
        folder = Path(spec.origin).parent if spec and spec.origin else None
        text = self.read(str(folder / "version.py")) if folder else None
        loaded = sys.modules.get("torch")
        architectures = tuple(loaded.cuda.get_arch_list()) if loaded is not None else ()
        return TorchFacts(package.version, cuda_of_version_file(text), architectures)

    def nvml(self) -> NvmlFacts:
        """Driver and cards, through NVML."""
        return read_nvml()

    def libraries(self, name: str) -> tuple[str, ...]:
        """Files whose name begins with `name` in the places where the loader and torch's wheels look."""
        folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_LIBRARY_FOLDERS]
        for entry in sys.path:
            folders += [str(found) for found in sorted(Path(entry or ".").glob("nvidia/*/lib"))[:64]]
        found = [path for folder in folders if folder for path in sorted(Path(folder).glob(f"{name}*"))[:8]]
        return tuple(str(path) for path in dict.fromkeys(found))

    def loads(self, name: str) -> bool:
        """Whether the loader finds a shared library."""
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def memory(self) -> Memory:
        """Host memory."""
        found = psutil.virtual_memory()
        return Memory(found.total, found.available)

    def disk(self, path: str) -> Memory | None:
        """The file system that holds `path` or its nearest parent that exists."""
        place = Path(path).expanduser()
        for folder in (place, *place.parents):
            try:
                usage = shutil.disk_usage(folder)
            except (OSError, ValueError):
                continue
            return Memory(usage.total, usage.free)
        return None

    def open_files_limit(self) -> int:
        """Soft limit on open files, as `ulimit -n`."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def hub_answers(self) -> bool:
        """Whether the model hub can be reached."""
        return hub_answers(timeout_s=1.0)

    def fetch(self, url: str) -> Output | None:
        """HTTP status and text of a page of a server; None where none answers within two seconds."""
        if not url.startswith(("http://", "https://")):
            return None
        try:
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                return Output(answer.status, answer.read(MAX_TEXT).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            return Output(error.code, "")
        except (OSError, ValueError, HTTPException):
            return None


@dataclass(frozen=True)
class FixedMachine:
    """A machine of given answers: for tests, and to ask the doctor about a machine that is not this one."""

    system_facts: System = System("3.12.7", "2.39", "x86_64", "6.8.0")
    variables: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Output] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    torch_facts: TorchFacts | None = None
    nvml_facts: NvmlFacts = field(default_factory=lambda: NvmlFacts(reason="NVML is not installed"))
    library_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loadable: frozenset[str] = frozenset()
    host_memory: Memory = Memory(256 * 2**30, 200 * 2**30)
    disks: Mapping[str, Memory] = field(default_factory=dict)
    open_files: int = 1_048_576
    hub: bool = True
    pages: Mapping[str, Output] = field(default_factory=dict)
    read_only: frozenset[str] = frozenset()

    def system(self) -> System:
        """See `Machine.system`; so are the others."""
        return self.system_facts

    def environ(self) -> Mapping[str, str]:
        """The given variables."""
        return self.variables

    def run(self, *words: str, timeout_s: float = 2.0) -> Output | None:
        """The given output of the words joined by spaces."""
        return self.outputs.get(" ".join(words))

    def read(self, path: str) -> str | None:
        """The given text."""
        return self.files.get(path)

    def exists(self, path: str) -> bool:
        """Whether a text is given."""
        return path in self.files

    def can_write(self, folder: str) -> bool:
        """Whether it is not among the read-only ones."""
        return folder not in self.read_only

    def package(self, name: str) -> Package | None:
        """The given package."""
        return self.packages.get(name)

    def torch(self) -> TorchFacts | None:
        """The given torch."""
        return self.torch_facts

    def nvml(self) -> NvmlFacts:
        """The given cards."""
        return self.nvml_facts

    def libraries(self, name: str) -> tuple[str, ...]:
        """The given paths."""
        return self.library_paths.get(name, ())

    def loads(self, name: str) -> bool:
        """Whether it is among the loadable."""
        return name in self.loadable

    def memory(self) -> Memory:
        """The given host memory."""
        return self.host_memory

    def disk(self, path: str) -> Memory | None:
        """The given file system."""
        return self.disks.get(path)

    def open_files_limit(self) -> int:
        """The given limit."""
        return self.open_files

    def hub_answers(self) -> bool:
        """The given answer."""
        return self.hub

    def fetch(self, url: str) -> Output | None:
        """The given page."""
        return self.pages.get(url)


AnyMachine = Machine | FixedMachine
