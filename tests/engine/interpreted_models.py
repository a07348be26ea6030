"""Embeddings, experts and 4-bit weights through the GPU executor in Triton's interpreter; prints one JSON object.

usage: TRITON_INTERPRET=1 interpreted_models.py. Own process: kernels imported for the interpreter stay interpreted.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.cuda_executor import CudaExecutor
from labkit.engine.cuda_forward import why_eager
from labkit.engine.embedding import embed
from labkit.engine.simulation import bare_plan
from labkit.models.loading import load_model_weights
from labkit.models.quantized import AwqMatrix
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec, WeightFormat

LAYER = LayerSpec(kind="full", num_heads=2, num_kv_heads=1, head_dim=64)
SPEC = ModelSpec(
    name="tiny", architecture="", model_type="qwen3", layers=(LAYER,), hidden_size=64, intermediate_size=64,
    vocab_size=101, max_position_embeddings=64, dtype="float32", eos_token_ids=(0,), qk_norm=True,
)  # fmt: skip
PROMPTS = [[5, 9, 31], [7], list(range(20, 34))]


def make_engine(decoder, on_card: bool) -> Engine:
    config = EngineConfig(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=12, block_size=4)
    plan = bare_plan(decoder.spec, config, 32, 0)
    return Engine(decoder, plan, executor=CudaExecutor(decoder, plan) if on_card else None)


def vectors(decoder) -> float:
    """Largest difference between the executors' embeddings, over all poolings."""
    engines = [make_engine(decoder, on_card) for on_card in (True, False)]
    both = [[embed(engine, PROMPTS, pooling=kind) for kind in ("last", "mean", "cls")] for engine in engines]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(*both, strict=True))


def tokens(decoder, on_card: bool) -> list[list[int]]:
    engine = make_engine(decoder, on_card)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(EngineRequest(index, tuple(prompt), SamplingParams(max_tokens=2, ignore_eos=True)))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
    return [outputs[index] for index in range(len(PROMPTS))]


def make_decoder(spec: ModelSpec, dtype: str = "float32", **rest):
    decoder = load_model_weights(spec, dtype=dtype, load_format="dummy", pack_weights=False, **rest)
    # Large embeddings keep greedy choices apart, so that rounding cannot swap them.
    torch.manual_seed(1)
    decoder.weights.embedding.normal_(0, 0.3)
    return decoder


def main() -> None:
    torch.set_num_threads(1)
    plain = make_decoder(SPEC)
    experts = dataclasses.replace(
        SPEC, layers=(dataclasses.replace(LAYER, num_experts=4),), moe=MoeSpec(4, 2, 32), model_type="qwen3_moe"
    )
    moe = make_decoder(experts)
    small = SPEC.replace(weight_format=WeightFormat("awq", 4, 32, True))
    awq, undone = (make_decoder(small, "float16", dequantize=undo) for undo in (False, True))
    layer = awq.weights.layers[0]
    assert isinstance(layer.qkv, AwqMatrix)
    x = torch.randn(5, 64, dtype=torch.float16)
    print(
        json.dumps(
            {
                "vectors": vectors(plain),
                "experts": [tokens(moe, True), tokens(moe, False)],
                "why eager": why_eager(moe),
                "awq runs the kernel": layer.qkv.kernel is not None,
                "awq": float((layer.qkv.project(x) - undone.weights.layers[0].qkv.matmul(x.t()).t()).abs().max()),
                "awq tokens": [tokens(awq, True), tokens(undone, False)],
            }
        )
    )


main()
