"""GGUF: header, spec, tokenizer, weights and one forward pass over mutated files."""

from __future__ import annotations

from pathlib import Path

from labkit.errors import FileFormatError
from tests.models.mutate_gguf import mutated
from tests.reader_fuzz import ReaderTarget
from tests.specs.test_gguf_mutations import use


def read(path: Path) -> object:
    """All that labkit does with a GGUF file."""
    step = use(path)
    if step != "none":
        raise FileFormatError(f"refused at {step}")
    return step


TARGETS = (ReaderTarget("gguf", mutated, read, ".gguf"),)
