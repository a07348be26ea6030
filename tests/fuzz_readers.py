"""Mutation of reader inputs at length: `python tests/fuzz_readers.py --count 300000 --seed 1`.

Records to `results/reader-fuzz.json`. `--target NAME --first N --count 1` replays one input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labkit.results import at_least, at_most, write_results  # noqa: E402
from tests.reader_fuzz import MAX_GROWTH_MIB, MAX_SECONDS, find_targets, run_target  # noqa: E402

RECORD = ROOT / "results" / "reader-fuzz.json"


def main() -> int:
    """Runs, prints one line a target and records; 1 when any input failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="inputs in all, shared evenly by the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each target")
    parser.add_argument("--target", help="only the target of this name")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    targets = [target for target in find_targets() if options.target in (None, target.name)]
    if not targets:
        parser.error(f"no target is called {options.target}")
    each = max(1, options.count // len(targets))
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            outcome = run_target(target, each, options.seed, Path(folder), options.first)
            outcomes[target.name] = asdict(outcome)
            print(target.name, json.dumps(outcomes[target.name]), flush=True)
    if not options.no_record:
        _record(options.seed, outcomes)
    return int(any(entry["failures"] for entry in outcomes.values()))


def _record(seed: int, outcomes: dict) -> None:
    """Add this run to the record; the summary is over all runs in it."""
    runs = json.loads(RECORD.read_text())["rows"] if RECORD.is_file() else []
    failures = sum(len(entry["failures"]) for entry in outcomes.values())
    inputs = sum(entry["inputs"] for entry in outcomes.values())
    runs.append({"seed": seed, "inputs": inputs, "failures": failures, "targets": outcomes})
    targets = [entry for run in runs for entry in run["targets"].values()]
    write_results(
        RECORD,
        command=f"python tests/fuzz_readers.py --count {inputs} --seed {seed}",
        rows=runs,
        summary={
            "inputs": at_least(sum(run["inputs"] for run in runs), 1_000_000),
            "failures (anything but a LabkitError)": at_most(sum(run["failures"] for run in runs), 0),
            "slowest input, CPU [s]": at_most(max(entry["slowest_s"] for entry in targets), MAX_SECONDS),
            "largest growth [MiB]": at_most(max(entry["largest_growth_mib"] for entry in targets), MAX_GROWTH_MIB),
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
