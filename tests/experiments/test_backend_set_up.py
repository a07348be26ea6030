"""When a new plan changes the engine that is there, and when it takes the place of another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import labkit.engine
from labkit.errors import DoesNotFitError, UnsupportedError
from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.serialise import to_plain
from labkit.memory import plan
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

TINY = ModelSpec(
    name="tiny", architecture="", model_type="llama", layers=(LayerSpec("full", 2, 1, 32),), hidden_size=32,
    intermediate_size=48, vocab_size=128, max_position_embeddings=128, dtype="float32",
)  # fmt: skip
PLAN = plan(TINY, load_gpu("cpu"), EngineConfig(cpu_memory_gib=0.1, max_model_len=64))


class FakeEngine:
    """Counts what is done to it."""

    def __init__(self, decoder=None, plan=None, *, seed=0, executor=None):
        self.decoder, self.plan, self.seed = decoder, plan, seed
        self.executor = SimpleNamespace(why_eager="")
        self.has_unfinished, self.is_closed, self.refuses = False, False, False

    def reconfigure(self, plan):
        if self.refuses:
            raise DoesNotFitError("the pool does not fit")
        self.plan = plan

    def close(self):
        self.is_closed = True


def backend_on(device: str, monkeypatch, engine: FakeEngine | None) -> EngineBackend:
    monkeypatch.setattr(labkit.engine, "Engine", FakeEngine)
    backend = EngineBackend()
    backend._decoder = SimpleNamespace(device=SimpleNamespace(type=device))
    backend._engine = engine
    return backend


def configure(backend: EngineBackend, seed: int = 0):
    backend.configure({"plan": to_plain(PLAN), "seed": seed}, lambda event: None, lambda: False)
    return backend._engine


def test_on_a_card_the_engine_stays_and_takes_plan_and_seed(one_thread, monkeypatch):
    """So that graphs and pool are kept as far as the knobs allow: a second, not a minute."""
    engine = FakeEngine()
    assert configure(backend_on("cuda", monkeypatch, engine), seed=7) is engine
    assert (engine.plan, engine.seed, engine.is_closed) == (PLAN, 7, False)


@pytest.mark.parametrize(("device", "has_unfinished"), [("cuda", True), ("cpu", False)])
def test_an_engine_in_the_middle_of_requests_or_on_a_cpu_is_made_anew(one_thread, monkeypatch, device, has_unfinished):
    """The old one's memory is given back before the new one takes any."""
    old = FakeEngine()
    old.has_unfinished = has_unfinished
    closed_before = []

    class Next(FakeEngine):
        def __init__(self, *args, **options):
            closed_before.append(old.is_closed)
            super().__init__(*args, **options)

    backend = backend_on(device, monkeypatch, old)
    monkeypatch.setattr(labkit.engine, "Engine", Next)
    new = configure(backend, seed=3)
    assert isinstance(new, Next)
    assert (new.decoder, new.plan, new.seed) == (backend._decoder, PLAN, 3)
    assert closed_before == [True]


def test_without_an_engine_one_is_made(one_thread, monkeypatch):
    assert configure(backend_on("cuda", monkeypatch, None)).plan == PLAN


def test_an_engine_that_could_not_be_changed_does_not_run_on(one_thread, monkeypatch):
    engine = FakeEngine()
    engine.refuses = True
    backend = backend_on("cuda", monkeypatch, engine)
    with pytest.raises(DoesNotFitError, match="the pool does not fit"):
        configure(backend)
    with pytest.raises(UnsupportedError, match="no engine is configured"):
        backend.run({}, lambda event: None, lambda: False)
