"""The simulated launches have the hit rates that arithmetic gives and that counters of an H200 showed."""

import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import FileFormatError, OutOfRangeError, UnknownNameError, UnsupportedError
from labkit.measure.attention_launch import build_launches
from labkit.measure.attention_shape import VARIANTS, AttentionShape, BatchShape
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_points import points
from labkit.measure.l2_simulator import access_trace, simulate_attention, start_steps
from labkit.measure.roofline import Ceilings, card_ceilings, roofline
from labkit.specs.gpu_catalogue import catalogue_gpu, cpu_gpu
from labkit.specs.gpu_spec import GpuSpec

H200 = catalogue_gpu("H200")
ROOT = Path(__file__).parents[2]
UNPACKED = "one program for each query head"


# One cache, nothing before it: what arithmetic speaks of.
PLAIN = L2Calibration(0.5, 16)


def hit(batch, variant="full", gpu=H200, calibration=PLAIN, **shape):
    return simulate_attention(AttentionShape(batch, **shape), gpu, variant, calibration=calibration).counters


@pytest.mark.parametrize(("block_size", "measured"), [(8, 0.006), (16, 0.007), (32, 0.009), (64, 0.007), (128, 0.0065)])
def test_decode_as_counted_on_an_h200(block_size, measured):
    """ncu, one program for each sequence and KV head, tile = block, 64 × 4096, 8 KV heads, bf16: 1.074 GB read."""
    counters = hit(BatchShape.decode(64, 4096), "tile = block", block_size=block_size)
    assert counters.l2_hit_rate == pytest.approx(measured, abs=0.01)
    assert counters.dram_bytes == pytest.approx(1.074e9, rel=0.001)
    assert counters.method.startswith("simulated")


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("fp8", 1)])
def test_without_sharing_every_byte_is_read_once(block_size, dtype, element):
    counters = hit(BatchShape.decode(64, 4096), block_size=block_size, kv_cache_dtype=dtype)
    queries = 64 * 32 * 128 * 2
    assert counters.dram_bytes == 64 * 4096 * 8 * 128 * 2 * element + queries
    assert counters.l2_hit_rate < 0.01


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_group_of_programs_hits_all_but_once(group):
    counters = hit(BatchShape.decode(64, 4096), UNPACKED, num_heads=8 * group)
    assert counters.l2_hit_rate == pytest.approx(1 - 1 / group, abs=0.01)


@pytest.mark.parametrize("num_seqs", [2, 8, 64])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_shared_prefix_is_read_once(num_seqs, share):
    shared = int(4096 * share)
    counters = hit(BatchShape.decode(num_seqs, 4096, shared))
    assert counters.l2_hit_rate == pytest.approx(share * (num_seqs - 1) / num_seqs, abs=0.03)


def test_the_prefix_kernel_asks_less_and_reads_the_same():
    batch = BatchShape.decode(32, 8704, 8192)
    shape = AttentionShape(batch)
    plain, cascade = (simulate_attention(shape, H200, variant) for variant in ("full", "shared prefix"))
    assert plain.counters.dram_bytes == pytest.approx(cascade.counters.dram_bytes, rel=0.02)
    assert plain.asked_bytes == pytest.approx(32 * 8704 * 8 * 512, rel=0.01)
    assert cascade.asked_bytes < 0.15 * plain.asked_bytes


def test_a_prefix_that_does_not_fit_is_read_again():
    """One sequence at a time on a card of 8 programs: its prefix of 16 MB comes back only where the L2 holds it."""
    exact = L2Calibration(ways=None)
    cards = [
        GpuSpec("c", 1, mem_bandwidth_bytes_per_s=1e12, l2_bytes=size, sm_count=4, compute_capability="8.9")
        for size in (2**22, 2**26)
    ]
    small, large = (
        simulate_attention(
            AttentionShape(BatchShape.decode(4, 4096, 4096)), card, "no split", calibration=exact, programs_per_sm=2
        ).counters
        for card in cards
    )
    assert small.l2_hit_rate == pytest.approx(0, abs=0.01)
    assert large.l2_hit_rate == pytest.approx(3 / 4, abs=0.01)


def test_prefill_hits_by_the_query_blocks_that_run_at_once():
    """One head, 1,024 tokens in 8 row blocks of 128: all run at once and walk the same keys."""
    counters = hit(BatchShape((16384,), (1024,)), "prefill", num_heads=1, num_kv_heads=1)
    queries = 1024 * 128 * 2
    assert counters.dram_bytes == pytest.approx(16384 * 512 + queries, rel=0.01)
    assert counters.l2_hit_rate == pytest.approx(1 - 1 / 8, abs=0.04)


def test_prefill_is_bound_by_arithmetic_decode_by_memory():
    decode = simulate_attention(AttentionShape(BatchShape.decode(64, 4096)), H200).roofline
    prefill = simulate_attention(AttentionShape(BatchShape((16384,), (8192,))), H200, "prefill").roofline
    assert (decode.bound, prefill.bound) == ("memory", "arithmetic")
    assert decode.floor_s == pytest.approx(238e-6, rel=0.01)
    pairs = 8192 * 8192 + 8192 * 8193 / 2
    assert prefill.flops == 4 * 128 * 32 * pairs


def test_a_window_is_all_that_is_read():
    counters = hit(BatchShape.decode(16, 8192), window=1024)
    assert counters.dram_bytes == pytest.approx(16 * 1024 * 8 * 512, rel=0.07)


def test_a_tile_over_the_end_of_the_prefix_is_partly_shared():
    """96 of 100 shared tokens are whole blocks of 16; tiles have 64 tokens."""
    counters = hit(BatchShape.decode(64, 160, 100))
    assert counters.dram_bytes == pytest.approx((96 + 64 * 64) * 8 * 512 + 64 * 32 * 128 * 2, rel=1e-5)


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=9), st.sampled_from([1, 4, 16, 256]), st.integers(0, 700),
    st.sampled_from(["full", UNPACKED, "no split"]),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_bytes_add_up(lens, block_size, shared, variant):
    """Programs cover every key of every head once a program, and a cache that holds all reads each byte once."""
    shape = AttentionShape(BatchShape(tuple(lens), (1,) * len(lens), shared), block_size=block_size)
    launches = build_launches(shape, H200, variant)
    trace = access_trace(shape, launches, 132)
    copies = shape.group if variant == UNPACKED else 1
    assert trace.asked_bytes == sum(lens) * 8 * 512 * copies
    endless = GpuSpec("e", 1, mem_bandwidth_bytes_per_s=1e12, l2_bytes=2**40, sm_count=8, compute_capability="9.0")
    prediction = simulate_attention(shape, endless, variant)
    assert prediction.counters.dram_bytes == shape.kv_bytes + launches[0].query_bytes[1]


def test_a_long_trace_takes_tiles_together_and_says_the_same():
    shape = AttentionShape(BatchShape.decode(16, 2048, 500), num_heads=64)
    launches = build_launches(shape, H200, UNPACKED)
    fine, coarse = access_trace(shape, launches, 132), access_trace(shape, launches, 132, 2000)
    assert len(coarse.names) < 0.5 * len(fine.names)
    assert coarse.asked_bytes == fine.asked_bytes


def test_launch_order_is_the_kernels():
    """paged_decode: item then query head; paged_prefill: row block from the last, KV head, split outermost."""
    shape = AttentionShape(BatchShape((512, 256), (1, 1)), num_heads=4, num_kv_heads=2)
    (decode,) = build_launches(shape, H200, UNPACKED)
    assert decode.kv_head.tolist()[:8] == [0, 0, 1, 1] * 2
    assert decode.sequence.tolist()[:8] == [0] * 4 + [1] * 4
    rows = AttentionShape(BatchShape((64, 32), (64, 32)), num_heads=8, num_kv_heads=2)
    (prefill,) = build_launches(rows, H200, "prefill")
    assert prefill.sequence.tolist()[:3] == [1, 0, 0]
    assert prefill.end.tolist()[:3] == [32, 64, 32]
    assert prefill.kv_head.tolist()[:6] == [0, 0, 0, 1, 1, 1]
    (split,) = build_launches(AttentionShape(BatchShape((8192,), (16,)), num_heads=8, num_kv_heads=2), H200, "prefill")
    assert split.start.tolist()[:2] == [0, 0]
    assert split.start.tolist()[2] == split.end.tolist()[0]
    # A partial result is a row of float32 values and their log-sum-exp, for each of 16 tokens and 8 query heads.
    assert (prefill.merge_bytes, split.merge_bytes) == (0, len(split.start) // 2 * 16 * 8 * (128 + 1) * 4)


def test_places_are_taken_as_they_become_free():
    assert start_steps(np.array([5, 2, 2, 9, 1]), 2).tolist() == [0, 0, 2, 4, 5]
    assert start_steps(np.array([3, 3, 3, 3, 3]), 2).tolist() == [0, 0, 3, 3, 6]
    assert start_steps(np.array([7]), 2).tolist() == [0]
    assert start_steps(np.array([], dtype=np.int64), 2).tolist() == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("card", ["A10", "A100-80GB", "L4", "L40S", "H100 SXM", "RTX 4090", "H200", "B200", "T4"])
def test_every_variant_on_every_card(variant, card):
    batch = BatchShape((600,) * 4, (64 if variant == "prefill" else 1,) * 4, 512)
    prediction = simulate_attention(AttentionShape(batch), catalogue_gpu(card), variant)
    assert 0 <= prediction.counters.l2_hit_rate < 1
    assert prediction.counters.dram_bytes >= prediction.kv_bytes


def test_a_decode_step_is_simulated_in_time():
    """64 × 4096 within 0.2 s of one core, in the worst variants."""
    shape = AttentionShape(BatchShape.decode(64, 4096), num_heads=64, block_size=8)
    simulate_attention(shape, H200)
    for variant in ("full", "tile = block", UNPACKED):
        spent = []
        for _ in range(3):
            begin = time.process_time()
            simulate_attention(shape, H200, variant)
            spent.append(time.process_time() - begin)
        assert min(spent) < 0.2


def test_what_cannot_be_simulated_is_said():
    shape = AttentionShape(BatchShape.decode(2, 64))
    with pytest.raises(UnsupportedError, match="L2"):
        simulate_attention(shape, cpu_gpu())
    with pytest.raises(UnknownNameError, match="variant"):
        simulate_attention(shape, H200, "ful")
    with pytest.raises(OutOfRangeError, match="query tokens"):
        simulate_attention(AttentionShape(BatchShape((64,), (9,))), H200)
    with pytest.raises(OutOfRangeError, match="shared"):
        simulate_attention(shape, H200, "shared prefix")
    with pytest.raises(OutOfRangeError, match="divide"):
        AttentionShape(BatchShape.decode(2, 64), num_heads=30)
    for change in ({"block_size": 0}, {"block_size": 257}, {"head_dim": True}, {"window": 0}):
        with pytest.raises(OutOfRangeError):
            AttentionShape(BatchShape.decode(2, 64), **change)
    with pytest.raises(OutOfRangeError, match="max_model_len"):
        AttentionShape(BatchShape((64, 2**20 + 1), (1, 1)))


def test_calibration_of_a_card_is_found_and_read_strictly(tmp_path):
    assert load_l2_calibration(H200).read_bandwidth_share == pytest.approx(4516 / 4800, abs=0.001)
    assert load_l2_calibration(catalogue_gpu("H100 SXM")).capacity_share == 0.5
    assert load_l2_calibration(catalogue_gpu("L4")).capacity_share == 1
    path = tmp_path / "c.json"
    path.write_text('{"cards": {"H200": {"capacity_share": 0.7, "ways": null, "calibrated": true}}}')
    assert load_l2_calibration(H200, path) == L2Calibration(0.7, None, calibrated=True)
    for broken in ("", "[]", "{", '{"cards": []}', '{"cards": {"H200": 3}}', "[" * 100_000):
        path.write_text(broken)
        with pytest.raises(FileFormatError):
            load_l2_calibration(H200, path)
    for value in ("0", "1.1", "true", '"1"', "NaN"):
        path.write_text(f'{{"cards": {{"H200": {{"capacity_share": {value}}}}}}}')
        with pytest.raises(OutOfRangeError):
            load_l2_calibration(H200, path)
    with pytest.raises(FileFormatError):
        load_l2_calibration(H200, tmp_path / "none.json")


def test_roofline_by_hand():
    ceilings = Ceilings(1e12, 1e14, "by hand")
    memory = roofline(2e9, 1e9, ceilings, time_s=4e-3)
    assert (memory.bound, memory.floor_s, memory.share_reached, memory.intensity) == ("memory", 2e-3, 0.5, 0.5)
    compute = roofline(1e6, 1e11, ceilings)
    assert (compute.bound, compute.floor_s, compute.dram_bytes_per_s) == ("arithmetic", 1e-3, 1e9)
    assert roofline(0, 0, ceilings).intensity is None
    assert roofline(5, 7, Ceilings(1.0, None, "x")).floor_s == 5
    for bad in ((-1, 0, None), (0, -1, None), (1, 1, 0)):
        with pytest.raises(OutOfRangeError):
            roofline(bad[0], bad[1], ceilings, bad[2])
    with pytest.raises(UnsupportedError):
        card_ceilings(cpu_gpu())


@pytest.mark.parametrize(("group", "counted"), [(2, 1.15), (4, 1.38), (8, 1.49)])
def test_a_line_that_both_partitions_read_misses_in_each(group, counted):
    """By hand 1 + (1 - 2^(1-n)) / 2 misses for each fetch with n reads, and one in the first wave of 264 programs, as
    their n neighbours lie in one half; an H200 counted a little less, as some of the reads never arrive (lookup misses
    over DRAM sectors, 64 × 4096, a program for each of n query heads)."""
    batch = BatchShape.decode(64, 4096)
    shape = AttentionShape(batch, num_heads=8 * group)
    one, two, real = (
        simulate_attention(shape, H200, UNPACKED, calibration=known)
        for known in (PLAIN, dataclasses.replace(PLAIN, partitions=2), None)
    )
    misses = [each.l2_read_bytes * (1 - each.counters.l2_hit_rate) / each.counters.dram_bytes for each in (one, two)]
    later = 1 - 264 / (64 * 8 * group)
    assert misses == pytest.approx([1, 1 + later * (1 - 2 ** (1 - group)) / 2], rel=0.005)
    assert one.counters.dram_bytes == two.counters.dram_bytes == real.counters.dram_bytes
    assert real.l2_read_bytes * (1 - real.counters.l2_hit_rate) / real.counters.dram_bytes == pytest.approx(
        counted, abs=0.08
    )


@pytest.mark.parametrize("name", ["block 16 bfloat16", "group 2 unpacked", "group 4 unpacked", "group 8 unpacked"])
def test_reads_that_arrive_as_counted_on_an_h200(name):
    """64 × 4096; fewer than the programs ask for where several ask for the same."""
    rows = json.loads((ROOT / "results" / "counters.json").read_text())["rows"]
    counted = next(row["counted"] for row in rows if row["name"] == f"decode 64 × 4096 {name}")
    point = next(point for point in points() if point.name == f"decode 64 × 4096 {name}")
    found = simulate_attention(point.shape, H200, point.variant)
    assert found.l2_read_bytes == pytest.approx(counted["l2_read_bytes"], rel=0.06)


def test_what_is_coalesced_by_hand():
    """Of 8 programs (2 sequences × 4 query heads) pairs read the same tile of a KV head, two tiles of 64 each, and both
    sequences share it: on one SM each, all in one cluster, heads 0 1 4 5 and 2 3 6 7 read together."""
    shape = AttentionShape(BatchShape((128, 128), (1, 1), 128), num_heads=4, num_kv_heads=2, block_size=16)
    launches = build_launches(shape, H200, UNPACKED, programs_per_sm=1)
    trace = access_trace(shape, launches, 132)
    tile = 64 * 512
    assert [int(size) for size in trace.sizes / tile] == [1] * 4
    assert (trace.readers.tolist(), trace.clusters.tolist()) == ([4] * 4, [1] * 4)
    assert trace.asked_bytes == 16 * tile
    # The second of each pair follows its neighbour, the first of the second pair is elsewhere in the cluster.
    parts = trace.repeats
    assert [part.sum() / tile for part in (parts.next_to, parts.further, parts.same_cluster, parts.later)] == [
        8,
        0,
        4,
        0,
    ]
    known = L2Calibration(lockstep_next=2.0, lockstep_cluster=0.5, coalesced_row_power=1.5)
    # Rows of two lines reach 2^-½ as far; the second tile is read at age 2.
    near, far = (sum(1 - math.exp(-reach / 2**0.5 / age**0.5) for age in (1, 2)) for reach in (2.0, 0.5))
    assert trace.coalesced_bytes(known) == pytest.approx((4 * near + 2 * far) * tile, rel=0.01)
    found = simulate_attention(shape, H200, UNPACKED, calibration=known, programs_per_sm=1)
    assert found.asked_bytes - found.l2_read_bytes == pytest.approx(trace.coalesced_bytes(known))


def trace_of(batch, variant=UNPACKED, **shape):
    shape = AttentionShape(batch, **shape)
    return access_trace(shape, build_launches(shape, H200, variant), H200.sm_count)


def test_programs_of_later_waves_keep_no_step():
    """264 run at once, 2 on each SM: of 2,048 only the first 264 start together."""
    repeats = trace_of(BatchShape.decode(64, 4096)).repeats
    at_once, later = (part.sum() for part in (repeats.next_to, repeats.later))
    assert at_once / (at_once + later) == pytest.approx(264 / 2048, rel=0.02)


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1), ("fp8", 2)])
def test_later_programs_of_8_bit_values_meet_twice_as_often(dtype, times):
    shape = AttentionShape(BatchShape.decode(264, 4096), kv_cache_dtype=dtype)
    launches = build_launches(shape, H200, UNPACKED)
    trace = access_trace(shape, launches, H200.sm_count)
    share = trace.repeats.later.sum() / (trace.asked_bytes - trace.sizes.sum())
    assert share == pytest.approx(times * (1 - launches[0].slots / (264 * 32)), rel=0.02)


def test_reads_of_different_clusters_do_not_meet():
    """Two sequences on one prefix, 32 programs apart: other SMs, so nothing meets and both halves may miss."""
    trace = trace_of(BatchShape.decode(2, 4096, 2048), "full", num_heads=8, num_kv_heads=2, head_dim=64, block_size=128)
    assert sum(part.sum() for part in (trace.repeats.next_to, trace.repeats.further, trace.repeats.same_cluster)) == 0
    assert set(trace.clusters.tolist()) == {1, 2}


def test_short_rows_and_full_sms_and_8_bit_values_lose_step_sooner():
    """16-bit rows of a line, then two lines, 8-bit values, and half a line."""
    known = L2Calibration(lockstep_next=1.0, coalesced_row_power=1.0)

    def met(batch=6, **shape):
        trace = trace_of(BatchShape.decode(batch, 9415), num_heads=8, num_kv_heads=2, block_size=128, **shape)
        return trace.coalesced_bytes(known) / trace.repeats.next_to.sum()

    line = met(head_dim=64)
    assert met(head_dim=128) == pytest.approx(line / 2**0.5, rel=0.1)
    assert met(head_dim=128, kv_cache_dtype="fp8") < 0.8 * line
    assert met(head_dim=64, kv_cache_dtype="fp8") < 0.7 * met(head_dim=128, kv_cache_dtype="fp8")


def test_a_short_wave_whose_reads_meet_has_hardly_a_hit():
    """6 × 9,415 with a program for each of 4 query heads: an H200 counted 97 to 99 % of the repeats away before the L2,
    while 264 sequences of 4,096, in four waves, kept 60 % hits."""
    few, many = (
        hit(
            BatchShape.decode(*lens),
            UNPACKED,
            calibration=None,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            block_size=128,
        ).l2_hit_rate
        for lens in ((6, 9415), (264, 4096))
    )
    assert few < 0.12
    assert many == pytest.approx(0.60, abs=0.05)
