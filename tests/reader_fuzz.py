"""Structure-aware mutation of files that come from outside: what a reader may do with each, and what is measured.

A target is a module in `tests/reader_targets/` with a tuple `TARGETS`. Every input follows from the run's seed, the
target's name and the input's number, so that a failure is replayed by these three.
"""

from __future__ import annotations

import importlib
import json
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError

MAX_SECONDS = 2.0
MAX_GROWTH_MIB = 200
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 4096, 65_536, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, -0.0,
    1e-320, 1e308, float("inf"), float("nan"), "", "x", "0", "-1", "9" * 60, "a" * 5000, "\x1b[31m", "\u202e", "\0",
    "../../etc", "auto", "none", [], {}, [[]], [0], [None], ["x"], [1] * 9000, {"a": {}}, {"rope_type": "yarn"},
    {"full_attention": []},
)  # fmt: skip


@dataclass(frozen=True)
class ReaderTarget:
    """One reader.

    Attributes:
        name: of the target, in records and for replay.
        make: from a random generator to the bytes of one mutated file.
        read: reads such a file from a path; labkit's own errors are the only ones allowed.
        suffix: of the file's name.
    """

    name: str
    make: Callable[[random.Random], bytes]
    read: Callable[[Path], object]
    suffix: str


@dataclass
class Outcome:
    """What happened to the inputs of one target."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    largest_growth_mib: float = 0.0
    cpu_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


def find_targets() -> list[ReaderTarget]:
    """Every target of every module in `tests/reader_targets/`."""
    names = sorted(path.stem for path in (Path(__file__).parent / "reader_targets").glob("[a-z]*.py"))
    return [target for name in names for target in importlib.import_module(f"tests.reader_targets.{name}").TARGETS]


def run_target(target: ReaderTarget, count: int, seed: int, folder: Path, first: int = 0) -> Outcome:
    """Reads `count` inputs, from number `first` on; a failure is recorded and the run goes on."""
    outcome = Outcome()
    path = folder / f"input{target.suffix}"
    started = time.process_time()
    for number in range(first, first + count):
        data = target.make(random.Random(f"{seed} {target.name} {number}"))
        path.write_bytes(data)
        problem = _read_once(target, path, outcome)
        if problem:
            outcome.failures.append({"target": target.name, "seed": seed, "number": number, "problem": problem})
    outcome.cpu_s = round(time.process_time() - started, 2)
    return outcome


def _read_once(target: ReaderTarget, path: Path, outcome: Outcome) -> str:
    """Reads one input; "" or what went wrong. CPU time is measured: other load on the machine does not count."""
    outcome.inputs += 1
    before, start = _peak_mib(), time.process_time()
    problem = ""
    try:
        target.read(path)
        outcome.accepted += 1
    except LabkitError as error:
        outcome.refused += 1
        problem = "the message is longer than 2,000 characters" if len(str(error)) > 2000 else ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A panic of a native library is a BaseException; whatever is not labkit's own error is a failure.
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    seconds, growth = time.process_time() - start, _peak_mib() - before
    outcome.slowest_s = max(outcome.slowest_s, round(seconds, 4))
    outcome.largest_growth_mib = max(outcome.largest_growth_mib, round(growth, 1))
    if seconds > MAX_SECONDS:
        problem = problem or f"took {seconds:.1f} s of CPU time"
    if growth > MAX_GROWTH_MIB:
        problem = problem or f"memory grew by {growth:.0f} MiB"
    return problem


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """1 to 3 changes of bytes: flip, delete, double, truncate, insert."""
    image = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not image:
            return bytes([rng.randrange(256)])
        place = rng.randrange(len(image))
        kind = rng.randrange(5)
        if kind == 0:
            image[place] = rng.randrange(256)
        elif kind == 1:
            del image[place : place + rng.randint(1, 16)]
        elif kind == 2:
            image[place:place] = image[place : place + rng.randint(1, 64)]
        elif kind == 3:
            del image[place:]
        else:
            image[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
    return bytes(image)


def mutate_json(value: Any, rng: random.Random, names: tuple[str, ...] = ()) -> Any:
    """A copy of `value` in which one randomly chosen place is deleted, replaced, renamed, wrapped or added.

    Args:
        value: a JSON value.
        rng: where chance comes from.
        names: keys that may be added, besides those that are there.
    """
    copied = json.loads(json.dumps(value))
    places = list(_places(copied))
    if not places:
        return rng.choice(ODD_VALUES)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = [holder[key]] * rng.choice((1, 2, 50))
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(names) if names else f"{key}_"] = holder.pop(key)
    elif kind == 3 and isinstance(holder, dict) and names:
        holder[rng.choice(names)] = rng.choice(ODD_VALUES)
    elif kind == 4:
        other, other_key = rng.choice(places)
        holder[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else None))
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return copied


def _places(value: Any):
    if isinstance(value, dict):
        for key, entry in value.items():
            yield value, key
            yield from _places(entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value[:20]):
            yield value, index
            yield from _places(entry)
