"""Deterministic simulation: 200 seeds, 10⁵ steps and more, every rule checked after each.

Replay a failing seed: ``python -m labkit.engine.fault_simulation --seed N --steps 400``.
"""

from __future__ import annotations

from labkit.engine.fault_simulation import add_up, main, simulate

NUM_SEEDS, STEPS = 200, 400


def test_two_hundred_lives_keep_every_rule():
    total: dict[str, int] = {}
    digests = set()
    for seed in range(NUM_SEEDS):
        report = simulate(seed, STEPS)
        add_up(total, report)
        digests.add(report.digest)
    assert total["num_steps"] >= 100_000
    assert len(digests) > NUM_SEEDS * 0.9
    # The lives must be eventful, or the rules prove nothing.
    assert total["num_preemptions"] > 500
    assert total["num_swapped_blocks"] > 1000
    assert total["num_cached_tokens"] > 10_000
    assert total["num_faults"] > 1000
    assert total["num_reconfigurations"] > 100


def test_same_seed_gives_the_same_event_log():
    differing = [seed for seed in range(NUM_SEEDS) if simulate(seed, 20) != simulate(seed, 20)]
    assert not differing


def test_the_command_prints_seeds_and_counts(capsys):
    assert main(["--seed", "3", "--seeds", "2", "--steps", "50"]) == 0
    assert "seeds 3 to 4" in capsys.readouterr().out


def test_the_command_names_seed_and_step_of_a_broken_rule(monkeypatch, capsys):
    monkeypatch.setattr("labkit.engine.scheduler.Scheduler.advance", lambda self, batch: None)
    assert main(["--seed", "7", "--steps", "200"]) == 1
    assert "seed 7, step" in capsys.readouterr().err
