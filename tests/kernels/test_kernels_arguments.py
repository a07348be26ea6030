"""Bad arguments raise errors that name them; settings come from the recorded table."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.cascade import SharedPrefix, cascade_decode
from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import decode_config, prefill_config, shared_config
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.paged_decode import make_workspace, paged_decode
from labkit_kernels.paged_prefill import paged_prefill
from labkit_kernels.scores import Scores
from labkit_kernels.teaching import variant_workspace


def arguments(**changed):
    given = {
        "q": torch.zeros(2, 4, 64, dtype=torch.float16),
        "k_cache": torch.zeros(3, 16, 2, 64, dtype=torch.float16),
        "v_cache": torch.zeros(3, 16, 2, 64, dtype=torch.float16),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scores": Scores(scale=1.0),
    }
    return given | changed


BAD = {
    "dtype of q": ({"q": torch.zeros(2, 4, 64, dtype=torch.float64)}, KernelTypeError, "q has dtype torch.float64"),
    "dtype of the cache": ({"k_cache": torch.zeros(3, 16, 2, 64)}, KernelTypeError, "k_cache has dtype torch.float32"),
    "device": ({"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}, KernelTypeError, "seq_lens is on device"),
    "long lengths": ({"seq_lens": torch.ones(2, dtype=torch.int64)}, KernelTypeError, "seq_lens has dtype torch.int64"),
    "shapes differ": (
        {"v_cache": torch.zeros(3, 8, 2, 64, dtype=torch.float16)}, KernelValueError,
        r"v_cache has shape \(3, 8, 2, 64\)",
    ),
    "stride": (
        {"k_cache": torch.zeros(3, 16, 64, 2, dtype=torch.float16).transpose(2, 3)}, KernelValueError,
        "k_cache has stride 2",
    ),
    "block size": (
        {"k_cache": torch.zeros(1, 300, 2, 64, dtype=torch.float16)}, KernelValueError,
        "block size 300; works: 1 to 256",
    ),
    "head size": (
        {
            "q": torch.zeros(2, 4, 72, dtype=torch.float16),
            "k_cache": torch.zeros(3, 16, 2, 72, dtype=torch.float16),
            "v_cache": torch.zeros(3, 16, 2, 72, dtype=torch.float16),
        }, KernelValueError, "head size 72 is not supported",
    ),
    "group": ({"q": torch.zeros(2, 5, 64, dtype=torch.float16)}, KernelValueError, "5 query heads do not divide"),
    "tokens": ({"q": torch.zeros(3, 4, 64, dtype=torch.float16)}, KernelValueError, "q has 3 tokens for 2 sequences"),
    "scale": ({"scores": Scores(scale=1.0, k_scale=0.0)}, KernelValueError, "k_scale is 0.0"),
    "window": ({"scores": Scores(scale=1.0, window=0)}, KernelValueError, "window is 0"),
    "sinks": ({"scores": Scores(scale=1.0, sinks=torch.zeros(3))}, KernelValueError, "sinks has shape"),
    "lse": ({"lse": torch.zeros(2, 4, dtype=torch.float16)}, KernelTypeError, "lse has dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_paged_decode_names_the_bad_argument(name):
    changed, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        paged_decode(**arguments(**changed))


def test_a_workspace_for_other_heads_or_window_is_refused():
    given = arguments()
    workspace = make_workspace(given["q"], given["k_cache"], given["block_tables"], Scores(1.0, window=5))
    with pytest.raises(KernelValueError, match="planned for window 5"):
        paged_decode(**given, workspace=workspace)
    small = DecodeWorkspace(
        max_batch=1, max_seq_len=64, num_q_heads=4, num_kv_heads=2, head_dim=64, kv_dtype=torch.float16, device="cpu"
    )
    with pytest.raises(KernelValueError, match="room for 1"):
        small.plan(torch.ones(2, dtype=torch.int32))


def test_prefill_write_and_cascade_name_theirs():
    given = arguments()
    with pytest.raises(KernelValueError, match="query_start_loc has shape"):
        paged_prefill(**given, query_start_loc=torch.zeros(2, dtype=torch.int32), max_query_len=1)
    key = torch.zeros(2, 2, 64, dtype=torch.float16)
    with pytest.raises(KernelTypeError, match=r"slot_mapping has dtype torch\.int32"):
        write_kv(key, key, torch.zeros(2, dtype=torch.int32), KVTarget(given["k_cache"], given["v_cache"]))
    prefix = SharedPrefix.make(torch.zeros(1, dtype=torch.int32), 17, 2)
    scores = given.pop("scores")
    with pytest.raises(KernelValueError, match="1 blocks hold 1 to 16"):
        cascade_decode(
            given["q"], given["k_cache"], given["v_cache"], prefix, given["block_tables"], given["seq_lens"], scores
        )
    with pytest.raises(KernelValueError, match="unknown variant 'fast'"):
        variant_workspace("fast", given["q"], given["k_cache"], given["block_tables"], scores)


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100])
@pytest.mark.parametrize("kind", ["native", "fp8", "int8", "e4m3_bits"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_layout_has_recorded_settings(arch, kind, head_dim):
    for rows in (1, 4, 7, 16, 32, 64, 128):
        for batch in (1, 256):
            config = decode_config(arch, kind, head_dim, rows, batch)
            assert config.padded_rows(rows) >= rows
            assert not (config.swap and arch < 90)
        assert prefill_config(arch, kind, head_dim, rows).tile >= 16
        assert shared_config(arch, kind, head_dim, rows).tile >= 16


def test_padded_rows_are_powers_of_two():
    config = decode_config(90, "native", 128, 7)
    assert [config.padded_rows(rows) for rows in (1, 7, 16, 17, 56)] == [16, 16, 16, 32, 64]
