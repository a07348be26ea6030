"""The panel of a card that is not in this machine: Run and Sweep simulate."""

from __future__ import annotations

import labkit
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel
from tests.widgets.fake_session import FakeSession


def test_a_card_that_is_not_here_is_simulated(tmp_path):
    traffic = labkit.load_workload("azure-2023-conv", limit=4, max_input_tokens=64, max_output_tokens=8)
    with labkit.Session("Qwen/Qwen3-8B", "A10", traffic, store=str(tmp_path / "s.sqlite3")) as session:
        panel = Panel(session, EngineConfig(max_model_len=4096))
        assert panel.run_bar.is_virtual.options[0][0] == "a virtual A10 (simulated)"
        panel.run()
        assert panel.wait(60)
        assert panel.run_bar.status.text.startswith("1 simulation finished in ")
        assert panel.runs.rows[0][1] == "finished, simulated"
        assert panel.stale.text == ""
        assert panel.pictures.tabs.value == "KV over time"
        assert session.store.get(session.records()[0].run_id).origin == "simulated"
        panel.run_bar.sweep_text.value = "16, 32"
        panel.sweep()
        assert panel.wait(60)
        assert [record.config.block_size for record in session.records()] == [16, 16, 32]
        panel.knobs["max_model_len"].value = 40960
        panel.run()
        assert panel.wait(60)
        assert "would work: max_model_len = " in panel.run_bar.status.text
        panel.settle()
    assert len(Panel(FakeSession()).run_bar.is_virtual.options) == 1, "a CPU session has nothing to simulate"
