"""Bytes that steps of the GPU executor allocate, beside what the planner says; prints one JSON object.

usage: TRITON_INTERPRET=1 interpreted_memory.py. Kernels are not run at all: what they are given is allocated before.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from triton.runtime.interpreter import InterpretedFunction

from labkit.engine.cuda_executor import CudaExecutor
from labkit.engine.cuda_inputs import padding_step
from labkit.engine.cuda_profile import prompt_step
from labkit.engine.memory_meter import peak_bytes
from labkit.engine.simulation import bare_plan
from labkit.memory.caching_allocator import PeakMeter
from labkit.memory.card_parts import activation_bytes, table_bytes
from labkit.memory.kernel_settings import attention_settings
from labkit.memory.step_buffers import StepBuffers, step_model
from labkit.memory.step_shapes import StepShape, mixed_shapes, prompt_shape
from labkit.models.loading import load_model_weights
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec, WeightFormat

# As many programs at once as the kernels take a card that is not there for.
SLOTS = 8
CARD = GpuSpec("interpreter", 2**34, sm_count=SLOTS, compute_capability="9.0")
KNOBS = {"max_model_len": 2048, "max_num_seqs": 128, "block_size": 16, "dtype": "float32"}


def skip_kernels():
    InterpretedFunction.__getitem__ = lambda self, grid: lambda *args, **kwargs: None


def make_spec(**changes):
    layer = LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=64)
    fields = {
        "name": "tiny", "architecture": "", "model_type": "llama", "layers": (layer,) * 3, "hidden_size": 256,
        "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 2048, "dtype": "float32",
        "eos_token_ids": (0,),
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def step_peak(facts, shape):
    """Most bytes of one step, its block tables included, as the planner says."""
    meter = PeakMeter()
    StepBuffers(facts, meter).run(shape)
    return meter.peak_bytes


def compare(spec, max_tokens, **knobs):
    config = EngineConfig(**{**KNOBS, "max_num_batched_tokens": max_tokens, **knobs})
    decoder = load_model_weights(
        spec, dtype=config.dtype, quantization=config.quantization, load_format="dummy", pack_weights=False,
        dequantize=False,
    )  # fmt: skip
    plan = bare_plan(spec, config, 200, 0)
    executor = CudaExecutor(decoder, plan)
    memory, facts = executor._allocated, step_model(spec, CARD, config)

    def measured(step):
        with torch.inference_mode():
            tensors = memory.staging.send(step)
            return peak_bytes(lambda: run(tensors))

    def run(tensors):
        executor._compute(memory, tensors)
        # The profiler knows the size only of what goes while it looks.
        memory.attention._rows = None

    layer = spec.layers[0]
    group = layer.num_heads // layer.num_kv_heads
    use = attention_settings(CARD, "decode", config.kv_cache_dtype, layer.head_dim, group, config.max_num_seqs)
    narrow = dataclasses.replace(CARD, sm_count=SLOTS / use["ctas_per_sm"])
    tables = sum(table_bytes(step_model(spec, narrow, config)).values())
    rows = {"tables": [tables, memory.tables_bytes]}
    largest = prompt_shape(config)
    rows["prompts"] = [step_peak(facts, largest), measured(prompt_step(plan, memory.tables))]
    rows["activation"] = [
        activation_bytes(facts, PeakMeter),
        rows["prompts"][1] - 4 * largest.num_prompts * facts.table_blocks,
    ]
    seqs = int(config.max_num_seqs or 1)
    for name, shape in (
        ("mixed", mixed_shapes(seqs, max_tokens, largest=True)[-1]), ("decode", StepShape(seqs, seqs, 0, seqs))
    ):  # fmt: skip
        rows[name] = [step_peak(facts, shape), measured(padding_step(shape, memory.tables))]
    return rows


def gemma(*layers, **changes):
    """A model without fused kernels: offset norms in float32, norms behind each block, scaled embeddings."""
    return make_spec(
        norm_offset=True, sandwich_norms=True, norms_per_layer=4, hidden_act="gelu_pytorch_tanh", layers=layers,
        scale_embeddings=True, model_type="gemma2", **changes,
    )  # fmt: skip


def awq(group_size, max_tokens):
    """The largest step of a model whose MLP in 4 bits needs the most; words along the inputs for groups of 128."""
    fmt = WeightFormat("awq", 4, group_size, has_zero_points=True)
    spec = make_spec(weight_format=fmt, intermediate_size=1024, layers=(LayerSpec("full", 2, 2, 64),))
    # Few rows of logits, so that the sampler needs less.
    rows = compare(spec, max_tokens, dtype="bfloat16", quantization="awq", max_num_seqs=4)
    return {name: rows[name] for name in ("prompts", "activation")}


def main():
    skip_kernels()
    torch.set_num_threads(1)
    wide = LayerSpec(kind="full", num_heads=8, num_kv_heads=2, head_dim=128)
    wider = dataclasses.replace(wide, num_heads=16, num_kv_heads=4)
    window = dataclasses.replace(wide, kind="sliding", window=64)
    print(
        json.dumps(
            {
                "widest in attention": compare(make_spec(), 512),
                "widest in the MLP": compare(make_spec(intermediate_size=2048), 512),
                "widest in sampling": compare(make_spec(vocab_size=32768), 128),
                "norm of heads, long tables": compare(
                    make_spec(qk_norm=True, layers=(wide,) * 4), 256, max_model_len=8192
                ),
                "8-bit KV": compare(make_spec(), 256, kv_cache_dtype="int8_per_token_head"),
                "plain, widest in the MLP": compare(gemma(window, wide, window, intermediate_size=4096), 512),
                "plain, widest in attention": compare(gemma(wider, wider, wider), 1024),
                "plain, heads with a norm": compare(gemma(wider, wider, wider, qk_norm=True), 1024),
                "plain, soft-capped logits": compare(
                    gemma(wide, wide, vocab_size=65536, final_softcap=20.0), 128, dtype="bfloat16"
                ),
                "4-bit words along the inputs": awq(128, 256),
                "4-bit words along the inputs, unpacked": awq(128, 384),
                "4-bit words along the outputs": awq(64, 128),
                "4-bit words along the outputs, unpacked": awq(64, 256),
                "no gate, a layer without rotation": compare(
                    make_spec(gated_mlp=False, layers=(wider, dataclasses.replace(wider, uses_rope=False))), 1024
                ),
            }
        )
    )


main()
