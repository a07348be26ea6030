"""Makes data/gguf_quants.npz: random blocks of each ggml type and their values by the gguf package.

Needs `pip install gguf==0.19.0`; labkit itself and its tests do not.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SCALE_BYTES = {"F16": (0,), "BF16": (), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def main() -> None:
    rng = np.random.default_rng(11)
    arrays = {}
    for kind in KINDS:
        length, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = rng.integers(0, 256, (1024 // length, num_bytes), dtype=np.uint8)
        for start in SCALE_BYTES.get(kind, (0,)):
            halves = rng.standard_normal(len(blocks)).astype("<f2")
            blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).astype(np.float32)
        arrays[f"{kind}_blocks"], arrays[f"{kind}_values"] = blocks, values.reshape(-1)
    np.savez_compressed(Path(__file__).with_name("data") / "gguf_quants.npz", **arrays)


if __name__ == "__main__":
    main()
