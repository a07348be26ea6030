"""The block size experiment without a browser: it runs what the box says and concludes from what came out."""

from __future__ import annotations

from labkit.widgets import BlockSizeExperiment
from tests.widgets.fake_session import FakeSession


def test_it_runs_each_block_size_and_concludes_from_the_runs():
    session = FakeSession()
    experiment = BlockSizeExperiment(session, (8, 32))
    assert experiment.conclusion.text == "No run has reserved a block yet."
    experiment.bar.sweep.click()
    assert experiment.wait(20)
    assert [record.config.block_size for record in session.records()] == [8, 32, 32, 8]
    assert experiment.chart.figure["data"][0]["x"] == ["8", "32"]
    assert experiment.conclusion.text.startswith("Measured: from 8 to 32 tokens a block")
    assert len(experiment.table.rows) == 2
    assert experiment.bar.status.text == "4 runs finished."


def test_a_wrong_block_size_runs_nothing():
    session = FakeSession()
    experiment = BlockSizeExperiment(session, (0,))
    experiment.run()
    assert experiment.bar.status.level == "bad"
    assert session.records() == ()


def test_cancel_keeps_the_block_sizes_that_are_finished():
    session = FakeSession(pause_s=0.02, num_steps=50)
    experiment = BlockSizeExperiment(session, (8, 16, 32, 64))
    experiment.run()
    while not session.records():
        assert not experiment.wait(0.05)
    experiment.bar.cancel.click()
    assert experiment.wait(10)
    assert 1 <= len(session.records()) < 4
    assert experiment.records[0].status == "finished"
