"""The launches that are counted compute what the reference computes, on triton's interpreter."""

import dataclasses

import pytest

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.kernel_launches import CardCounter, make_inputs, prepare_launch

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a card the kernels run there: tests/gpu", allow_module_level=True)

reference = pytest.importorskip("labkit_kernels.reference")


def shape(lens=(40, 33), queries=(1, 1), shared=0, **rest):
    return AttentionShape(
        BatchShape(lens, queries, shared), num_heads=4, num_kv_heads=2, head_dim=64, **{"block_size": 16, **rest}
    )


CASES = [
    ("full", shape()), ("full", shape(shared=32, kv_cache_dtype="int8_per_token_head")),
    ("one program for each query head", shape()), ("tile = block", shape()), ("no split", shape(block_size=8)),
    ("prefill", shape((40, 33), (20, 5), 16)), ("shared prefix", shape((40, 37), (1, 1), 35)),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_launch_equals_reference(variant, case):
    inputs = make_inputs(case, "cpu")
    inputs = dataclasses.replace(inputs, q=inputs.q.float())
    if inputs.k_cache.dtype is torch.bfloat16:
        # Values of one size, so that a key from a wrong place is seen; the interpreter does not round to bfloat16.
        k_cache, v_cache = (torch.randn(inputs.k_cache.shape) for _ in range(2))
        inputs = dataclasses.replace(inputs, k_cache=k_cache, v_cache=v_cache)
    out = prepare_launch(case, variant, inputs)()
    scores = inputs.scores
    expected, _ = reference.paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.tables, inputs.lens, scale=scores.scale,
        query_start_loc=inputs.starts, k_token_scales=scores.k_token_scales, v_token_scales=scores.v_token_scales,
    )  # fmt: skip
    assert expected.abs().max() > 0.1
    assert torch.allclose(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_tables_share_what_the_shape_says():
    case = shape((100, 90, 80), (1, 1, 1), 50)
    tables = make_inputs(case, "cpu").tables
    assert (tables[:, :3] == tables[0, :3]).all()
    own = torch.cat([tables[0, 3:7], tables[1, 3:6], tables[2, 3:5]])
    assert len(own.unique()) == len(own)
    assert not set(own.tolist()) & set(tables[0, :3].tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_e5m2", "float16"])
def test_caches_are_finite(dtype):
    inputs = make_inputs(shape(kv_cache_dtype=dtype), "cpu")
    assert inputs.k_cache.float().isfinite().all()
    assert inputs.k_cache.float().abs().max() < 3
    assert not torch.equal(inputs.k_cache.float(), inputs.v_cache.float())


def test_what_cannot_be_launched():
    with pytest.raises(UnsupportedError, match="nvfp4"):
        make_inputs(shape(kv_cache_dtype="nvfp4"), "cpu")
    case = shape(block_size=8)
    with pytest.raises(OutOfRangeError, match="tile"):
        prepare_launch(case, "tile = block", make_inputs(case, "cpu"))
    case = shape(queries=(1, 2))
    with pytest.raises(UnsupportedError, match="query length"):
        prepare_launch(case, "full", make_inputs(case, "cpu"))
    with pytest.raises(UnsupportedError, match="card"):
        CardCounter()
