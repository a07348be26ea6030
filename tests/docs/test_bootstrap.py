"""The installer behind `make demo`: what its line of progress says of pip's words."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / "tools" / "bootstrap.py"
RETRY = (
    "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after connection broken "
    "by 'NameResolutionError(\"HTTPSConnection(host='download.pytorch.org', port=443): Failed to resolve\")'\n"
)


def progress(total: int):
    loaded = importlib.util.spec_from_file_location("bootstrap", PLACE)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return module.Progress(total)


def test_packages_are_counted_and_an_index_that_does_not_answer_is_named(capsys):
    found = progress(10)
    for line in ("Collecting torch\n", "  Collecting numpy>=2\n", "Downloading x\n"):
        found.read(line)
    found.show()
    assert "collecting 2 of about 10 packages" in capsys.readouterr().out
    for _ in range(5):
        found.read(RETRY)
    found.show()
    assert "download.pytorch.org does not answer (5 tries)" in capsys.readouterr().out
    found.read("Installing collected packages: a, b, c\n")
    found.show()
    assert "unpacking 3 packages" in capsys.readouterr().out
