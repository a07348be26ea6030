"""Names of a package that load on first use, so that importing the package costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazy_attribute(package: str, places: Mapping[str, str], name: str) -> Any:
    """What a package's `__getattr__` returns: `name` from the module of the package that `places` gives for it.

    Raises:
        AttributeError: `places` does not have the name.
    """
    if name not in places:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(f"{package}.{places[name]}"), name)
