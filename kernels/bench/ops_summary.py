"""One entry for each claim about the kernels around attention: value, what it must at least be, the aim, and if met."""

from __future__ import annotations

from summary import _entry as entry
from summary import _lowest as lowest

LARGE = 4096


def _tokens(row: dict) -> int:
    return int(row["shape"].split()[0])


def _of(rows: list[dict], what: str) -> list[dict]:
    return [row for row in rows if row["what"] == what]


def _ratios(rows: list[dict], over: str) -> dict[str, float]:
    return {row["shape"]: row[over] / row["us"] for row in rows}


def _line(what: str, ratios: dict[str, float], at_least: float, aim: float) -> dict:
    value, note = lowest(ratios)
    return entry(what, value, at_least, aim, note)


def summarise(rows: list[dict]) -> list[dict]:
    """All lines, misses included; a table that has not run yet has value None."""
    lines = []
    for what in ("add_rms_norm", "silu_and_mul", "rope"):
        large = [row for row in _of(rows, what) if _tokens(row) >= LARGE]
        lines.append(_line(f"{what}, 8192 tokens, a copy's time over ours", _ratios(large, "copy_us"), 0.8, 0.95))
        lines.append(_line(f"{what}, torch's time over ours", _ratios(_of(rows, what), "torch_us"), 1.0, 2.0))
    filtered = [row for row in _of(rows, "sample") if not row["shape"].endswith("k 0, p 1.0")]
    peaked = [row for row in filtered if row["shape"].startswith("peaked")]
    flat = [row for row in filtered if row["shape"].startswith("flat")]
    awq = _of(rows, "awq")
    few = [row for row in awq if _tokens(row) <= 16]
    e4m3 = _of(rows, "few rows, e4m3")
    alone = [row for row in e4m3 if _tokens(row) == 1]
    copied = next((row["copy_gb_s"] for row in rows if "copy_gb_s" in row), None)
    written = {row["shape"]: row["gb_s"] / copied for row in _of(rows, "write_kv") if copied}
    return [
        *lines,
        _line("sampling of peaked logits, a full sort's time over ours", _ratios(peaked, "torch_us"), 5.0, 10.0),
        _line("sampling of flat logits, a full sort's time over ours", _ratios(flat, "torch_us"), 3.0, 5.0),
        _line("greedy, torch's argmax over ours", _ratios(_of(rows, "greedy"), "torch_us"), 0.8, 1.0),
        _line("one row in 16 bit, cuBLAS over ours", _ratios(_of(rows, "one row, 16 bit"), "torch_us"), 1.0, 1.2),
        _line("one row, e4m3 weights, 16-bit cuBLAS over ours", _ratios(alone, "torch_us"), 1.5, 1.8),
        _line("1 to 32 rows, e4m3 weights, torch's fp8 product over ours", _ratios(e4m3, "torch_fp8_us"), 1.0, 1.3),
        _line("KV write, 4096 tokens, 28 in a graph, share of the copy ceiling", written, 0.8, 0.9),
        _line("AWQ, 1 to 16 tokens, 16-bit cuBLAS over ours", _ratios(few, "torch_us"), 1.5, 2.5),
        _line("AWQ, any tokens, 16-bit cuBLAS over ours", _ratios(awq, "torch_us"), 0.5, 0.9),
        _line("block copy, a plain copy's time over ours", _ratios(_of(rows, "copy_blocks"), "copy_us"), 0.8, 0.95),
        _line("swap out, one plain copy's time over ours", _ratios(_of(rows, "swap_out"), "torch_us"), 0.8, 0.95),
        _line("swap in, one plain copy's time over ours", _ratios(_of(rows, "swap_in"), "torch_us"), 0.8, 0.95),
        _line(
            "matrix products alone over the same beside a swap",
            {r["what"]: r["product_us"] / r["product_beside_us"] for r in rows if "product_beside_us" in r}, 0.7, 0.9,
        ),
    ]  # fmt: skip
