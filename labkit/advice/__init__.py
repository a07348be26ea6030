"""Which limit binds, what to change next, what to recommend, and the commands that carry it to vLLM."""

from labkit.advice.advise import Advice, advise, headline
from labkit.advice.command import ExportedCommand, NotExported, export_command, export_plan, vllm_command
from labkit.advice.flags import check_command, flag_history, flags_for, known_versions
from labkit.advice.limit import BindingLimit, Evidence, binding_limit
from labkit.advice.noise import Noise, noise_of
from labkit.advice.recommend import Gain, Reason, Recommendation, recommend

__all__ = [
    "Advice",
    "BindingLimit",
    "Evidence",
    "ExportedCommand",
    "Gain",
    "Noise",
    "NotExported",
    "Reason",
    "Recommendation",
    "advise",
    "binding_limit",
    "check_command",
    "export_command",
    "export_plan",
    "flag_history",
    "flags_for",
    "headline",
    "known_versions",
    "noise_of",
    "recommend",
    "vllm_command",
]
