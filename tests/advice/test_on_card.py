"""What `labkit bench claims` does on a card, as far as a machine without one can run it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from labkit.advice.claims import on_card
from labkit.engine import bench_gpu
from labkit.engine.bench_gpu import STEP_COLUMNS
from labkit.errors import UnsupportedError


class FakeEngine:
    """Serves 3 steps for whatever is queued; `running` requests decode in each."""

    def __init__(self, running: int):
        self.running, self.left, self.closed = running, 0, False

    @property
    def has_unfinished(self):
        return self.left > 0

    def step(self):
        """The first token of request n comes in step n + 1 of 3."""
        self.left -= 1
        outputs = tuple(SimpleNamespace(request_id=at) for at in range(3 - self.left))
        return SimpleNamespace(num_running=self.running, num_decode_tokens=self.running, outputs=outputs)

    def close(self):
        self.closed = True


class FakeBench:
    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))

    def __init__(self, model, say):
        self.model, self.say, self.steps, self.engines, self.asked = model, say, {}, [], []

    def engine(self, **knobs):
        self.asked.append(knobs)
        self.engines.append(FakeEngine(4))
        self.engines[-1].plan = SimpleNamespace(num_gpu_blocks=7)
        return self.engines[-1]

    def add(self, engine, jobs):
        engine.left = 3

    def throughput(self, name, jobs, *, rounds, **knobs):
        self.steps[name] = [step(duration_s=0.01, num_decode_tokens=len(jobs), num_running=len(jobs))]
        found = {**dict.fromkeys(on_card.DETAILS, 1.0), "graphs_bytes": 5}
        return {"output_tokens_per_s": 100.0 * (2 - knobs.get("enforce_eager", False)), **found}


def step(**values):
    return tuple(values.get(name, 0) for name in STEP_COLUMNS)


@pytest.fixture
def benches(monkeypatch):
    """Every `FakeBench` that was made, in order; what is given back needs no card."""
    made = []
    monkeypatch.setattr(bench_gpu, "Bench", lambda *args: made.append(FakeBench(*args)) or made[-1])
    monkeypatch.setattr(on_card, "_give_back", lambda: None)
    return made


def test_weights_are_loaded_once_for_all_that_follows_on_the_same_model(benches):
    loaded = on_card.Loaded(str)
    first = loaded.bench(on_card.SEVEN)
    assert loaded.bench(on_card.SEVEN) is first
    assert loaded.bench(on_card.SMALL).model == on_card.SMALL
    assert loaded.bench(on_card.SEVEN) is not first
    loaded.drop()
    loaded.bench(on_card.SEVEN)
    assert [bench.model for bench in benches] == [on_card.SEVEN, on_card.SMALL, on_card.SEVEN, on_card.SEVEN]


def test_measurements_on_one_model_stand_side_by_side(benches, monkeypatch):
    asked = []
    monkeypatch.setattr(on_card, "_median_first_ms", lambda bench, engine, count: 1.0)
    monkeypatch.setattr(on_card.Loaded, "bench", lambda self, model: asked.append(model) or FakeBench(model, str))
    for key, measure in on_card.MEASUREMENTS.items():
        if key not in ("reserved, generate", "counters", "dtypes") and not key.startswith("reserved"):
            measure(on_card.Loaded(str))
    assert asked == sorted(asked)


def test_time_to_first_token_is_of_the_request_in_the_middle(benches, monkeypatch):
    # Of 3 requests the first tokens come after 1, 2 and 3 steps, each a second long.
    clock = iter(range(100))
    monkeypatch.setattr(on_card.time, "perf_counter", lambda: next(clock))
    bench = FakeBench(on_card.SMALL, str)
    assert on_card._median_first_ms(bench, bench.engine(), 3) == 2000


def test_lengths_differ_in_max_model_len_alone(benches, monkeypatch):
    monkeypatch.setattr(on_card, "_median_first_ms", lambda bench, engine, count: 10.0 * count)
    row = on_card.first_token_times(on_card.Loaded(str))
    assert {name: row[name] for name in on_card.LENGTHS} == dict.fromkeys(on_card.LENGTHS, 640.0)
    assert row["details"]["32768"] == {"alone": 10.0, "num_gpu_blocks": 7}
    assert [knobs.pop("max_model_len") for knobs in benches[0].asked] == [4096, 8192, 32768]
    assert benches[0].asked == [{"gpu_memory_utilization": 0.5}] * 3
    assert all(engine.closed for engine in benches[0].engines)


def test_the_wait_of_which_99_of_100_tokens_know_no_longer_one():
    # 98 tokens wait 10 ms, one 20 ms and one 30 ms; the step without a decode token makes nobody wait.
    steps = [step(duration_s=0.01, num_decode_tokens=49, num_running=49, num_tokens_stored=100)] * 2
    steps += [step(duration_s=0.02, num_decode_tokens=1, num_running=50), step(duration_s=0.03, num_decode_tokens=1)]
    found = on_card.step_numbers([*steps, step(duration_s=9.0)])
    assert found["between_tokens_p99_ms"] == pytest.approx(20)
    assert (found["most_running"], found["tokens_read"], found["steps_s"]) == (50, 200, pytest.approx(9.07))
    assert on_card.step_numbers([])["between_tokens_p99_ms"] == 0


def test_a_comparison_names_its_traffic_and_keeps_each_rate(benches):
    row = on_card.Comparison(on_card.SMALL, 8, 200, 100, on_card.GRAPHS).measure(on_card.Loaded(str))
    assert (row["graphs"], row["eager"]) == (200.0, 100.0)
    assert row["what"] == "output tokens/s, 8 requests of 200 and 100 tokens, Qwen/Qwen2-0.5B"
    assert row["details"]["eager"]["graphs_bytes"] == 5
    assert row["details"]["graphs"]["most_running"] == 8


@pytest.mark.parametrize(("which", "lines"), [("none", 0), ("a step", 3), ("a request", 12)])
def test_lines_are_written_while_the_engine_serves(monkeypatch, which, lines):
    engine, written = FakeEngine(4), []
    engine.left = 3
    monkeypatch.setattr(on_card.logging.Logger, "debug", lambda self, *args: written.append(args))
    assert on_card.served_s(engine, which) > 0
    assert len(written) == lines


def test_logging_has_a_rate_for_each_kind_of_line_and_closes_its_engines(benches):
    row = on_card.logging_rates(on_card.Loaded(str))
    assert row.keys() == {"what"} | {
        f"{which}{also}" for which in ("none", "a step", "a request") for also in ("", ", nothing overlaps")
    }
    assert all(engine.closed for engine in benches[0].engines)


def test_counters_that_are_not_counted_on_the_card_are_an_error(monkeypatch):
    kernel_launches = pytest.importorskip("labkit.measure.kernel_launches")

    class NoRights:
        def __init__(self, *args):
            pass

        def count(self, shape, card, variant):
            return SimpleNamespace(counters=SimpleNamespace(method="simulated (LRU)"), notes=("no permission",))

    monkeypatch.setattr(kernel_launches, "CardCounter", NoRights)
    with pytest.raises(UnsupportedError, match="no permission"):
        on_card.attention_counters(on_card.Loaded(str))


def test_without_a_card_nothing_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(UnsupportedError, match="card"):
        on_card.measure_all(tmp_path / "runs.json")
    assert not list(tmp_path.iterdir())


def test_what_fails_is_a_row_with_its_error_and_the_rest_goes_on(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"card": "a card", "rows": [{"key": "eager", "graphs": 2.0}]}))

    def broken(loaded):
        raise ValueError("no such kernel")

    monkeypatch.setattr(on_card, "MEASUREMENTS", {"dtypes": broken, "logging": lambda loaded: {"none": 3.0}})
    on_card.measure_all(path, say=str)
    rows = {row["key"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["dtypes"]["error"] == "ValueError: no such kernel"
    assert (rows["logging"]["none"], rows["eager"]["graphs"]) == (3.0, 2.0)
    assert rows["logging"]["made"][:2] == "20"


def test_numbers_stand_with_their_own_dates_and_with_what_ran_beside(monkeypatch):
    rows = {"a": {"made": "2026-11-30T10"}, "b": {"made": "2026-12-01T00", "note": "other work on the host"}}
    monkeypatch.setattr(on_card, "card_runs", lambda: {"card": "H200", "made": "2027-01-01", "rows": rows})
    assert on_card.measured_on("a") == "H200, 2026-11-30"
    assert on_card.measured_on("a", "b", "none") == "H200, 2026-11-30 and 2026-12-01, other work on the host"
