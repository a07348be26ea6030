"""Versions and machine: what is not there is said, and never 0."""

import psutil

from labkit.versions import machine, versions


def test_versions_name_packages_python_and_machine():
    found = versions(num_threads=1)
    assert found["labkit"]
    assert found["python"].startswith("3.")
    assert found["numpy"].startswith("2.")
    assert "vllm" not in found
    assert list(found) == sorted(found)
    assert found["machine"].endswith("1 thread")
    assert " cores" in found["machine"]
    assert machine(4).endswith("4 threads")
    assert f"{psutil.virtual_memory().total / 2**30:.1f} GiB" in machine()
