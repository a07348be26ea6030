"""The reader of ncu's CSV: recorded forms of its output, and everything that is not one."""

import contextlib
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import FileFormatError, LabkitError, OutOfRangeError
from labkit.measure.ncu import parse_ncu_csv, run_ncu

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(launch, metric, unit, value, name="_decode_kernel"):
    return (
        f'"{launch}","4242","python3.11","127.0.0.1","{name}","1","7","(128, 1, 1)","(512, 1, 1)","0","9.0",'
        f'"Command line profiler metrics","{metric}","{unit}","{value}"'
    )


RECORDED = "\n".join([
    "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
    '==PROF== Profiling "_decode_kernel" - 0: 0%....50%....100% - 1 pass',
    "==PROF== Disconnected from process 4242",
    HEADER,
    row(0, "dram__bytes_read.sum", "byte", "1,074,200,576"),
    row(0, "gpu__time_duration.sum", "nsecond", "252,320"),
    row(0, "sm__warps_active.avg.pct_of_peak_sustained_active", "%", "24.05"),
    row(1, "dram__bytes_read.sum", "Gbyte", "1.07"),
])  # fmt: skip


def test_recorded_table():
    first, second = parse_ncu_csv(RECORDED)
    assert (first.launch, first.name) == (0, "_decode_kernel")
    assert first.metrics["dram__bytes_read.sum"] == 1_074_200_576
    assert first.metrics["gpu__time_duration.sum"] == pytest.approx(252.32e-6)
    assert first.metrics["sm__warps_active.avg.pct_of_peak_sustained_active"] == pytest.approx(0.2405)
    assert second.metrics["dram__bytes_read.sum"] == pytest.approx(1.07e9)


def test_a_header_alone_has_no_launch():
    assert parse_ncu_csv(HEADER + "\n") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
         "NVreg_RestrictProfilingToAdminUsers"),
        ("==WARNING== No kernels were profiled.", "launches the kernel"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "other profiler"),
        ("==ERROR== The application returned an error code (1).", "returned an error code"),
        ("", "no table"),
        ("hello", "no table"),
    ],
)  # fmt: skip
def test_refusals_say_the_cure(text, words):
    with pytest.raises(LabkitError, match=words):
        parse_ncu_csv(text)


@pytest.mark.parametrize(
    "lines",
    [
        ['"ID","Kernel Name"', '"0","k"'],
        [HEADER, '"0","1"'],
        [HEADER, row("x", "m", "byte", "1")],
        [HEADER, row("-1", "m", "byte", "1")],
        [HEADER, row(0, "m", "furlong", "1")],
        [HEADER, row(0, "m", "byte", "n/a")],
        [HEADER, row(0, "m", "byte", "nan")],
        [HEADER, row(0, "m", "byte", "")],
        [HEADER, row(0, "m", "byte", "1"), row(0, "m", "byte", "2")],
        [HEADER, row(0, "m", "byte", "1")[:-1]],
    ],
)
def test_broken_tables_are_refused(lines):
    with pytest.raises(FileFormatError):
        parse_ncu_csv("\n".join(lines))


@given(st.integers(0, len(RECORDED)), st.text(max_size=5))
def test_any_damage_is_a_labkit_error_or_a_table(at, text):
    with contextlib.suppress(LabkitError):
        assert all(kernel.launch >= 0 for kernel in parse_ncu_csv(RECORDED[:at] + text + RECORDED[at + 1 :]))


def fake_ncu(tmp_path, script):
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_command_is_run_under_ncu(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(RECORDED)
    ncu = fake_ncu(tmp_path, f'echo "$@" > {tmp_path}/arguments; cat {table}')
    assert len(run_ncu(["python", "x.py"], ["a.sum", "b.sum"], kernel="_decode_kernel", ncu=ncu)) == 2
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("--metrics") + 1] == "a.sum,b.sum"
    assert arguments[-4:] == ["-k", "_decode_kernel", "python", "x.py"]


@pytest.mark.parametrize(("card_uuid", "seen"), [(None, "1"), ("GPU-second", "GPU-second")])
def test_the_command_sees_the_card_that_is_meant(tmp_path, monkeypatch, card_uuid, seen):
    """Whatever number CUDA_VISIBLE_DEVICES gives it here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    table = tmp_path / "table.csv"
    table.write_text(RECORDED)
    ncu = fake_ncu(tmp_path, f'echo "$CUDA_VISIBLE_DEVICES" > {tmp_path}/seen; cat {table}')
    run_ncu(["python"], ["a.sum"], ncu=ncu, card_uuid=card_uuid)
    assert (tmp_path / "seen").read_text().strip() == seen


def test_refusal_on_stderr_too_slow_and_missing(tmp_path):
    refusing = fake_ncu(tmp_path, 'echo "==ERROR== ERR_NVGPUCTRPERM" >&2; exit 1')
    with pytest.raises(LabkitError, match="root"):
        run_ncu(["x"], ["a"], ncu=refusing)
    slow = fake_ncu(tmp_path, "exec sleep 30")
    with pytest.raises(LabkitError, match="longer"):
        run_ncu(["x"], ["a"], ncu=slow, timeout_s=0.2)
    with pytest.raises(LabkitError, match="start"):
        run_ncu(["x"], ["a"], ncu=str(tmp_path / "none"))
    for command, metrics in (([], ["a"]), (["x"], [])):
        with pytest.raises(OutOfRangeError):
            run_ncu(command, metrics)
