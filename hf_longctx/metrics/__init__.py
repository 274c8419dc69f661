"""How far a language model really remembers.

Names are imported on first use, so that the metric you want is all you load. No module has the name of a function:
once imported, it would take the function's place.
"""

import importlib


# Public names by the module that defines them.
_NAMES = {
    "evaluate_modules": "module_path register",
    "report.card": "card_snippet eval_results",
    "report.comparison": "comparison_table plot_comparison",
    "result": "Result read_result",
    "report.page": "write_report",
    "report.measure_all": "measure_all",
    "curve.result": "CurvePoint ForgettingCurve",
    "curve.lengths": "MemoryLength",
    "curve.intervals": "LengthInterval",
    "curve.sources": "SourceTest irrelevant_source_test",
    "run.journal": "Journal",
    "curve.protocol": "linear_lengths log_lengths",
    "retrieval.haystack": "NeedleGrid",
    "retrieval.lines": "LineRetrieval",
    "loss.result": "PositionLoss",
    "retrieval.measure": "line_retrieval needle_in_a_haystack",
    "loss.measure": "position_loss",
    "run.distributed": "Run",
    "run.reader": "Reader LocalReader reader_for",
    "run.served": "ServedModel",
    "run.offline": "OfflineModel",
    "curve.measure": "PositionLimitError forgetting_curve",
    "rope.base": "RopeBaseBound rope_base_bound rope_base_scan rope_base_table",
    "rope.bounds": "rope_context_bound rope_decay rope_inv_freq",
    "rope.result": "RopeLayers RopeReport",
    "rope.measure": "rope_report",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# Where the results of all metrics are defined, for `read_result`.
RESULT_MODULES = ("curve.result", "loss.result", "retrieval.haystack", "retrieval.lines", "rope.result")

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__
