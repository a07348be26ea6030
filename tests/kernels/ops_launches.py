"""Compiles the launches of the kernels around attention without a card and prints the reports as JSON.

usage: ops_launches.py ARCH [NAME …]. Runs in its own process: kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch
from labkit_kernels import (
    activations,
    awq_matmul,
    awq_words,
    block_copy,
    entries,
    few_rows,
    norms,
    pooling,
    rope,
    sampling,
)
from labkit_kernels.compile_check import SHARED_MEMORY_BYTES, compile_report, record_launch
from labkit_kernels.rope_write import Rotary

BF16 = torch.bfloat16
CARD_MULTIPROCESSORS = 108


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without content: nothing runs."""
    return torch.empty(shape, dtype=dtype)


def _rope() -> None:
    qkv = empty(64, 48, 128)
    table = empty(4096, 128, dtype=torch.float32)
    rotary = Rotary(table, False, empty(128), empty(128))
    rope.apply_rope(qkv[:, :32], qkv[:, 32:40], empty(64, dtype=torch.int64), rotary)


def _copy() -> None:
    pool = block_copy.block_caches([torch.zeros(4, 16, 8, 128, dtype=BF16)])
    block_copy.copy_blocks(pool, torch.zeros(1, 2, dtype=torch.int64))


def _sample() -> None:
    parameters = {name: empty(4, dtype=dtype) for name, dtype in sampling.PARAMETER_DTYPES.items()}
    sampling.sample(empty(4, 151936), sampling.SamplingTensors(**parameters))


def _few_rows(rows: int, *, e4m3: bool = False) -> Callable[[], object]:
    weight = empty(4096, 4096, dtype=torch.float8_e4m3fn if e4m3 else BF16)
    scale = empty(4096, 1, dtype=torch.float32) if e4m3 else None
    return lambda: few_rows.few_rows_matmul(empty(rows, 4096), weight, scale)


def _weight() -> awq_matmul.AwqWeight:
    return awq_matmul.AwqWeight(
        torch.zeros(4096, 512, dtype=torch.int32), torch.zeros(32, 512, dtype=torch.int32),
        torch.zeros(32, 4096, dtype=torch.float16),
    )  # fmt: skip


def _awq(rows: int, dtype: torch.dtype = torch.float16) -> Callable[[], object]:
    return lambda: awq_matmul.awq_matmul(empty(rows, 4096, dtype=dtype), _weight())


def _turned() -> awq_words.AwqWords:
    weight = _weight()
    return awq_words.AwqWords(torch.zeros(4096, 512, dtype=torch.int32), weight.qzeros, weight.scales)


def _awq_words(rows: int) -> Callable[[], object]:
    return lambda: awq_words.words_matmul(empty(rows, 4096), _turned())


def _dequantise() -> None:
    awq_matmul.awq_dequantise(_weight(), BF16)


LAUNCHES: dict[str, tuple[ModuleType, str, Callable[[], object]]] = {
    "entries": (
        entries, "_write_kernel",
        lambda: entries.write_entries(empty(257, 512, dtype=torch.int32), empty(2, 64, dtype=torch.int32)),
    ),
    "norm": (
        norms, "_rms_norm_kernel",
        lambda: norms.add_rms_norm(empty(2048, 4096), empty(2048, 4096), empty(4096), 1e-6),
    ),
    "norm 576": (norms, "_rms_norm_kernel", lambda: norms.rms_norm(empty(2048, 576), empty(576), 1e-6)),
    "norm 5120": (norms, "_rms_norm_kernel", lambda: norms.rms_norm(empty(7, 5120), empty(5120), 1e-6)),
    "silu": (activations, "_gated_kernel", lambda: activations.silu_and_mul(empty(2048, 2 * 14336))),
    "gelu": (activations, "_gated_kernel", lambda: activations.gelu_and_mul(empty(7, 2 * 1536))),
    "rope": (rope, "_rope_kernel", _rope),
    "pool sum": (pooling, "_sum_kernel", lambda: pooling.pool(empty(4096, 1024), empty(9, dtype=torch.int32), "mean")),
    "pool finish": (
        pooling, "_finish_kernel", lambda: pooling.pool(empty(4096, 1024), empty(9, dtype=torch.int32), "last"),
    ),
    "copy": (block_copy, "_copy_kernel", _copy),
    "one row": (few_rows, "_one_row_kernel", _few_rows(1)),
    "one row, e4m3": (few_rows, "_one_row_kernel", _few_rows(1, e4m3=True)),
    "few rows": (few_rows, "_few_rows_kernel", _few_rows(16)),
    "few rows, e4m3": (few_rows, "_few_rows_kernel", _few_rows(16, e4m3=True)),
    "32 rows, e4m3": (few_rows, "_few_rows_kernel", _few_rows(32, e4m3=True)),
    "sum of parts": (few_rows, "_sum_parts_kernel", _few_rows(16)),
    "tops": (sampling, "_tops_kernel", _sample),
    "sample parts": (sampling, "_parts_kernel", _sample),
    "sample compact": (sampling, "_compact_kernel", _sample),
    "greedy": (sampling, "_greedy_kernel", lambda: sampling.greedy(empty(4, 151936))),
    "sample": (sampling, "_sample_kernel", _sample),
    "awq words 1": (awq_words, "_words_kernel", _awq_words(1)),
    "awq words 16": (awq_words, "_words_kernel", _awq_words(16)),
    "awq words 64": (awq_words, "_words_kernel", _awq_words(64)),
    "awq words 256": (awq_words, "_words_kernel", _awq_words(256)),
    "awq words dequantise": (
        awq_words, "_dequantise_kernel", lambda: awq_words.words_dequantise(_turned(), BF16),
    ),
    "awq 1": (awq_matmul, "_awq_kernel", _awq(1)),
    "awq 64, bf16": (awq_matmul, "_awq_kernel", _awq(64, BF16)),
    "awq sum": (awq_matmul, "_sum_parts_kernel", _awq(1)),
    "awq dequantise": (awq_matmul, "_dequantise_kernel", _dequantise),
}  # fmt: skip


def report(name: str, arch: int) -> dict[str, object]:
    """What the compiler makes of a launch for `arch`, with the settings that its wrapper picks there."""
    module, kernel, call = LAUNCHES[name]
    # Two kernels share a wrapper: only the recorded one must not run, the other has no card to run on.
    others = [k for m, k, _ in LAUNCHES.values() if m is module and k != kernel]
    slots = patch.object(few_rows, "num_slots", lambda device, config: CARD_MULTIPROCESSORS * config.ctas_per_sm)
    card = patch.object(few_rows, "capability", lambda device: arch)
    words = patch.object(awq_words, "num_slots", lambda device, config: CARD_MULTIPROCESSORS * config.ctas_per_sm)
    with (
        slots,
        card,
        words,
        patch.object(awq_words, "sum_parts", lambda *_: None),
        patch.object(awq_matmul, "num_slots", lambda device, config: CARD_MULTIPROCESSORS),
    ):
        launch = record_launch(module, kernel, lambda: _call_without(module, others, call))
    return asdict(compile_report(launch, arch)) | {"shared_limit": SHARED_MEMORY_BYTES[arch]}


class _Ignored:
    def __getitem__(self, grid):
        return lambda *args, **options: None


def _call_without(module: ModuleType, kernels: list[str], call: Callable[[], object]) -> None:
    with patch.multiple(module, **dict.fromkeys(kernels, _Ignored())) if kernels else patch.dict({}):
        call()


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(LAUNCHES)
    print(json.dumps({name: report(name, int(sys.argv[1])) for name in chosen}))
