"""What is told while weights are read: bytes of each tensor, up to all that the file holds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from labkit.models import load_model_weights
from labkit.models.ranks import OneRank
from labkit.models.read_tally import bytes_to_read
from labkit.specs.model_loading import load_model
from labkit.specs.model_spec import WeightFormat
from tests.models.test_decoder_families import save_random_model


class Told(list):
    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.append((done_bytes, total_bytes))


def stored_elements(folder) -> int:
    """Elements of the file, each tied matrix once: what transformers wrote, not what labkit counts."""
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "phi3", "gemma2", "qwen3-moe"])
@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_rise_to_those_of_the_file(name, dtype, element, tmp_path):
    save_random_model(name, tmp_path)
    told = Told()
    load_model_weights(load_model(tmp_path), tmp_path, dtype, on_read=told)
    assert told == sorted(set(told)), "each tensor adds to the bytes"
    assert {total for _, total in told} == {element * stored_elements(tmp_path)}
    assert told[-1][0] == told[-1][1]
    assert len(told) > 10


def test_a_rank_reads_its_own_part(tmp_path):
    save_random_model("qwen3", tmp_path)
    whole, told = stored_elements(tmp_path) * 4, Told()
    load_model_weights(load_model(tmp_path), tmp_path, "float32", ranks=OneRank(0, 2), on_read=told)
    done, total = told[-1]
    assert whole / 2 < done <= total < whole
    assert done > 0.9 * total


def test_formats_count_what_is_read_not_what_is_kept():
    """Llama 3.1 8B has 8,030,261,248 parameters; two matrices of the vocabulary and 65 norms are no words of 4 bits."""
    spec = load_model("meta-llama/Llama-3.1-8B-Instruct")
    parameters = 8_030_261_248
    assert bytes_to_read(spec, WeightFormat(), "bfloat16", 1) == 2 * parameters
    fp8 = WeightFormat("fp8", 8, 0, scale_bytes=4)
    assert bytes_to_read(spec, fp8, "bfloat16", 1) == 2 * parameters, "fp8 is made of 16-bit weights"
    awq = bytes_to_read(spec, WeightFormat("awq", 4, 128, True), "float16", 1)
    matrices = parameters - 2 * 128_256 * 4096 - 65 * 4096
    # A scale of two bytes and a zero point of half a byte for 128 words of half a byte.
    assert awq == 2 * (parameters - matrices) + matrices // 2 + matrices // 128 * 2 + matrices // 256


def test_what_the_listener_raises_ends_the_reading(tmp_path):
    save_random_model("llama-biases", tmp_path)
    told = Told()

    def stop(done_bytes: int, total_bytes: int) -> None:
        told(done_bytes, total_bytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model_weights(load_model(tmp_path), tmp_path, torch.float32, on_read=stop)
    assert len(told) == 1
