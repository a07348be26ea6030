"""Claims about block size, caches and counters."""

from __future__ import annotations

from labkit.advice.claims.on_card import counted, measured_on
from labkit.advice.claims.verdict import Method, Verdict, burst, judged, planned, served
from labkit.measure.attention_shape import BatchShape
from labkit.measure.l2_points import UNPACKED
from labkit.measure.l2_step import simulate_step
from labkit.measure.metrics import kv_use
from labkit.memory.dtypes import ELEMENT_BYTES
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

_SMALL, _SEVEN, _CARD = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B", "A10"
_LINE_BYTES = 128


def _hit_rates(card: str, context: int = 2048, num_seqs: int = 32) -> dict[int, float]:
    model, gpu = load_model(_SMALL), load_gpu(card)
    batch = BatchShape.decode(num_seqs, context)
    return {
        size: simulate_step(model, gpu, EngineConfig(block_size=size), batch, variant=UNPACKED).l2_hit_rate
        for size in (8, 16, 32)
    }


def _measured(variant: str, name: str, title: str, factor: float = 1.0) -> dict[str, float]:
    """Rows of what was counted on a card, by block size."""
    counts = counted(_SMALL, variant, name)
    return {f"{title}, measured, block {size}": factor * value for size, value in counts.items()}


def _where() -> dict[str, str]:
    return {"measured on": measured_on("counters")} if _method() == "measured on a card" else {}


def _method() -> Method:
    return "measured on a card" if counted(_SMALL, "full", "l2_hit_rate") else "counters, simulated"


def c01() -> Verdict:
    """Block size and the L2 hit rate."""
    rates = _hit_rates(_CARD)
    spread = max(rates.values()) - min(rates.values())
    peak = (load_gpu(_CARD).mem_bandwidth_bytes_per_s or 0) / 1e9
    counts = counted(_SMALL, UNPACKED, "l2_hit_rate")
    sixteen_is_best = bool(counts) and max(counts, key=lambda size: counts[size]) == 16
    return judged(
        "C01",
        "Block size sets the L2 hit rate of paged attention; 16 is best (82, 89, 76 % for 8, 16, 32).",
        "wrong" if peak < 1180 or (spread < 0.02 and not sixteen_is_best) else "depends",
        {
            **{f"L2 hit rate, block {size}": rate for size, rate in rates.items()},
            **_measured(UNPACKED, "l2_hit_rate", "L2 hit rate, one program for each query head"),
            **_measured(UNPACKED, "dram_bytes", "MB from DRAM, the same launches", 1e-6),
            **_measured("full", "l2_hit_rate", "L2 hit rate, query heads packed"),
            **_where(), "card's peak bandwidth, GB/s": peak, "claimed bandwidth at least, GB/s": 1180,
        },
        "Decode reads each block once a step, so hits come from query heads that share a KV head and from shared "
        "prefixes: the bytes from DRAM are the same for each size, and a kernel that packs the heads hits nothing. "
        "Where the rate is lower for blocks of 8, fewer reads reach the L2, not more of them the memory. The bandwidth "
        "claimed is above what the card's memory can give.",
        _method(),
    )  # fmt: skip


def c02() -> Verdict:
    """Miss rate of 32 over 16."""
    ratios = {}
    for card in (_CARD, "H100 SXM"):
        rates = _hit_rates(card)
        low, high = sorted((1 - rates[16], 1 - rates[32]))
        ratios[card] = high / low if low else 1.0
    counts = counted(_SMALL, UNPACKED, "l2_hit_rate")
    if counts:
        low, high = sorted((1 - counts[16], 1 - counts[32]))
        ratios[f"{measured_on('counters')} (measured)"] = high / low
    return judged(
        "C02",
        "Block size 16 against 32 changes the L2 miss rate 3.2 times.",
        "wrong" if max(ratios.values()) < 1.5 else "depends",
        {f"ratio of miss rates on {card}": ratio for card, ratio in ratios.items()},
        "The same bytes are fetched whatever the block's size. Only a kernel that loads past the end of a block would "
        "turn it.",
        _method(),
    )


def c03() -> Verdict:
    """Cache lines and blocks."""
    layer = load_model(_SMALL).layers[0]
    row = layer.head_dim * ELEMENT_BYTES["bfloat16"]
    lines = {size: size * row / _LINE_BYTES for size in (8, 16, 32, 64)}
    model, gpu, batch = load_model(_SMALL), load_gpu(_CARD), BatchShape.decode(32, 2048)
    fetched = {s: simulate_step(model, gpu, EngineConfig(block_size=s), batch).dram_bytes / 1e6 for s in (16, 32)}
    counts = _measured("full", "dram_bytes", "MB fetched in one launch", 1e-6)
    whole = all(count == int(count) for count in lines.values())
    return judged(
        "C03",
        "A block must match the 128-byte cache line; block 32 spans two lines and costs 15 % of reads.",
        "wrong" if whole and abs(fetched[32] / fetched[16] - 1) < 0.02 else "depends",
        {
            "bytes of one token of one KV head": row,
            **{f"lines of a block of {size} tokens, one head": count for size, count in lines.items()},
            **{f"MB fetched in a step, block {size}": value for size, value in fetched.items()},
            **counts,
            **_where(),
        },
        "A block of any size is a whole number of lines as soon as one token's row is. It turns only for rows shorter "
        "than a line (8-bit KV with heads of 64) in blocks of an odd number of tokens.",
        _method(),
    )


def c04() -> Verdict:
    """Bytes of block tables."""
    sizes = {size: planned(_SMALL, _CARD, block_size=size, max_model_len=32768, max_num_seqs=256) for size in (8, 16)}
    shares = {s: 100 * p.breakdown.block_tables_bytes / p.breakdown.total_bytes for s, p in sizes.items()}
    return judged(
        "C04",
        "Block tables cost memory in proportion to 1/block size; at block 8 and 32,768 tokens they take 15 % of it.",
        "wrong" if shares[8] < 1 else "holds",
        {
            "block tables at block 8, % of the card": shares[8],
            "block tables at block 16, % of the card": shares[16],
            "block tables at block 8, MiB": sizes[8].breakdown.block_tables_bytes / 2**20,
            "requests at once with which they would take 15 %": 256 * 15 / shares[8],
        },
        "The proportion holds (4 bytes an entry: requests x blocks of the longest), the size does not; it turns at the "
        "number of requests shown.",
    )


def c05() -> Verdict:
    """Fragmentation by block size."""
    active = {}
    for size in (8, 16, 32, 128):
        record = served(_SMALL, _CARD, burst(64, 700, 200), block_size=size, max_model_len=4096)
        use = kv_use(record)
        active[size] = 100 * (1 - use.mean_tail_waste_share) if use else 0.0
    return judged(
        "C05",
        "Block size 8 leaves 32 % of allocated memory active, 16 gives 79 % and 2.1 times the throughput.",
        "wrong" if active[8] >= active[16] else "holds",
        {f"places that hold a token, block {size}, %": value for size, value in active.items()},
        "Only a request's last block has empty places, so smaller blocks waste less, never more; no length or load "
        "turns it. Contiguous buffers of max-model-len, which have no blocks, do leave so much empty.",
        "simulation",
    )


def c06() -> Verdict:
    """Divisibility of max-model-len."""
    plans = {length: planned(_SMALL, _CARD, max_model_len=length) for length in (8192, 8190, 8177)}
    blocks = {length: found.num_gpu_blocks for length, found in plans.items()}
    most = max(abs(count / blocks[8192] - 1) for count in blocks.values())
    return judged(
        "C06",
        "Block size should divide max-model-len.",
        "wrong" if most < 0.001 else "depends",
        {f"blocks in the pool at max-model-len {length}": count for length, count in blocks.items()},
        "The length only bounds a request; the part of its last block that is never used costs less than one block. It "
        "turns where max-model-len is itself a few blocks long.",
    )


def c28() -> Verdict:
    """Low hit rates and occupancy as a sign."""
    rates = {context: _hit_rates(_CARD, context, 64)[16] for context in (64, 512, 4096)}
    grouped = load_model(_SEVEN)
    packed = simulate_step(grouped, load_gpu(_CARD), EngineConfig(), BatchShape.decode(32, 2048)).l2_hit_rate
    measured: dict[str, float | str] = {}
    for name, title, factor in (("l2_hit_rate", "hit rate", 1.0), ("warps_active_share", "occupancy, %", 100.0),
                                ("dram_bytes_per_s", "GB/s from DRAM", 1e-9)):  # fmt: skip
        counts = counted(_SEVEN, "full", name)
        if 16 in counts:
            measured[f"{title} of that kernel, measured"] = factor * counts[16]
    return judged(
        "C28",
        "An L2 hit rate below 70 % means a misaligned block size; occupancy below 50 % a bad launch.",
        "wrong" if packed < 0.7 else "depends",
        {
            **{f"hit rate, block 16, context {context}": rate for context, rate in rates.items()},
            "hit rate of a kernel that packs query heads, block 16": packed,
            **measured,
            **_where(),
        },
        "A kernel that reads each block once hits nothing and is the fastest there is; few warps with many bytes under "
        "way keep the memory busy. It turns for kernels whose warps wait one by one.",
        _method(),
    )
