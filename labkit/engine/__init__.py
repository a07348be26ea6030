"""The engine: continuous batching over a paged KV cache. Importing it does not import torch."""

from labkit.engine.batch import Executor, ScheduledBatch
from labkit.engine.block_pool import BlockError, BlockPool
from labkit.engine.engine import CACHED_BLOCK, FREE_BLOCK, Engine, RequestOutput, StepResult, TokenOutput
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.sequence import Sequence

__all__ = [
    "CACHED_BLOCK",
    "FREE_BLOCK",
    "BlockError",
    "BlockPool",
    "Engine",
    "EngineRequest",
    "Executor",
    "RequestOutput",
    "SamplingParams",
    "ScheduledBatch",
    "Scheduler",
    "Sequence",
    "StepResult",
    "TokenOutput",
]
