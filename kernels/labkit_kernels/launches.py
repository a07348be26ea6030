"""`Launches`: what a wrapper has launched before is launched again without its checks and without Triton's binder.

Both look at every argument at each call, 50 to 90 µs of host for a kernel that runs 5. All that they look at is how the
arguments look: what is new from call to call are addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

# Each number of rows is an entry of its own, of 4 KiB at most.
MOST_LAUNCHES = 1024
# Triton compiles for addresses that are multiples of this, and for others.
ALIGNMENT_BYTES = 16


class Fixed(Protocol):
    """Tensors that stay as they are, with the numbers beside them: their looks and addresses are worked out once."""

    looks: tuple[Hashable, ...]
    addresses: tuple[int, ...]


Part = torch.Tensor | Fixed | None


def look(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """All of a tensor that checks, settings and the choice of a compiled variant can depend on; not its address."""
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT_BYTES, tensor.get_device()
    )  # fmt: skip


def looks_of(*values: object) -> tuple[Hashable, ...]:
    """`look` of each tensor, other values as they are."""
    return tuple(look(value) if isinstance(value, torch.Tensor) else value for value in values)


def addresses_of(*values: object) -> tuple[int, ...]:
    """Address of each tensor; 0 for what stands where a kernel could have one."""
    return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in values)


class Launches:
    """Launches of one wrapper, by how their arguments looked.

    A wrapper names its kernel's pointers as `parts`, in the kernel's order: tensors, `Fixed` for several in a row, None
    for a pointer that is not read. `settings` are all other values that its checks and the launch depend on.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Callable[[list[int]], None]] = {}

    def again(self, parts: tuple[Part, ...], *settings: Hashable) -> bool:
        """Launch what was launched when the arguments last looked like this; False where they never did."""
        key, addresses = _facts(parts, settings)
        launch = self._known.get(key)
        if launch is None:
            return False
        launch(addresses)
        return True

    def first(
        self, parts: tuple[Part, ...], settings: tuple, kernel, grid: tuple[int, ...], *arguments: object, **options
    ) -> None:
        """Launch through Triton on checked arguments, pointers first, and keep it for `again`.

        Kept is only what was compiled, not what the interpreter runs, and only where `parts` are the pointers: one that
        the wrapper made for this call would not come again.
        """
        compiled = kernel[grid](*arguments, **options)
        key, addresses = _facts(parts, settings)
        pointers = addresses_of(*arguments[: len(addresses)])
        if isinstance(compiled, CompiledKernel) and all(
            address in (0, pointer) for address, pointer in zip(addresses, pointers, strict=True)
        ):
            if len(self._known) >= MOST_LAUNCHES:
                self._known.clear()
            constants = (options[name] for name in kernel.arg_names[len(arguments) :])
            self._known[key] = _repeated(compiled, grid, (*arguments[len(addresses) :], *constants))


def _facts(parts: tuple[Part, ...], settings: tuple) -> tuple[tuple, list[int]]:
    """How a call looks, and the addresses of its pointers."""
    looks, addresses = [*settings], []
    for part in parts:
        if part is None:
            looks.append(None)
            addresses.append(0)
        elif isinstance(part, torch.Tensor):
            # As `look`, which would take the address once more.
            address = part.data_ptr()
            looks.append((part.dtype, part.shape, part.stride(), address % ALIGNMENT_BYTES, part.get_device()))
            addresses.append(address)
        else:
            looks += part.looks
            addresses += part.addresses
    return tuple(looks), addresses


def _repeated(compiled: CompiledKernel, grid: tuple[int, ...], rest: tuple) -> Callable[[list[int]], None]:
    """The launch of a compiled kernel on the device of now and its stream of then; `rest` follows the pointers."""
    device = driver.active.get_current_device()
    stream, run = driver.active.get_current_stream, compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    x, y, z = (*grid, 1, 1)[:3]

    def launch(addresses: list[int]) -> None:
        run(x, y, z, stream(device), function, metadata, None, None, None, *addresses, *rest)

    return launch
