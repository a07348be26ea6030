"""Tests of this folder need an NVIDIA card; without one they are skipped and say so."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        here = [item for item in items if "tests/gpu/" in str(item.path).replace("\\", "/")]
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA card: torch.cuda.is_available() is False"))
