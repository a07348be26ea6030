"""Hard test cases for paged attention: every slot never written holds NaN, tables are shuffled, strides are odd."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from labkit_kernels.reference import paged_attention, quantise, token_head_scales
from labkit_kernels.scores import Scores

UNUSED_BLOCK_ID = 2**30
LAYOUTS = ("separate", "interleaved", "head_major")


@dataclass(frozen=True)
class CaseSpec:
    """What to build. query_lens and seq_lens hold one number for each sequence; kv_scale None = 1 for 16-bit caches."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    layout: str = "separate"
    token_scales: bool = False
    scale_tensors: bool = False
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    shared_blocks: int = 0
    seed: int = 0


@dataclass(frozen=True)
class AttentionCase:
    """Tensors of one call and its float64 answer."""

    spec: CaseSpec
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scores: Scores
    answer: tuple[torch.Tensor, torch.Tensor] = field(repr=False)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Arguments that `paged_decode` and `paged_prefill` share."""
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens

    @property
    def query_len(self) -> int:
        """Largest number of query tokens of a sequence."""
        return int((self.query_start_loc[1:] - self.query_start_loc[:-1]).max())


def make_pool(spec: CaseSpec, num_blocks: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty K and V caches `[blocks, block size, KV heads, D]` in the layout asked for."""
    shape = (num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
    if spec.layout == "interleaved":
        pool = torch.empty(num_blocks, 2, *shape[1:], dtype=dtype, device=device)
        return pool[:, 0], pool[:, 1]
    if spec.layout == "head_major":
        pool = torch.empty(2, num_blocks, spec.kv_heads, spec.block_size, spec.head_dim, dtype=dtype, device=device)
        return pool[0].transpose(1, 2), pool[1].transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


def _poison(cache: torch.Tensor) -> None:
    if cache.dtype in (torch.int8, torch.uint8):
        cache.fill_(127)
    elif cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cache.view(torch.uint8).fill_(0x7F)
    else:
        cache.fill_(float("nan"))


def _tables(spec: CaseSpec, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Shuffled int32 tables whose unused entries point far outside the pool, and the number of blocks of the pool."""
    need = [-(-length // spec.block_size) for length in spec.seq_lens]
    total = sum(need) + 2
    order = torch.randperm(total, generator=generator).tolist()
    tables = torch.full((len(need), max([*need, 1])), UNUSED_BLOCK_ID, dtype=torch.int32)
    for i, blocks in enumerate(need):
        for j in range(blocks):
            tables[i, j] = tables[0, j] if i and j < spec.shared_blocks else order.pop()
    return tables, total


def make_case(spec: CaseSpec, device: str = "cpu") -> AttentionCase:
    """Random inputs of `spec` with their float64 answer on the dequantised cache."""
    generator = torch.Generator().manual_seed(spec.seed)
    kv_dtype = spec.kv_dtype or spec.dtype
    tables, num_blocks = _tables(spec, generator)
    k_cache, v_cache = make_pool(spec, num_blocks, kv_dtype, device)
    scale = 1.0 if kv_dtype == spec.dtype else (0.03 if kv_dtype is torch.int8 else 0.25)
    token_scales = [torch.full(k_cache.shape[:3], float("nan"), device=device) for _ in range(2)]
    for cache, scales in zip((k_cache, v_cache), token_scales, strict=True):
        _poison(cache)
        for i, length in enumerate(spec.seq_lens):
            positions = torch.arange(length)
            where = tables[i, positions // spec.block_size].long().to(device), (positions % spec.block_size).to(device)
            rows = torch.randn(length, spec.kv_heads, spec.head_dim, generator=generator).to(device)
            if spec.token_scales:
                scales[where] = token_head_scales(rows, kv_dtype)
                cache[where] = quantise(rows, kv_dtype, scales[where][..., None])
            else:
                cache[where] = quantise(rows, kv_dtype, scale)
    query_lens = spec.query_lens or (1,) * len(spec.seq_lens)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), spec.q_heads, spec.head_dim, generator=generator).to(spec.dtype).to(device)
    factor: float | torch.Tensor = 1.0 if spec.token_scales else scale
    if spec.scale_tensors:
        factor = torch.linspace(scale, 2 * scale, spec.kv_heads, device=device)
    scores = Scores(
        scale=spec.head_dim**-0.5,
        window=spec.window,
        softcap=spec.softcap,
        sinks=torch.randn(spec.q_heads, generator=generator).to(device) if spec.sinks else None,
        k_scale=factor,
        v_scale=factor,
        k_token_scales=token_scales[0] if spec.token_scales else None,
        v_token_scales=token_scales[1] if spec.token_scales else None,
    )
    inputs = (q, k_cache, v_cache, tables.to(device), torch.tensor(spec.seq_lens, dtype=torch.int32, device=device))
    answer = paged_attention(
        *inputs, scale=scores.scale, query_start_loc=starts, k_scale=factor, v_scale=factor,
        k_token_scales=scores.k_token_scales, v_token_scales=scores.v_token_scales, window=spec.window,
        softcap=spec.softcap, sinks=scores.sinks,
    )  # fmt: skip
    return AttentionCase(spec, *inputs, starts.to(device), scores, answer)


@dataclass(frozen=True)
class Difference:
    """How far a result is from its answer: relative norm, 1 - cosine, largest LSE error, and that infinities agree."""

    relative: float
    cosine: float
    lse: float
    infinities_agree: bool

    def within(self, tolerance: float, lse_tolerance: float = 2e-3) -> bool:
        """Whether all parts are inside; NaN never passes."""
        small = self.relative <= tolerance and self.cosine <= tolerance**2 and self.lse <= lse_tolerance
        return small and self.infinities_agree


def difference(out: torch.Tensor, lse: torch.Tensor, answer: tuple[torch.Tensor, torch.Tensor]) -> Difference:
    """Compares in float64; FlashMLA's cosine difference is 1 - 2·a·b / (a·a + b·b)."""
    want, want_lse = answer
    have = out.double()
    norm = want.norm()
    if norm == 0:
        relative = cosine = float(have.norm())
    else:
        relative = float((have - want).norm() / norm)
        cosine = float(1 - 2 * (have * want).sum() / (have.square().sum() + want.square().sum()))
    finite = ~want_lse.isinf()
    error = (lse.double() - want_lse)[finite].abs()
    return Difference(
        relative, cosine, float(error.max()) if error.numel() else 0.0, bool(torch.equal(lse.isinf(), want_lse.isinf()))
    )
