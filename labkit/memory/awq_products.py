"""What labkit's 4-bit products take beside their result: unpacked weights, or parts that are summed afterwards.

As `labkit_kernels.awq_words`, which Hopper has, and `labkit_kernels.awq_matmul` decide it; a test compares them.
"""

from __future__ import annotations

from labkit.memory.kernel_settings import architecture, sm_count
from labkit.specs.gpu_spec import GpuSpec

# From so many rows on the weights are unpacked for torch's product: words along the inputs, and along the outputs.
UNPACKED_WORDS_FROM, UNPACKED_FROM = 257, 129
WORDS_ARCHITECTURE, WORDS_BLOCK = 90, 128
MOST_PARTS, MANY_OUTPUTS, PART_BYTES = 16, 16384, 4
TILE_ROWS, TILE_OUTPUTS = 16, 256


def awq_scratch_bytes(gpu: GpuSpec, group_size: int, rows: int, inputs: int, outputs: int, element: int) -> int:
    """Bytes for a moment of x `[rows, inputs]` in numbers of `element` bytes times `[inputs, outputs]` in 4 bits.

    Args:
        group_size: inputs that share a scale; 0 for all.
    """
    group = group_size or inputs
    if architecture(gpu) >= WORDS_ARCHITECTURE and group % WORDS_BLOCK == 0:
        unpacked_from, parts = UNPACKED_WORDS_FROM, _words_parts(gpu, rows, inputs, outputs)
    else:
        unpacked_from, parts = UNPACKED_FROM, _parts(gpu, group, rows, inputs, outputs)
    if rows >= unpacked_from:
        return inputs * outputs * element
    return parts * rows * outputs * PART_BYTES if parts > 1 else 0


def _words_parts(gpu: GpuSpec, rows: int, inputs: int, outputs: int) -> int:
    """Parts of the inputs of `words_matmul`: as many as the card runs at once, each as short as that allows."""
    if rows <= 8 or (rows <= 16 and outputs > MANY_OUTPUTS):
        tile_outputs, tile_rows, at_once = 64, 8 if rows <= 8 else 16, 8
    elif rows <= 64:
        tile_outputs, tile_rows, at_once = 128, max(16, 1 << (rows - 1).bit_length()), 3 if rows <= 32 else 2
    else:
        tile_outputs, tile_rows, at_once = 256, 128, 1
    tiles, blocks = -(-outputs // tile_outputs) * -(-rows // tile_rows), inputs // WORDS_BLOCK
    most = max(1, min(MOST_PARTS, blocks, sm_count(gpu) * at_once // tiles))
    return -(-blocks // -(-blocks // most))


def _parts(gpu: GpuSpec, group: int, rows: int, inputs: int, outputs: int) -> int:
    """Parts of the inputs of `awq_matmul`: twice as many until each multiprocessor has two tiles."""
    step = next(size for size in (128, 64, 32) if group % size == 0)
    tiles, parts = -(-rows // TILE_ROWS) * -(-outputs // TILE_OUTPUTS), 1
    while parts < MOST_PARTS and tiles * parts < 2 * sm_count(gpu) and inputs // (2 * parts * step) >= 1:
        parts *= 2
    return parts
