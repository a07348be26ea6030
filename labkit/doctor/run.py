"""`labkit doctor`: which examinations one call makes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from labkit.doctor.accelerator import accelerator_checks
from labkit.doctor.check import Check, Examination, joined
from labkit.doctor.environment import environment_checks
from labkit.doctor.error_text import explain_error_text
from labkit.doctor.machine import AnyMachine, Machine
from labkit.doctor.model_folder import examine_folder
from labkit.doctor.tokenizer_files import write_missing
from labkit.doctor.true_test import run_true_test
from labkit.doctor.which_vllm import check_wanted, find_vllm
from labkit.errors import FileFormatError, OutOfRangeError
from labkit.text import plain

MAX_ERROR_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Request:
    """What to examine; with nothing chosen, environment, cards and the true test.

    Attributes:
        which_vllm: name the releases whose wheels run here.
        model_folder: a folder or .gguf file to look through.
        write_missing: write a minimal tokenizer_config.json there if it has none.
        error_text: a line, a log, the path of a log, or "-" for standard input.
        true_test: compute something as well, in the examination of the environment.
        wanted: a vLLM release that is wanted here, such as "0.33"; None for none in particular.
    """

    which_vllm: bool = False
    model_folder: str | None = None
    write_missing: bool = False
    error_text: str | None = None
    true_test: bool = True
    wanted: str | None = None

    @property
    def is_general(self) -> bool:
        """Nothing was chosen."""
        return not self.which_vllm and self.model_folder is None and self.error_text is None


def examine(machine: AnyMachine | None = None, *, test: bool = True) -> Examination:
    """Environment, cards and the true test of this machine; nothing is changed.

    Args:
        machine: what to look at; this machine by default.
        test: compute as well: paged attention, the pool, a copy.
    """
    machine = machine or Machine()
    checks = [*environment_checks(machine), *accelerator_checks(machine), *(run_true_test() if test else ())]
    return Examination("this machine", tuple(checks))


def doctor(request: Request, machine: AnyMachine | None = None) -> Examination:
    """All that `request` names, as one examination.

    Raises:
        OutOfRangeError: `write_missing` without a folder.
        FileFormatError: `write_missing` without a readable tokenizer.json, or a log over 64 MiB.
    """
    if request.write_missing and request.model_folder is None:
        raise OutOfRangeError("nothing says where to write", needed="a model folder", knob="--model-folder")
    machine = machine or Machine()
    parts = []
    if request.wanted is not None:
        parts.append(Examination(f"vLLM {plain(request.wanted, 40)}", (check_wanted(machine, request.wanted),)))
    if request.is_general:
        parts.append(examine(machine, test=request.true_test))
    if request.which_vllm:
        parts.append(find_vllm(machine))
    if request.model_folder is not None:
        if request.write_missing:
            parts.append(_written(request.model_folder))
        parts.append(examine_folder(request.model_folder))
    if request.error_text is not None:
        parts.append(explain_error_text(read_error_text(request.error_text)))
    return parts[0] if len(parts) == 1 else joined(" and ".join(part.title for part in parts), parts)


def _written(folder: str) -> Examination:
    written = write_missing(folder)
    if written is None:
        return Examination(
            "write missing", (Check("written", "ok", "tokenizer_config.json is there: nothing written"),)
        )
    check = Check("written", "ok", f"{plain(written.path, 300)} written; assumed: {'; '.join(written.assumed)}")
    return Examination("write missing", (check,), {"written": str(written.path), "assumed": list(written.assumed)})


def read_error_text(given: str) -> str:
    """The text itself, the content of the file that it names, or standard input for "-".

    Raises:
        FileFormatError: a file that is not readable or over 64 MiB.
    """
    if given == "-":
        return sys.stdin.read(MAX_ERROR_BYTES)
    if len(given) > 4096 or "\n" in given or not os.path.isfile(given):
        return given
    try:
        with open(given, "rb") as file:
            data = file.read(MAX_ERROR_BYTES + 1)
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(given)}: {error.strerror or error}", works="a log") from error
    if len(data) > MAX_ERROR_BYTES:
        raise FileFormatError(f"{plain(given)} is too long for a log", needed="at most 64 MiB")
    return data.decode("utf-8", "replace")
