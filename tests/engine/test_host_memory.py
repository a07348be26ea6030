"""A swap pool that the host cannot hold is refused with what would work, and the engine stays as it was."""

from __future__ import annotations

import pytest
import torch

from labkit.engine import host_memory
from labkit.engine.cuda_cache import CudaKVCache, cache_format
from labkit.engine.engine import Engine
from labkit.engine.host_memory import KEPT_FREE_BYTES, available_bytes, check_swap_room, swap_pool
from labkit.engine.simulation import bare_plan
from labkit.errors import DoesNotFitError, LabkitError
from labkit.models import load_model_weights
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

GIB = 2**30
SPEC = ModelSpec(
    name="tiny", architecture="", model_type="llama", layers=(LayerSpec("full", 2, 1, 64),), hidden_size=32,
    intermediate_size=48, vocab_size=64, max_position_embeddings=64, dtype="float32",
)  # fmt: skip


def test_the_smaller_of_machine_and_control_group_counts(tmp_path):
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_bytes(meminfo, group) is None
    meminfo.write_text("MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\n")
    assert available_bytes(meminfo, group) == 4 * GIB
    group.mkdir()
    (group / "memory.max").write_text(f"{3 * GIB}\n")
    (group / "memory.current").write_text(f"{2 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    assert available_bytes(meminfo, group) == 3 * GIB // 2
    (group / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, group) == 4 * GIB
    meminfo.write_text("nonsense")
    assert available_bytes(meminfo, group) is None


def test_the_refusal_names_the_largest_swap_space_that_works(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB + KEPT_FREE_BYTES)
    check_swap_room(0)
    check_swap_room(3 * GIB)
    with pytest.raises(DoesNotFitError, match=r"needed: 3.00 GiB.*available: 3.50 GiB.*swap_space = 3[;,]") as caught:
        check_swap_room(3 * GIB + 1)
    assert caught.value.knob == "swap_space"
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(DoesNotFitError, match="swap_space = 0, preemption_mode = 'recompute'"):
        check_swap_room(1)


def test_a_system_that_gives_no_pinned_memory(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DoesNotFitError, match="no room for the KV of preempted requests") as caught:
        swap_pool(1000, pinned=True)
    assert caught.value.knob == "swap_space"


def test_both_executors_refuse_before_they_allocate(monkeypatch, one_thread):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
    decoder = load_model_weights(SPEC, load_format="dummy")
    config = EngineConfig(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=8, block_size=4)
    plan = bare_plan(SPEC, config, 16, 2**40)
    with pytest.raises(DoesNotFitError, match="swap_space"):
        Engine(decoder, plan)
    engine = Engine(decoder, bare_plan(SPEC, config, 16, 4))
    with pytest.raises(DoesNotFitError, match="swap_space"):
        engine.reconfigure(plan)
    with pytest.raises(LabkitError, match="last reconfiguration failed"):
        engine.memory_parts()
    engine.reconfigure(bare_plan(SPEC, config, 16, 4))
    assert engine.memory_parts()["kv_cache"]
    form = cache_format(SPEC, 4, "auto", torch.float32)
    with pytest.raises(DoesNotFitError, match="swap_space"):
        CudaKVCache(form, 1, 2**40, torch.empty(form.pool_bytes(1), dtype=torch.uint8))
