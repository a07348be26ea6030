"""Memory over a run: what was measured is drawn, what was not is not there, and the words are computed."""

from __future__ import annotations

import dataclasses

from labkit.figures import memory_timeline
from labkit.measure.run_record import MemorySample
from tests.figures.samples import sample_record

GIB = 2**30


def info(*samples):
    return memory_timeline.get_memory_timeline_info(dataclasses.replace(sample_record(), memory_timeline=samples))


CARD = (
    MemorySample(0.0, 0, 10 * GIB, 10 * GIB, 12 * GIB, GIB, 14 * GIB, 13 * GIB, GIB),
    MemorySample(1.0, 2 * GIB, 11 * GIB, 11 * GIB, 16 * GIB, 2 * GIB, 18 * GIB, 17 * GIB, GIB),
    MemorySample(2.0, 1 * GIB, 10 * GIB, 10 * GIB, 16 * GIB, 2 * GIB, 18 * GIB, 17 * GIB, GIB),
)


def test_on_a_card_the_whole_comes_before_its_parts():
    found = info(*CARD)
    figure = memory_timeline.draw_memory_timeline(found)
    assert [trace.name for trace in figure.data] == [
        "card in use (NVML)", "reserved by torch", "in tensors", "KV that requests hold",
    ]  # fmt: skip
    assert list(figure.data[1].y) == [12.0, 16.0, 16.0]
    assert figure.layout.yaxis.title.text == "memory (GiB)"
    assert "Measured: card in use (NVML) at most 18.0 GiB" in memory_timeline.caption(found)
    assert "At the end 6.00 GiB (38 %) of what torch reserved held nothing." in memory_timeline.caption(found)
    rows = {row[0]: row[1:] for row in memory_timeline.table(found).rows}
    assert rows["reserved by torch"] == ("12.0 GiB", "16.0 GiB", "16.0 GiB")
    assert rows["other processes on the card"] == ("1.00 GiB",) * 3
    assert rows["worker process"] == ("13.0 GiB", "17.0 GiB", "17.0 GiB")


def test_on_a_cpu_it_is_the_process_and_the_pool():
    found = info(MemorySample(0.0, GIB, process_bytes=3 * GIB), MemorySample(1.0, 2 * GIB, process_bytes=3 * GIB))
    figure = memory_timeline.draw_memory_timeline(found, "dark")
    assert [trace.name for trace in figure.data] == ["worker process", "KV that requests hold"]
    assert "tensors" not in memory_timeline.caption(found)


def test_a_series_without_some_values_has_the_others():
    found = info(MemorySample(0.0, 5), MemorySample(1.0, 6, device_used_bytes=9), MemorySample(2.0, 7))
    assert found.get("device_used_bytes").x == (1.0,)
    assert found.get("reserved_bytes") is None


def test_a_simulated_run_has_the_blocks_of_its_steps_and_says_so():
    """Step by step, at the step's end: blocks in use times the bytes of one."""
    record = dataclasses.replace(sample_record(), origin="simulated", memory_timeline=())
    found = memory_timeline.get_memory_timeline_info(record)
    assert [field for field, _ in found.series] == ["kv_used_bytes"]
    most = max(step.num_blocks_used for step in record.steps) * record.plan.block_bytes
    last = record.steps[-1]
    points = found.get("kv_used_bytes")
    assert max(points.y) == most > 0
    assert (points.x[-1], points.y[-1]) == (
        last.start_s + last.duration_s, last.num_blocks_used * record.plan.block_bytes,
    )  # fmt: skip
    assert [trace.name for trace in memory_timeline.draw_memory_timeline(found).data] == ["KV that requests hold"]
    assert memory_timeline.caption(found).startswith("Simulated: KV that requests hold at most ")


def test_without_samples_and_steps_there_is_a_sentence():
    without = dataclasses.replace(sample_record(), memory_timeline=(), steps=())
    for empty in (memory_timeline.get_memory_timeline_info(record) for record in (None, without)):
        assert "no memory was recorded" in memory_timeline.draw_memory_timeline(empty).layout.annotations[0].text
        assert memory_timeline.caption(empty) == "No memory was recorded over the run."
        assert memory_timeline.table(empty).rows == ()


def test_a_long_run_is_thinned():
    found = info(*(MemorySample(float(at), at, process_bytes=at) for at in range(9000)))
    assert max(len(trace.x) for trace in memory_timeline.plot_memory_timeline(
        dataclasses.replace(sample_record(), memory_timeline=tuple(MemorySample(float(at), at) for at in range(9000)))
    ).data) <= 2000  # fmt: skip
    assert max(found.get("kv_used_bytes").y) == 8999
