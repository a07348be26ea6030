"""One entry for each line of the performance table: value, what it must at least be, the aim, and whether it is met."""

from __future__ import annotations

import math

GIGABYTE = 1e9
LARGE_WRITE, LARGE_ALONE = 4096, 32768
SMALL = ("1x1024", "1x4096", "1x32768", "1x65536", "16x1024")


def _entry(what: str, value: float | None, at_least: float, aim: float, note: str = "") -> dict:
    ok = value is not None and value >= at_least
    shown = None if value is None else round(value, 4)
    return {"what": what, "value": shown, "at_least": at_least, "aim": aim, "ok": ok, "note": note}


def _geomean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _flashinfer_us(row: dict) -> float:
    return min(row.get("flashinfer_tc_us", math.inf), row.get("flashinfer_cuda_us", math.inf))


def _peer_ratios(rows: list[dict], *names: str) -> dict[str, float]:
    """Best peer's time over ours, for each row where a peer ran."""
    ratios = {}
    for row in rows:
        times = [_flashinfer_us(row) if name == "flashinfer" else row.get(f"{name}_us", math.inf) for name in names]
        if min(times) < math.inf:
            ratios[f"{row['shape']} block {row.get('block_size', 16)}"] = min(times) / row["us"]
    return ratios


def _lowest(ratios: dict[str, float]) -> tuple[float | None, str]:
    if not ratios:
        return None, "no peer ran"
    name = min(ratios, key=ratios.__getitem__)
    return ratios[name], f"lowest: {name}"


def _decode_lines(rows: list[dict], read_gb_s: float) -> list[dict]:
    bf16 = [row for row in rows if row["kv"] == "bf16"]
    fp8 = [row for row in rows if row["kv"] == "fp8"]
    best = _peer_ratios(bf16, "fa3", "flashinfer")
    lowest, note = _lowest(best)
    large = {f"{r['shape']} block {r['block_size']}": r["gb_s"] / read_gb_s for r in bf16 if r["kv_bytes"] >= GIGABYTE}
    large_value, large_note = _lowest(large)
    same_value, same_note = _lowest(
        {
            f"{r['shape']} block {r['block_size']}": r["read_of_same_bytes_us"] / r["beside_read_us"]
            for r in bf16
            if "read_of_same_bytes_us" in r
        }
    )
    ours = {(r["shape"], r["block_size"]): r["us"] for r in fp8}
    halves = {
        f"{r['shape']} block {r['block_size']}": r["us"] / ours[r["shape"], r["block_size"]]
        for r in bf16
        if r["kv_bytes"] >= GIGABYTE and (r["shape"], r["block_size"]) in ours
    }
    half_value, half_note = _lowest(halves)
    small = _peer_ratios([r for r in bf16 if r["shape"] in SMALL], "fa3")
    small_value, small_note = _lowest(small)
    fa3_fp8 = _geomean([*_peer_ratios(fp8, "fa3").values()])
    return [
        _entry("decode bf16, every row, against the better of FA3 and FlashInfer", lowest, 0.95, 1.05, note),
        _entry("decode bf16, geometric mean, against the better of both", _geomean([*best.values()]), 1.0, 1.05),
        _entry("decode bf16 at 1 GB of KV or more, share of the read ceiling", large_value, 0.92, 0.95, large_note),
        _entry("decode bf16 at 1 GB of KV or more, against a read of as many bytes", same_value, 0.92, 0.95, same_note),
        _entry("decode fp8 against FA3 fp8, geometric mean", fa3_fp8, 1.25, 1.45),
        _entry(
            "decode fp8 against FlashInfer fp8, geometric mean",
            _geomean([*_peer_ratios(fp8, "flashinfer").values()]), 1.25, 1.45,
        ),
        _entry("decode fp8 against our bf16 at 1 GB or more", half_value, 1.6, 1.9, half_note),
        _entry("decode 1 x 32768 and other small batches against FA3, lowest", small_value, 1.0, 1.2, small_note),
        _entry("small batches against FA3, geometric mean", _geomean([*small.values()]), 1.0, 1.2),
    ]  # fmt: skip


def _block_size_line(rows: list[dict]) -> dict:
    times = {(r["shape"], r["kv"], r["block_size"]): r["us"] for r in rows}
    losses = {
        f"{shape} {kv}": times[shape, kv, 128] / us
        for (shape, kv, block_size), us in times.items()
        if block_size == 16 and (shape, kv, 128) in times
    }
    value, note = _lowest(losses)
    return _entry("block size 16 against 128, time of 128 over time of 16", value, 0.97, 1.0, note)


def vllm_lines(decode: list[dict], prefill: list[dict]) -> list[dict]:
    """Rows against vLLM's own Triton kernels."""
    against = _peer_ratios(decode, "vllm_triton")
    lowest, note = _lowest(against)
    prefill_lowest, prefill_note = _lowest(_peer_ratios(prefill, "vllm_triton"))
    return [
        _entry("prefill against vLLM's Triton kernel, lowest", prefill_lowest, 5.0, 7.0, prefill_note),
        _entry("decode against vLLM's Triton kernel, every row", lowest, 1.08, 1.1, note),
        _entry("decode against vLLM's Triton kernel, geometric mean", _geomean([*against.values()]), 1.4, 1.6),
    ]


def earlier_vllm_lines(rows: list[dict]) -> list[dict]:
    """The same where vLLM ran in an earlier run: a row's `earlier` has its time and FlashAttention-3's of then."""
    through = [
        row | {"vllm_triton_us": row["earlier"]["vllm_triton_us"] * row["fa3_us"] / row["earlier"]["fa3_us"]}
        for row in rows
        if "earlier" in row
    ]
    decode = [row for row in through if row["table"] == "decode" and row["kv"] == "bf16"]
    lines = vllm_lines(decode, [row for row in through if row["table"] == "prefill"])
    return [line | {"what": f"{line['what']}, through FA3 in both runs"} for line in lines]


def _shared_lines(rows: list[dict]) -> list[dict]:
    """The first row is the table's; longer prefixes and larger batches follow it."""
    ratios = {row["shape"]: row["plain_us"] / row["us"] for row in rows}
    clean = [row["clean_plain_us"] / row["clean_us"] for row in rows]
    first, others = [*ratios.values()][:1], dict([*ratios.items()][1:])
    value, note = _lowest(others) if others else (None, "not run")
    return [
        _entry("shared prefix against our plain decode", min(first, default=None), 4.0, 8.0),
        _entry(
            "shared prefix against our plain decode, L2 with nothing to write back",
            min(clean[:1], default=None), 4.0, 8.0,
        ),
        _entry("shared prefix against our plain decode, longer or for more sequences, lowest", value, 4.0, 8.0, note),
    ]  # fmt: skip


def _write_lines(rows: list[dict], copy_gb_s: float) -> list[dict]:
    """A write alone is held against the ceiling only where the 5 µs of a graph replay are little beside it: those are
    half of the time of 4,096 tokens, and a copy of as many bytes comes to half of the ceiling there too."""
    named = {f"{r['tokens']} tokens {r['kv']}": r for r in rows if r["tokens"] >= LARGE_WRITE}
    alone = {name: r["gb_s"] / copy_gb_s for name, r in named.items() if r["tokens"] >= LARGE_ALONE}
    copies = {name: r["copy_of_same_bytes_us"] / r["us"] for name, r in named.items()}
    layers = {name: r for name, r in named.items() if "layer_us" in r}
    shares = {name: r["layer_gb_s"] / copy_gb_s for name, r in layers.items()}
    layer_copies = {name: r["layer_copy_us"] / r["layer_us"] for name, r in layers.items()}
    lines = (
        (f"KV write of {LARGE_ALONE} tokens alone, share of the copy ceiling", alone),
        (f"KV write of {LARGE_WRITE} tokens or more, against a copy of as many bytes", copies),
        ("KV write, 28 layers in a graph, share of the copy ceiling", shares),
        ("KV write, 28 layers in a graph, against as many copies", layer_copies),
    )
    entries = []
    for what, ratios in lines:
        value, note = _lowest(ratios)
        entries.append(_entry(what, value, 0.8, 0.9, note))
    return entries


def summarise(rows: list[dict]) -> list[dict]:
    """All lines, misses included."""
    tables: dict[str, list[dict]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    decode, prefill = tables.get("decode", []), tables.get("prefill", [])
    ceilings = tables["ceilings"][0]
    prefill_value, prefill_note = _lowest(_peer_ratios(prefill, "fa3"))
    against_vllm = vllm_lines([r for r in decode if r["kv"] == "bf16"], prefill)
    if any("earlier" in row for row in rows) and not any("vllm_triton_us" in row for row in rows):
        against_vllm = earlier_vllm_lines(rows)
    return [
        *_decode_lines(decode, ceilings["read_gb_s"]),
        _block_size_line(decode),
        _entry("prefill and chunks against FA3, lowest", prefill_value, 0.70, 0.85, prefill_note),
        *against_vllm,
        *_write_lines(tables.get("kv_write", []), ceilings["copy_gb_s"]),
        *_shared_lines(tables.get("shared_prefix", [])),
    ]


def by_name(entries: list[dict]) -> dict[str, dict]:
    """Entries as results files keep them: what was measured → its value and bars."""
    return {entry["what"]: {key: value for key, value in entry.items() if key != "what"} for entry in entries}
