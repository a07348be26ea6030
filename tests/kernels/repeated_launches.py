"""What `Launches` launches again beside what Triton itself would launch, on a card that only takes notes; as JSON.

Runs in its own process, without the interpreter: Triton binds every argument as for a Hopper card, nothing is compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch
from labkit_kernels import activations, few_rows, launches, norms, paged_decode, paged_prefill, rope_write
from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import PrefillConfig
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.merge import Partials
from labkit_kernels.scores import Scores
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOKENS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BF16 = 12, 16, 8, 128, 1024, torch.bfloat16


class NotingCard:
    """A driver whose stream has another number each time."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.stream = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        self.stream += 1
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


CARD = NotingCard()


class Variant(CompiledKernel):
    """Stands for what would be compiled for one key."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel_of, self.module, self.function, self.packed_metadata = kernel, 1, 1, ()
        self._run = self.note

    def launch_metadata(self, *args: object) -> None:
        return None

    def note(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments) -> None:
        CARD.launched.append((self, (x, y, z), stream, arguments))


def no_compile(kernel: JITFunction, key, signature, device, *rest):
    kernel.device_caches[device][0][key] = Variant(kernel)
    return kernel.device_caches[device][0][key]


def noted(call: Callable[[], object]) -> list[tuple]:
    CARD.launched = []
    call()
    return CARD.launched


def through_triton(call: Callable[[], object]) -> list[tuple]:
    with patch.object(launches.Launches, "again", lambda *_: False):
        return noted(call)


def compare(call: Callable[[], object], other: Callable[[], object]) -> dict:
    """`other`'s arguments look like those of `call`, which has been launched; both bring all tensors that they use."""
    noted(call)
    wanted = through_triton(other)
    with patch.object(launches.Launches, "first", None):
        found = noted(other)
    rows = {"variant": True, "grid": True, "stream": True, "numbers": True, "pointers": True, "unread": []}
    for (kernel, grid, stream, arguments), (kernel_again, grid_again, stream_again, again) in zip(
        wanted, found, strict=True
    ):
        rows["variant"] &= kernel is kernel_again
        rows["grid"] &= grid == grid_again
        rows["stream"] &= stream_again > stream
        for name, one, two in zip(kernel.kernel_of.arg_names, arguments, again, strict=True):
            if not isinstance(one, torch.Tensor):
                rows["numbers"] &= type(one) is type(two) and one == two
            elif two == 0:
                rows["unread"].append(name)
            else:
                rows["pointers"] &= two == one.data_ptr()
    return rows


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class Case:
    """One set of tensors for every wrapper."""

    def __init__(self, kv: torch.dtype = BF16, token_scales: bool = False) -> None:
        tokens, ints = TOKENS, torch.int32
        self.x, self.residual, self.out = (zeros(tokens, HIDDEN) for _ in range(3))
        self.weight, self.wide, self.gated = zeros(HIDDEN), zeros(tokens, 6 * HIDDEN), zeros(tokens, 3 * HIDDEN)
        self.square, self.bytes = zeros(HIDDEN, HIDDEN), zeros(HIDDEN, HIDDEN, dtype=torch.float8_e4m3fn)
        self.factors = zeros(HIDDEN, 1, dtype=torch.float32)
        self.qkv = zeros(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.q, self.k, self.v = self.qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        self.places = zeros(tokens, dtype=torch.int64)
        caches = [zeros(9, 16, KV_HEADS, HEAD_DIM, dtype=kv) for _ in range(2)]
        scales = [zeros(9, 16, KV_HEADS, dtype=torch.float32) if token_scales else None for _ in range(2)]
        self.target = KVTarget(*caches, 1.0, 1.0, *scales)
        self.scores = Scores(0.125, k_token_scales=scales[0], v_token_scales=scales[1])
        self.rotary = rope_write.Rotary(zeros(64, 128, dtype=torch.float32), False, zeros(128), zeros(128))
        self.queries, self.mixed = zeros(tokens, HEADS, HEAD_DIM), zeros(tokens, HEADS, HEAD_DIM)
        self.tables, self.lens = zeros(tokens, 256, dtype=ints), zeros(tokens, dtype=ints)
        self.starts = zeros(tokens + 1, dtype=ints)
        self.workspace = DecodeWorkspace(
            max_batch=64, max_seq_len=4096, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_dtype=kv,
            device="cpu",
        )  # fmt: skip
        self.partials = Partials(
            zeros(4, tokens, HEADS, HEAD_DIM, dtype=torch.float32), zeros(4, tokens, HEADS, dtype=torch.float32)
        )

    def calls(self) -> dict[str, Callable[[], object]]:
        attention = (self.target.k_cache, self.target.v_cache, self.tables, self.lens)
        ragged = {"query_start_loc": self.starts, "lse": zeros(TOKENS, HEADS, dtype=torch.float32)}
        return {
            "norm": lambda: norms.rms_norm(self.x, self.weight, 1e-6, out=self.out),
            "sum and norm": lambda: norms.add_rms_norm(self.x, self.residual, self.weight, 1e-6, out=self.out),
            "in place": lambda: norms.add_rms_norm(self.x, self.residual, self.weight, 1e-6, out=self.x),
            "silu": lambda: activations.silu_and_mul(self.wide, out=self.gated),
            "write": lambda: write_kv(self.k, self.v, self.places, self.target),
            "rope and write": lambda: rope_write.rope_and_write(
                self.q, self.k, self.v, self.places, self.places, self.rotary, self.target, out=self.q
            ),
            "plan": lambda: self.workspace.plan(self.lens),
            "decode": lambda: paged_decode.paged_decode(
                self.queries, *attention, self.scores, workspace=self.workspace, out=self.mixed
            ),
            "decode, uneven": lambda: paged_decode.paged_decode(
                self.queries, *attention, self.scores, workspace=self.workspace, out=self.mixed, **ragged
            ),
            "one row": lambda: few_rows.few_rows_matmul(self.x[:1], self.square, out=self.out[:1]),
            "one row, bias": lambda: few_rows.few_rows_matmul(
                self.x[:1], self.square, None, self.weight, out=self.out[:1]
            ),
            "one row, e4m3": lambda: few_rows.few_rows_matmul(self.x[:1], self.bytes, self.factors, out=self.out[:1]),
            "prefill": lambda: self.prefill(1),
            "prefill, split": lambda: self.prefill(4),
        }

    def prefill(self, splits: int) -> None:
        made = patch.object(paged_prefill, "_partials", lambda q, splits: self.partials if splits > 1 else None)
        with made:
            paged_prefill.paged_prefill(
                self.queries, self.target.k_cache, self.target.v_cache, self.tables, self.lens, self.starts,
                self.scores, max_query_len=TOKENS, out=self.mixed, config=PrefillConfig(), num_splits=splits,
            )  # fmt: skip


def lookalikes(**settings) -> dict[str, dict]:
    """Each call and one with other tensors that look the same; launches of decode are kept with their workspace."""
    first, second = Case(**settings), Case(**settings)
    second.workspace = first.workspace
    others = second.calls()
    return {name: compare(call, others[name]) for name, call in first.calls().items()}


def differences() -> dict[str, int]:
    """How many launches went through Triton for each call that does not look like the one before it."""
    case, counts, norms._LAUNCHES = Case(), {}, launches.Launches()
    norms.rms_norm(case.x, case.weight, 1e-6, out=case.out)
    odd = torch.zeros(TOKENS * HIDDEN + 1, dtype=BF16)[1:].view(TOKENS, HIDDEN)
    wide = zeros(TOKENS, 2 * HIDDEN)[:, :HIDDEN]
    half = case.x.half()
    calls = {
        "the same": lambda: norms.rms_norm(case.x, case.weight, 1e-6, out=case.out),
        "eps": lambda: norms.rms_norm(case.x, case.weight, 1e-5, out=case.out),
        "offset": lambda: norms.rms_norm(case.x, case.weight, 1e-6, offset=True, out=case.out),
        "address": lambda: norms.rms_norm(odd, case.weight, 1e-6, out=case.out),
        "stride": lambda: norms.rms_norm(wide, case.weight, 1e-6, out=case.out),
        "rows": lambda: norms.rms_norm(case.x[:5], case.weight, 1e-6, out=case.out[:5]),
        "dtype": lambda: norms.rms_norm(half, case.weight, 1e-6, out=half),
        "residual": lambda: norms.add_rms_norm(case.x, case.residual, case.weight, 1e-6, out=case.out),
    }
    first = launches.Launches.first
    for name, call in calls.items():
        with patch.object(launches.Launches, "first", autospec=True, side_effect=first) as through:
            call()
        counts[name] = through.call_count
    return counts


def refusals() -> dict[str, str]:
    """Errors of calls that come after good ones."""
    case, found = Case(), {}
    for call in case.calls().values():
        call()
    bad_scores = replace(case.scores, softcap=-1.0)
    calls = {
        "weight": lambda: norms.rms_norm(case.x, case.weight[:512], 1e-6, out=case.out),
        "x": lambda: activations.silu_and_mul(case.wide[:, :7]),
        "slot_mapping": lambda: write_kv(case.k, case.v, case.places[:3], case.target),
        "positions": lambda: rope_write.rope_and_write(
            case.q, case.k, case.v, case.places.int(), case.places, case.rotary, case.target, out=case.q
        ),
        "softcap": lambda: paged_decode.paged_decode(
            case.queries, case.target.k_cache, case.target.v_cache, case.tables, case.lens, bad_scores,
            workspace=case.workspace, out=case.mixed,
        ),
    }  # fmt: skip
    for name, call in calls.items():
        try:
            call()
        except (KernelValueError, KernelTypeError) as error:
            found[name] = str(error)
    return found


def kept() -> dict[str, int]:
    """How many launches are kept of four where three are the most, and of one whose table the wrapper copies."""
    case, few, none = Case(), launches.Launches(), launches.Launches()
    table = rope_write.Rotary(zeros(64, 256, dtype=torch.float32)[:, :128])
    with patch.object(launches, "MOST_LAUNCHES", 3), patch.object(norms, "_LAUNCHES", few):
        for rows in range(1, 5):
            norms.rms_norm(case.x[:rows], case.weight, 1e-6, out=case.out[:rows])
    with patch.object(rope_write, "_LAUNCHES", none):
        rope_write.rope_and_write(case.q, case.k, case.v, case.places, case.places, table, case.target, out=case.q)
    return {"one more than there is room for": len(few._known), "a pointer of its own": len(none._known)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver.set_active(CARD)
    with patch.object(JITFunction, "_do_compile", no_compile):
        print(
            json.dumps(
                {
                    "16 bit": lookalikes(),
                    "int8": lookalikes(kv=torch.int8, token_scales=True),
                    "differences": differences(),
                    "refusals": refusals(),
                    "kept": kept(),
                }
            )
        )
