"""Mutated GGUF files: reader, spec, weights and tokenizer raise labkit's own errors only, in bounded time and memory.

`LABKIT_FUZZ_INPUTS` sets the number of inputs, `LABKIT_FUZZ_SEED` the first seed; a failure names its seed.
"""

from __future__ import annotations

import os
import random
import resource
import time

import torch

from labkit.errors import LabkitError
from labkit.models import DenseAttention, load_model_weights, load_tokenizer
from labkit.specs.gguf import read_gguf
from labkit.specs.gguf_spec import model_from_gguf
from tests.models.mutate_gguf import mutated

NUM_INPUTS = int(os.environ.get("LABKIT_FUZZ_INPUTS", "8000"))
FIRST_SEED = int(os.environ.get("LABKIT_FUZZ_SEED", "0"))
MAX_CPU_SECONDS = 2.0
MAX_GROWTH_KIB = 200 * 1024


def use(path) -> str:
    """All that labkit does with a GGUF file; the name of the step that refused it."""
    steps = ("header", "spec", "tokenizer", "weights", "run")
    step = 0
    try:
        file = read_gguf(path)
        step = 1
        spec = model_from_gguf(file)
        step = 2
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("he 12 <|im_end|>"))
        step = 3
        decoder = load_model_weights(spec, path, "float32")
        step = 4
        positions = torch.arange(min(2, spec.max_position_embeddings))
        tokens = (positions + 3) % spec.vocab_size
        decoder.forward(tokens, positions, DenseAttention(spec, [len(tokens)]))
    except LabkitError:
        return steps[step]
    return "none"


def test_mutated_files(tmp_path, one_thread):
    path = tmp_path / "mutated.gguf"
    refused: dict[str, int] = {}
    use_all = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_INPUTS):
        path.write_bytes(mutated(random.Random(seed)))
        started = time.process_time()
        try:
            step = use(path)
        except BaseException as error:
            raise AssertionError(f"seed {seed} gave {type(error).__name__}: {error}") from error
        spent = time.process_time() - started
        assert spent < MAX_CPU_SECONDS, f"seed {seed} took {spent:.1f} s of CPU time"
        refused[step] = refused.get(step, 0) + 1
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - use_all
    assert growth < MAX_GROWTH_KIB, f"memory grew by {growth} KiB over seeds {FIRST_SEED} to {FIRST_SEED + NUM_INPUTS}"
    # The mutations must reach every step, or they test nothing but the first check.
    assert {"header", "spec", "tokenizer", "none"} <= set(refused), refused
    print(f"\n{NUM_INPUTS} inputs from seed {FIRST_SEED}: refused at {refused}")
