"""Traces: the six that come along, the publishers' own forms, corrupt rows, limits."""

from __future__ import annotations

import gzip
import json
import time
from statistics import fmean

import pytest

from labkit.errors import FileFormatError, OutOfRangeError, UnknownNameError
from labkit.specs import RequestSpec, dataset_names, load_workload, trace_lines
from labkit.specs.datasets import datasets_folder

# Rows, span in seconds, mean and longest prompt, mean and longest output: the table of datasets/README.md.
FACTS = {
    "azure-2023-conv": (19_366, 3502, 1155, 14_050, 211, 1000),
    "azure-2023-code": (8_819, 3436, 2048, 7_437, 28, 1899),
    "mooncake-conversation": (12_031, 3537, 12_035, 126_195, 343, 2000),
    "mooncake-synthetic": (3_993, 1022, 15_325, 191_378, 149, 893),
    "servegen-deepseek-r1": (25_164, 600, 683, 44_318, 718, 23_611),
    "arxiv-summarization": (28_257, 0, 2588, 4_054, 291, 4_056),
}


@pytest.mark.parametrize("name", dataset_names())
def test_the_traces_that_come_along(name):
    workload = load_workload(name)
    rows, span, mean_in, max_in, mean_out, max_out = FACTS[name]
    requests = workload.requests
    assert len(requests) == rows
    assert round(workload.duration_s) == span
    assert round(fmean(request.input_tokens for request in requests)) == mean_in
    assert round(fmean(request.output_tokens for request in requests)) == mean_out
    assert max(request.input_tokens for request in requests) == max_in
    assert max(request.output_tokens for request in requests) == max_out
    assert workload.licence
    assert workload.source


def test_each_trace_is_described_beside_it():
    readme = (datasets_folder() / "README.md").read_text()
    for name in dataset_names():
        assert f"`{name}`" in readme


def test_mooncake_reuse_is_the_published_37_percent():
    """An endless cache that hits whole 512-token blocks, as the trace's README counts it."""
    seen: set[int] = set()
    reused = total = 0
    for request in load_workload("mooncake-conversation").requests:
        blocks = [block for first, last in request.prefix_blocks for block in range(first, last + 1)]
        hits = 0
        while hits < len(blocks) and blocks[hits] in seen:
            hits += 1
        reused += min(hits * 512, request.input_tokens)
        total += request.input_tokens
        seen.update(blocks)
    assert 100 * reused / total == pytest.approx(37.4, abs=0.1)


def write(tmp_path, name, text):
    path = tmp_path / name
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,7,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,10,0,10,API log
118,ChatGPT,1087,230,1317,Conversation log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,a,1.5,GPT-4,472,18,490,Conversation log
6.5,b,,GPT-4,1,2,3,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 27482, "input_length": 600, "output_length": 26, "hash_ids": [46, 9]}
"""


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", AZURE, [RequestSpec(0.0, 4808, 10), RequestSpec(0.052, 3180, 8)]),
        ("b.csv", AZURE_2024, [RequestSpec(0.0, 2162, 5), RequestSpec(1.0, 7, 6)]),
        ("c.csv", BURST, [RequestSpec(0.0, 472, 18), RequestSpec(113.0, 1087, 230)]),
        ("d.csv", BURST_2, [RequestSpec(0.0, 472, 18), RequestSpec(1.0, 1, 2)]),
        (
            "e.jsonl",
            MOONCAKE,
            [RequestSpec(0.0, 1500, 52, ((46, 47), (2353, 2353))), RequestSpec(27.482, 600, 26, ((46, 46), (9, 9)))],
        ),
        ("f.csv", "input_tokens,output_tokens\n5,6\n", [RequestSpec(0.0, 5, 6)]),
        ("g.csv", 'output_tokens,arrival_s,input_tokens\n"6",1.5,5\n', [RequestSpec(0.0, 5, 6)]),
    ],
)
def test_publishers_own_forms(tmp_path, suffix, name, text, expected):
    workload = load_workload(write(tmp_path, name + suffix, text))
    assert [request.arrival_s for request in workload.requests] == pytest.approx(
        [entry.arrival_s for entry in expected]
    )
    assert [(r.input_tokens, r.output_tokens, r.prefix_blocks) for r in workload.requests] == [
        (r.input_tokens, r.output_tokens, r.prefix_blocks) for r in expected
    ]
    assert workload.prefix_block_tokens == (512 if "jsonl" in name else 0)


def test_times_without_a_zone_are_utc_wherever_the_reader_sits(tmp_path, monkeypatch):
    rows = "2023-03-26 00:30:00,1,1\n2023-03-26 03:30:00,1,1\n"
    path = write(tmp_path, "z.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    # In Berlin that night has an hour less.
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert load_workload(path).duration_s == 3 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


def test_dropped_rows_and_sorting_are_recorded(tmp_path):
    assert "dropped 1 rows without prompt or output tokens" in load_workload(write(tmp_path, "c.csv", BURST)).steps
    rows = "arrival_s,input_tokens,output_tokens\n9,1,1\n3,2,2\n"
    workload = load_workload(write(tmp_path, "u.csv", rows))
    assert [request.input_tokens for request in workload.requests] == [2, 1]
    assert workload.steps == ("sorted by arrival",)


def test_byte_order_mark_windows_lines_blank_lines_and_several_members(tmp_path):
    text = b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode() + b"\r\n\r\n"
    path = tmp_path / "m.csv.gz"
    path.write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]))
    assert len(load_workload(path).requests) == 2


@pytest.mark.parametrize(
    ("row", "column", "shown"),
    [
        ("0,abc,1", "input_tokens", "'abc'"),
        ("0,1,", "output_tokens", "''"),
        ("0,-5,1", "input_tokens", "'-5'"),
        ("0,1.5,1", "input_tokens", "'1.5'"),
        ("0," + "9" * 5000 + ",1", "input_tokens", "999"),
        ("0,999999999999,1", "input_tokens", "999999999999"),
        ("0,٣,1", "input_tokens", "'٣'"),
        ("nan,1,1", "arrival_s", "'nan'"),
        ("inf,1,1", "arrival_s", "'inf'"),
        ("soon,1,1", "arrival_s", "'soon'"),
    ],
)
def test_a_corrupt_row_is_named(tmp_path, row, column, shown):
    path = write(tmp_path, "bad.csv", f"arrival_s,input_tokens,output_tokens\n0,5,5\n{row}\n")
    with pytest.raises(FileFormatError) as caught:
        load_workload(path)
    message = str(caught.value)
    assert "bad.csv" in message
    assert "line 3" in message
    assert column in message
    assert shown in message
    assert len(message) < 500


@pytest.mark.parametrize("blocks", ["0-9999999999999", "5-3", "a", "1-", "0 1 2", "-4", "9" * 4000, "0-1 2"])
def test_block_ranges_are_checked_against_the_prompt(tmp_path, blocks):
    text = f"arrival_s,input_tokens,output_tokens,block_hashes_512\n0,1000,1,{blocks}\n"
    with pytest.raises(FileFormatError, match="line 2"):
        load_workload(write(tmp_path, "r.csv", text))


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", '{"timestamp": 0}', '{"timestamp": -1, "input_length": 1, "output_length": 1}',
        '{"timestamp": 0, "input_length": true, "output_length": 1}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1.5}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": {}}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
        '{"timestamp": 0, "input_length": ' + "9" * 5000 + ', "output_length": 1}',
        '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_corrupt_json_lines(tmp_path, line):
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n'
    with pytest.raises(FileFormatError, match="line 2"):
        load_workload(write(tmp_path, "x.jsonl", good + line + "\n"))


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "a,b,c\n1,2,3\n", "arrival_s,input_tokens,output_tokens\n", b"\xff\xfe\x00",
        "arrival_s,input_tokens,output_tokens\n0,0,0\n", "arrival_s,arrival_s,input_tokens,output_tokens\n",
        "arrival_s,input_tokens,output_tokens\n0,1\n", 'arrival_s,input_tokens,output_tokens\n0,"1,1\n',
        "arrival_s,input_tokens,output_tokens,block_hashes_0\n0,1,1,0\n", b"\x1f\x8b", b"\x1f\x8bgarbage",
    ],
)  # fmt: skip
def test_files_that_are_no_trace(tmp_path, text):
    with pytest.raises(FileFormatError):
        load_workload(write(tmp_path, "x.csv", text))


def test_a_truncated_gzip_file(tmp_path):
    whole = gzip.compress(AZURE.encode() * 50)
    path = tmp_path / "t.csv.gz"
    for length in (3, 11, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            load_workload(path)


def test_an_endless_line(tmp_path):
    with pytest.raises(FileFormatError, match=r"^line 2 of l\.csv\.gz is too long"):
        load_workload(write(tmp_path, "l.csv.gz", "arrival_s,input_tokens,output_tokens\n" + "1" * (2**20 + 1)))


def test_a_gzip_bomb_stops_at_the_limit_and_a_slice_of_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_lines, "MAX_DECOMPRESSED_BYTES", 10_000)
    rows = "".join(f"{second},1,1\n" for second in range(5000))
    path = write(tmp_path, "b.csv.gz", "arrival_s,input_tokens,output_tokens\n" + rows)
    with pytest.raises(FileFormatError, match="too much"):
        load_workload(path)
    assert len(load_workload(path, limit=100).requests) == 100
    sliced = load_workload(path, start_s=10, duration_s=20)
    assert len(sliced.requests) == 20
    assert "reading stopped at the first arrival after the slice" in sliced.steps


def test_too_many_requests(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.specs.workload_loading.MAX_REQUESTS", 10)
    path = write(tmp_path, "n.csv", "input_tokens,output_tokens\n" + "1,1\n" * 12)
    with pytest.raises(FileFormatError, match="limit="):
        load_workload(path)


@pytest.mark.parametrize("bad", ["azure-2023", "", "nothing", "x\0y"])
def test_unknown_names(bad):
    with pytest.raises(UnknownNameError) as caught:
        load_workload(bad)
    assert caught.value.available.startswith("azure-2023-conv")


@pytest.mark.parametrize("bad", ["/no/such.csv", "./x.csv", "gone.jsonl"])
def test_missing_files(bad):
    with pytest.raises(FileFormatError, match="no file"):
        load_workload(bad)


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(FileFormatError):
        load_workload(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": 0}, {"limit": 1.5}, {"limit": True}, {"start_s": -1}, {"duration_s": 0}, {"rate_scale": 0},
        {"rate_scale": float("nan")}, {"max_input_tokens": 0}, {"max_output_tokens": "9"}, {"seed": -1},
    ],
)  # fmt: skip
def test_settings_out_of_range_name_the_setting(settings):
    with pytest.raises(OutOfRangeError) as caught:
        load_workload("azure-2023-code", **settings)
    assert caught.value.knob == next(iter(settings))


def test_an_empty_slice_says_what_there_is():
    with pytest.raises(FileFormatError, match="0 to 343"):
        load_workload("azure-2023-code", start_s=1e6)


def test_hash_ids_of_a_line_are_kept_as_ranges(tmp_path):
    row = {"timestamp": 0, "input_length": 512 * 5000, "output_length": 1, "hash_ids": list(range(5000))}
    workload = load_workload(write(tmp_path, "h.jsonl", json.dumps(row) + "\n"))
    assert workload.requests[0].prefix_blocks == ((0, 4999),)


@pytest.mark.parametrize(("num_ranges", "is_read"), [(4, True), (5, False)])
def test_ranges_of_a_file_are_limited(tmp_path, monkeypatch, num_ranges, is_read):
    """Over all lines; ids that do not follow each other are a range each."""
    monkeypatch.setattr("labkit.specs.trace_rows.MAX_PREFIX_RANGES", 4)
    ids = [0, 2], list(range(10, 10 + 2 * (num_ranges - 2), 2))
    rows = [{"timestamp": 0, "input_length": 512 * len(each), "output_length": 1, "hash_ids": each} for each in ids]
    lines = [json.dumps(row) for row in rows]
    path = write(tmp_path, "h.jsonl", "\n".join(lines) + "\n")
    if is_read:
        assert len(load_workload(path).requests[1].prefix_blocks) == num_ranges - 2
    else:
        with pytest.raises(FileFormatError, match="line 2"):
            load_workload(path)


def test_a_list_of_objects_is_told_to_be_lines(tmp_path):
    with pytest.raises(FileFormatError, match="one object on each line"):
        load_workload(write(tmp_path, "x.json", '[{"timestamp": 0, "input_length": 5, "output_length": 1}]'))
