"""Weights divided over ranks give what one rank gives; the ranks are threads that sum with each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from labkit.errors import OutOfRangeError
from labkit.memory.tensors import vocabulary_rows
from labkit.models import DenseAttention, load_model_weights
from labkit.models.ranks import OneRank
from labkit.specs.model_loading import load_model
from tests.models.test_decoder_families import save_random_model


class ThreadRanks:
    """Ranks that are threads: each leaves its tensor, all read those of the others."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * size
        self._barrier = Barrier(size)

    def of(self, rank: int) -> ThreadRank:
        return ThreadRank(rank, self)

    @property
    def size(self) -> int:
        return len(self._parts)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = tensor.clone()
        self._barrier.wait(30)
        parts = list(self._parts)
        self._barrier.wait(30)
        return parts


class ThreadRank(OneRank):
    def __init__(self, rank: int, ranks: ThreadRanks) -> None:
        super().__init__(rank, ranks.size)
        object.__setattr__(self, "ranks", ranks)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.ranks.exchange(self.rank, partial)).sum(0)

    def all_gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        return torch.cat(self.ranks.exchange(self.rank, part), dim=1)[:, :num_columns].contiguous()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama-biases", "llama-multi-query", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "qwen3-moe"]
)
def test_ranks_together_equal_one(name, size, tmp_path, one_thread):
    save_random_model(name, tmp_path)
    spec = load_model(tmp_path)
    tokens = torch.arange(24)

    def run(decoder) -> torch.Tensor:
        return decoder.logits(decoder.forward(tokens, tokens, DenseAttention(spec, [24])))

    expected = run(load_model_weights(spec, tmp_path, "float32"))
    ranks = ThreadRanks(size)
    decoders = [load_model_weights(spec, tmp_path, "float32", ranks=ranks.of(rank)) for rank in range(size)]
    layer = decoders[0].weights.layers[0]
    heads, kv_heads = spec.layers[0].num_heads // size, max(1, spec.layers[0].num_kv_heads // size)
    assert decoders[0].weights.embedding.shape == (vocabulary_rows(spec.vocab_size, size), 64)
    assert layer.qkv.shape == ((heads + 2 * kv_heads) * spec.layers[0].head_dim, 64)
    if layer.moe is None:
        assert layer.gate_up.shape == (2 * 96 // size, 64)
        assert layer.down.shape == (64, 96 // size)
    else:
        assert layer.moe.gate_up.shape == (8, 2 * 48 // size, 64)
    with ThreadPoolExecutor(size) as pool:
        for logits in pool.map(run, decoders):
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_sizes_that_do_not_divide_are_refused(tmp_path, one_thread):
    save_random_model("llama", tmp_path)
    with pytest.raises(OutOfRangeError) as caught:
        load_model_weights(load_model(tmp_path), tmp_path, ranks=OneRank(0, 3))
    assert caught.value.knob == "tensor_parallel_size"
