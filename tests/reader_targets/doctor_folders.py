"""One file of a good model folder mutated: the doctor must answer, whatever it holds."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path

from labkit.doctor.error_text import explain_error_text
from labkit.doctor.model_folder import examine_folder
from tests.doctor.folders import good_folder
from tests.reader_fuzz import ReaderTarget, mutate_bytes, mutate_json

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
)  # fmt: skip
NAMES = ("auto_map", "quantization_config", "text_config", "torch_dtype", "added_tokens", "vocab", "metadata",
         "quant_method")  # fmt: skip
LINES = (
    "ImportError: libcudart.so.12: cannot open shared object file", "GLIBC_2.34' not found",
    "Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB)",
    "unrecognized arguments: --swap-space 4", "undefined symbol: _ZN5torch3jit", "No space left on device /dev/shm",
)  # fmt: skip


def make_folder_file(rng: random.Random) -> bytes:
    """The name of a file, a line break, and its mutated content."""
    name = rng.choice(FILES)
    content = _good(name)
    if name.endswith(".json") and rng.random() < 0.8:
        value = json.loads(content)
        for _ in range(rng.randint(1, 3)):
            value = mutate_json(value, rng, NAMES)
        content = json.dumps(value).encode()
    else:
        content = mutate_bytes(content, rng)
    return name.encode() + b"\n" + content


def _good(name: str) -> bytes:
    return _seeds()[name]


@functools.lru_cache(maxsize=1)
def _seeds() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        folder = good_folder(Path(place) / "model", sharded=True)
        return {name: (folder / name).read_bytes() for name in FILES}


def read_folder_file(path: Path) -> object:
    """Examine a good folder in which that one file is replaced."""
    name, _, content = path.read_bytes().partition(b"\n")
    folder = path.parent / "model"
    if not folder.is_dir():
        good_folder(folder, sharded=True)
    kept = (folder / name.decode()).read_bytes()
    (folder / name.decode()).write_bytes(content)
    try:
        return json.dumps(examine_folder(folder).to_dict())
    finally:
        (folder / name.decode()).write_bytes(kept)


def make_error_text(rng: random.Random) -> bytes:
    """Known lines, mutated and joined."""
    lines = [mutate_bytes(rng.choice(LINES).encode(), rng) for _ in range(rng.randint(1, 4))]
    return (b"\n" if rng.random() < 0.7 else b" ").join(lines) * rng.choice((1, 1, 50))


def read_error_text(path: Path) -> object:
    """Explain it."""
    return json.dumps(explain_error_text(path.read_bytes().decode("utf-8", "replace")).to_dict())


TARGETS = (
    ReaderTarget("doctor folder", make_folder_file, read_folder_file, ".bin"),
    ReaderTarget("doctor error text", make_error_text, read_error_text, ".txt"),
)
