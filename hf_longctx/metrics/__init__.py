"""Measure how far a language model really remembers.

Names are imported on first use, so that you load only the metric that you use. No module has the same name as a
function: once imported, it would replace the function.
"""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .curve.intervals import LengthInterval as LengthInterval
    from .curve.lengths import CurvePoint as CurvePoint
    from .curve.lengths import MemoryLength as MemoryLength
    from .curve.protocol import linear_lengths as linear_lengths
    from .curve.protocol import log_lengths as log_lengths
    from .evaluate_modules import module_path as module_path
    from .evaluate_modules import register as register
    from .read import read_result as read_result
    from .report.card import eval_results as eval_results
    from .report.comparison import comparison_table as comparison_table
    from .report.comparison import plot_comparison as plot_comparison
    from .report.effective import effective_length as effective_length
    from .report.measure_all import measure_all as measure_all
    from .report.page import write_report as write_report
    from .report.paired import paired_differences as paired_differences
    from .result import Number as Number
    from .result import Result as Result
    from .rope.bound import RopeBaseBound as RopeBaseBound
    from .rope.bound import rope_base_bound as rope_base_bound
    from .rope.bound import rope_base_scan as rope_base_scan
    from .rope.bound import rope_base_table as rope_base_table
    from .rope.bound import rope_context_bound as rope_context_bound
    from .rope.bound import rope_decay as rope_decay
    from .rope.bound import rope_inv_freq as rope_inv_freq
    from .rope.report import RopeLayers as RopeLayers
    from .rope.report import RopeReport as RopeReport
    from .rope.report import rope_report as rope_report
    from .run.journal import Journal as Journal
    from .run.prompts import OfflineModel as OfflineModel
    from .run.reader import LocalReader as LocalReader
    from .run.reader import Reader as Reader
    from .run.reader import reader_for as reader_for
    from .run.runner import Run as Run
    from .run.served import ServedModel as ServedModel
    from .task import Subject as Subject
    from .task import Task as Task
    from .task import TaskResult as TaskResult
    from .tasks.curve import Curve as Curve
    from .tasks.curve import ForgettingCurve as ForgettingCurve
    from .tasks.curve import forgetting_curve as forgetting_curve
    from .tasks.lines import LineRetrieval as LineRetrieval
    from .tasks.lines import Lines as Lines
    from .tasks.lines import line_retrieval as line_retrieval
    from .tasks.loss import Loss as Loss
    from .tasks.loss import PositionLoss as PositionLoss
    from .tasks.loss import position_loss as position_loss
    from .tasks.needle import Needle as Needle
    from .tasks.needle import NeedleGrid as NeedleGrid
    from .tasks.needle import needle_in_a_haystack as needle_in_a_haystack

# Public names, by defining module.
_NAMES = {
    "evaluate_modules": "module_path register",
    "report.card": "eval_results",
    "report.comparison": "comparison_table plot_comparison",
    "read": "read_result",
    "result": "Number Result",
    "report.effective": "effective_length",
    "report.page": "write_report",
    "report.paired": "paired_differences",
    "report.measure_all": "measure_all",
    "curve.lengths": "CurvePoint MemoryLength",
    "curve.intervals": "LengthInterval",
    "run.journal": "Journal",
    "curve.protocol": "linear_lengths log_lengths",
    "task": "Subject Task TaskResult",
    "tasks.curve": "Curve ForgettingCurve forgetting_curve",
    "tasks.lines": "LineRetrieval Lines line_retrieval",
    "tasks.loss": "Loss PositionLoss position_loss",
    "tasks.needle": "Needle NeedleGrid needle_in_a_haystack",
    "run.runner": "Run",
    "run.reader": "LocalReader Reader reader_for",
    "run.served": "ServedModel",
    "run.prompts": "OfflineModel",
    "rope.bound": "RopeBaseBound rope_base_bound rope_base_scan rope_base_table rope_context_bound rope_decay rope_inv_freq",
    "rope.report": "RopeLayers RopeReport rope_report",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
