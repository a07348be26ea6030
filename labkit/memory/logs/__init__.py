"""Reading vLLM's start-up and out-of-memory logs, of any version from 0.6 on."""

from labkit.memory.logs.read import read_log, read_log_file
from labkit.memory.logs.record import LogRecord

__all__ = ["LogRecord", "read_log", "read_log_file"]
