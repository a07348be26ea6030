"""The allocator's timeline from its own events, the written snapshot, and the device's bytes by difference."""

import base64
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import FileFormatError, OutOfRangeError, UnsupportedError
from labkit.measure.allocator import (
    AllocatorState,
    AllocatorTimeline,
    recorded_allocations,
    split_device,
    trace_timeline,
    write_torch_snapshot,
)


def event(action, size, time_us, addr=1):
    return {"action": action, "size": size, "time_us": time_us, "addr": addr, "stream": 0, "frames": []}


TRACE = [
    event("segment_alloc", 2**21, 1_000_000),
    event("alloc", 512, 1_000_010),
    event("alloc", 1024, 1_500_000),
    event("free_requested", 512, 2_000_000),
    event("snapshot", 0, 2_100_000),
    event("free_completed", 512, 2_250_000),
    event("segment_free", 2**20, 3_000_000),
]


def test_events_move_the_right_totals():
    states = trace_timeline(TRACE)
    assert [(s.allocated_bytes, s.active_bytes, s.reserved_bytes) for s in states] == [
        (0, 0, 2**21), (512, 512, 2**21), (1536, 1536, 2**21), (1024, 1536, 2**21), (1024, 1024, 2**21),
        (1024, 1024, 2**20),
    ]  # fmt: skip
    assert [s.time_s for s in states] == pytest.approx([0, 1e-5, 0.5, 1.0, 1.25, 2.0])


def test_the_state_at_the_end_gives_what_was_there_before():
    end = AllocatorState(9.0, 5024, 6024, 2**22)
    states = trace_timeline(TRACE, end)
    assert (states[-1].allocated_bytes, states[-1].active_bytes, states[-1].reserved_bytes) == (5024, 6024, 2**22)
    assert states[0].allocated_bytes == 4000
    assert trace_timeline([], end) == (end,)
    assert trace_timeline([]) == ()


@pytest.mark.parametrize("broken", [{"size": -1}, {"size": "1"}, {"time_us": None}])
def test_broken_events(broken):
    with pytest.raises(FileFormatError):
        trace_timeline([event("alloc", 1, 1) | broken])


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free_completed", "oom", "x"]), st.integers(0, 2**40))))
def test_any_trace_ends_at_its_end(moves):
    end = AllocatorState(0.0, 7, 8, 9)
    states = trace_timeline([event(action, size, index) for index, (action, size) in enumerate(moves)], end)
    assert states[-1].allocated_bytes == 7
    assert states[-1].active_bytes == 8


def test_looks_at_torchs_statistics():
    stats = {f"{name}_bytes.all.current": value for name, value in
             (("allocated", 10), ("active", 12), ("reserved", 40), ("inactive_split", 8))}  # fmt: skip
    times = iter([5.0, 5.5, 7.0])
    timeline = AllocatorTimeline(lambda: stats, lambda: next(times))
    assert timeline.look() == AllocatorState(0.5, 10, 12, 40, 8)
    stats["allocated_bytes.all.current"] = 20
    timeline.look()
    assert [(s.time_s, s.allocated_bytes) for s in timeline.states] == [(0.5, 10), (2.0, 20)]
    assert timeline.states[0].fragmentation == 0.2
    assert AllocatorState(0, 0, 0, 0).fragmentation == 0
    empty = AllocatorTimeline(dict)
    assert empty.look() is None
    assert empty.reason.startswith("not available")


def test_without_a_card_it_is_said():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    timeline = AllocatorTimeline()
    assert timeline.look() is None
    assert "CPU" in timeline.reason
    with pytest.raises(UnsupportedError), recorded_allocations():
        pass
    with pytest.raises(UnsupportedError):
        write_torch_snapshot("x.pickle")


def test_a_snapshot_is_written_whole_or_not_at_all(tmp_path):
    def dump(name):
        with open(name, "wb") as file:
            file.write(b"snapshot")

    def fail(name):
        dump(name)
        raise OSError("disk full")

    path = write_torch_snapshot(tmp_path / "s.pickle", dump)
    assert path.read_bytes() == b"snapshot"
    with pytest.raises(FileFormatError, match="disk full"):
        write_torch_snapshot(tmp_path / "t.pickle", fail)
    with pytest.raises(FileFormatError):
        write_torch_snapshot(tmp_path / "none" / "t.pickle", dump)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.pickle"]


def test_parts_sum_to_what_nvml_says():
    state = AllocatorState(0.0, 70, 75, 80)
    parts = split_device(100, state, weights_bytes=20, pool_bytes=40, process_bytes=90)
    assert (parts.other_tensors_bytes, parts.cached_bytes, parts.context_bytes, parts.other_processes_bytes) == (
        10, 10, 10, 10
    )  # fmt: skip
    unknown = split_device(100, state, weights_bytes=20, pool_bytes=40, process_bytes=None)
    assert (unknown.context_bytes, unknown.other_processes_bytes) == (20, 0)
    for bad in ({"weights_bytes": 60}, {"process_bytes": 70}, {"process_bytes": 101}):
        with pytest.raises(OutOfRangeError):
            split_device(100, state, **({"weights_bytes": 20, "pool_bytes": 40, "process_bytes": 90} | bad))


def test_torchs_memory_viewer_opens_what_is_written(tmp_path):
    """A snapshot in the form that torch/cuda/memory.py documents, through the viewer's own checks and plots."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    block = {"address": 4096, "size": 2**20, "requested_size": 2**20 - 100, "state": "active_allocated", "frames": []}
    free = block | {"address": 4096 + 2**20, "size": 31 * 2**20, "requested_size": 0, "state": "inactive"}
    segment = {"device": 0, "address": 4096, "total_size": 2**25, "allocated_size": 2**20, "active_size": 2**20,
               "stream": 0, "segment_type": "large", "blocks": [block, free]}  # fmt: skip
    snapshot = {"segments": [segment], "device_traces": [TRACE], "allocator_settings": {}}

    def dump(name):
        Path(name).write_bytes(pickle.dumps(snapshot))

    kept = pickle.loads(write_torch_snapshot(tmp_path / "snapshot.pickle", dump).read_bytes())
    assert "total_reserved: 32.0MiB" in viz.segsum(kept)
    assert "cudaMalloc(1, 2.0MiB)" in viz.trace(kept)
    embedded = base64.b64encode(pickle.dumps(snapshot)).decode()[:200]
    assert embedded in viz.trace_plot(kept)
    assert embedded in viz.segment_plot(kept)
