"""The allocator's timeline from torch's statistics, and the snapshot that is written."""

import base64
import pickle
from pathlib import Path

import pytest

from labkit.errors import FileFormatError, UnsupportedError
from labkit.measure.allocator import AllocatorState, AllocatorTimeline, torch_snapshot, write_torch_snapshot


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


def test_looks_at_torchs_statistics():
    stats = {f"{name}_bytes.all.current": value for name, value in
             (("allocated", 10), ("active", 12), ("reserved", 40), ("inactive_split", 8))}  # fmt: skip
    times = iter([5.0, 5.5, 7.0])
    timeline = AllocatorTimeline(lambda: stats, lambda: next(times))
    assert timeline.look() == AllocatorState(0.5, 10, 12, 40, 8)
    stats["allocated_bytes.all.current"] = 20
    timeline.look()
    assert [(s.time_s, s.allocated_bytes) for s in timeline.states] == [(0.5, 10), (2.0, 20)]
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
    with pytest.raises(UnsupportedError), torch_snapshot("x.pickle"):
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
