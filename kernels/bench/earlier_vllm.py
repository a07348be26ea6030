"""Sets vLLM's times of an earlier run beside a run without vLLM. usage: earlier_vllm.py RUN.json EARLIER.json

FlashAttention-3 ran in both, so a row's ratio to vLLM is (vLLM / FA3 then) · (FA3 / ours now): what the card did
otherwise in the two runs cancels. RUN.json gets the earlier times in its rows and lines of their own in its summary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from summary import by_name, earlier_vllm_lines, vllm_lines

KEYS = ("table", "shape", "kv", "block_size")


def _key(row: dict) -> tuple:
    return tuple(row.get(key) for key in KEYS)


def add_earlier(run: dict, earlier: dict) -> dict:
    """`run` with the earlier times and the lines made from them; rows that the earlier run lacks stay as they are."""
    then = {_key(row): row for row in earlier["rows"] if "vllm_triton_us" in row and "fa3_us" in row}
    for row in run["rows"]:
        old = then.get(_key(row))
        if old and "fa3_us" in row:
            row["earlier"] = {"vllm_triton_us": old["vllm_triton_us"], "fa3_us": old["fa3_us"]}
    named = by_name(earlier_vllm_lines(run["rows"]))
    missing = {line["what"] for line in vllm_lines([], [])}
    summary = {name: entry for name, entry in run["summary"].items() if name not in missing} | named
    command = f"{run['command']}; python3 kernels/bench/earlier_vllm.py results/kernels.json EARLIER.json"
    return run | {"command": command, "summary": summary, "vllm_triton_from": earlier["made"]}


def main() -> None:
    """Reads both, writes the first."""
    run, earlier = (json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3])
    result = add_earlier(run, earlier)
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, entry in result["summary"].items():
        print(name, json.dumps(entry))


if __name__ == "__main__":
    main()
