"""Compiling a kernel for any architecture without a card: registers, spills, shared memory, matrix instructions.

`record_launch` runs a wrapper with its kernel replaced by a recorder, so what is compiled is what would be launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: triton.JITFunction
    arguments: dict[str, object]
    options: dict[str, object]


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made: registers of a thread, spilled bytes, shared memory bytes, counts of instructions."""

    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    wgmma: int
    mma: int
    async_copies: int
    wide_async_copies: int
    byte_shared_loads: int
    wide_loads: int
    wide_stores: int
    double_precision: int
    longest_loop: int


class _Recorder:
    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        def record(*args, **options):
            names = self.kernel.arg_names
            arguments = dict(zip(names, args, strict=False))
            arguments |= {name: value for name, value in options.items() if name in names}
            chosen = {name: value for name, value in options.items() if name in LAUNCH_OPTIONS}
            self.launches.append(Launch(self.kernel, arguments, chosen))

        return record


def record_launch(module: ModuleType, kernel_name: str, call: Callable[[], object]) -> Launch:
    """The last launch of `module.kernel_name` during `call()`; nothing runs."""
    recorder = _Recorder(getattr(module, kernel_name))
    with patch.object(module, kernel_name, recorder):
        call()
    return recorder.launches[-1]


def _signature(launch: Launch) -> tuple[dict, dict, dict]:
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _disassemble(cubin: bytes, options: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, options, file.name], capture_output=True, text=True, check=True).stdout


def _longest_loop(lines: list[str]) -> int:
    """Instructions of the longest stretch that a branch goes back over; each takes 16 bytes."""
    longest = 0
    for line in lines:
        here = int(line.split("/*", 1)[1].split("*/", 1)[0], 16)
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)
        if target and int(target[1], 16) < here:
            longest = max(longest, (here - int(target[1], 16)) // 16)
    return longest


def compile_report(launch: Launch, arch: int) -> CompileReport:
    """Compiles a recorded launch for compute capability `arch` (90 = 9.0) and reads the machine code."""
    signature, constants, attributes = _signature(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    sass = _disassemble(compiled.asm["cubin"], "-sass")
    usage = _disassemble(compiled.asm["cubin"], "-res-usage")
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    lines = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]

    def count(pattern: str) -> int:
        return sum(1 for line in lines if re.search(pattern, line))

    return CompileReport(
        arch=arch,
        registers=numbers.get("REG", 0),
        spill_bytes=max(numbers.get("STACK", 0), numbers.get("LOCAL", 0)) if count(r"\b(LDL|STL)\b") else 0,
        shared_bytes=compiled.metadata.shared,
        instructions=len(lines),
        wgmma=count(r"\bHGMMA\b"),
        mma=count(r"\bHMMA\b"),
        async_copies=count(r"\bLDGSTS\b"),
        wide_async_copies=count(r"\bLDGSTS\.\S*128"),
        byte_shared_loads=count(r"\bLDS\.[US]8\b"),
        wide_loads=count(r"\bLDG\.\S*128"),
        wide_stores=count(r"\bSTG\.\S*128"),
        double_precision=count(r"\b(DADD|DMUL|DFMA|DSETP)\b|\.F64\b"),
        longest_loop=_longest_loop(lines),
    )
