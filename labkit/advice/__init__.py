"""Which limit binds, what to change next, what to recommend, and the commands that carry it to vLLM."""

from labkit.advice.advise import Advice, advise, headline
from labkit.advice.command import ExportedCommand, NotExported, export_command, export_plan, vllm_command
from labkit.advice.flags import check_command, flag_history, flags_for, known_versions
from labkit.advice.follow_up import Applied, FollowUp, follow_up
from labkit.advice.limit import BindingLimit, Evidence, binding_limit
from labkit.advice.load_study import LoadStudy, SpeedBook, study_load
from labkit.advice.noise import Noise, noise_of
from labkit.advice.recommend import Gain, Reason, Recommendation, recommend
from labkit.advice.speed import Speed, speed_of
from labkit.advice.step_bound import StepBound, step_bound

__all__ = [
    "Advice",
    "Applied",
    "BindingLimit",
    "Evidence",
    "ExportedCommand",
    "FollowUp",
    "Gain",
    "LoadStudy",
    "Noise",
    "NotExported",
    "Reason",
    "Recommendation",
    "Speed",
    "SpeedBook",
    "StepBound",
    "advise",
    "binding_limit",
    "check_command",
    "export_command",
    "export_plan",
    "flag_history",
    "flags_for",
    "follow_up",
    "headline",
    "known_versions",
    "noise_of",
    "recommend",
    "speed_of",
    "step_bound",
    "study_load",
    "vllm_command",
]
