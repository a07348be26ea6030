"""labkit imports on a machine with neither GPU nor triton, and planning loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
PLAN = """
import labkit
model = labkit.load_model("HuggingFaceTB/SmolLM2-135M-Instruct")
plan = labkit.plan(model, labkit.load_gpu("cpu"), labkit.EngineConfig())
assert plan.num_gpu_blocks > 0
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_planning_works_without_torch_triton_nvml_or_plotly():
    blocked = {"torch", "triton", "pynvml", "plotly", "ipywidgets", "pandas", "transformers"}
    done = run_python(BLOCK.format(blocked=blocked) + PLAN)
    assert done.returncode == 0, done.stderr


def test_planning_does_not_load_torch_or_pandas():
    done = run_python(PLAN + "import sys; print(sorted({'torch', 'pandas', 'plotly'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("module", ["labkit.engine", "labkit.models", "labkit.experiments", "labkit.widgets"])
def test_every_room_imports_without_triton_and_nvml(module):
    done = run_python(BLOCK.format(blocked={"triton", "pynvml"}) + f"import {module}")
    assert done.returncode == 0, done.stderr


# Floors below which a published vulnerability or a known break is open.
FLOORS = {
    "torch": "2.11",
    "transformers": "5.3",
    "jinja2": "3.1.6",
    "jupyterlab": "4.6.2",
    "jupyter-server": "2.20",
    "safetensors": "0.4",
}


def test_dependency_floors_keep_known_vulnerabilities_out():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {(requirement := Requirement(text)).name: requirement.specifier for text in project["dependencies"]}
    for name, floor in FLOORS.items():
        lowest = min(Version(clause.version) for clause in stated[name] if clause.operator == ">=")
        assert lowest >= Version(floor), name


def test_every_dependency_is_pinned_for_development():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    assert not {canonicalize_name(Requirement(text).name) for text in project["dependencies"]} - pinned
