"""How far a language model really remembers.

Names are imported on first use, so that the metric you want is all you load. No module has the name of a function:
once imported, it would take the function's place.
"""

import importlib


_HOME = {
    "module_path": "evaluate_modules",
    "register": "evaluate_modules",
    "card_snippet": "report.card",
    "eval_results": "report.card",
    "comparison_table": "report.comparison",
    "plot_comparison": "report.comparison",
    "Result": "result",
    "read_result": "result",
    "write_report": "report.page",
    "measure_all": "report.measure_all",
    "CurvePoint": "curve.result",
    "ForgettingCurve": "curve.result",
    "MemoryLength": "curve.lengths",
    "LengthInterval": "curve.lengths",
    "SourceTest": "curve.sources",
    "irrelevant_source_test": "curve.sources",
    "Journal": "run.journal",
    "linear_lengths": "curve.protocol",
    "log_lengths": "curve.protocol",
    "NeedleGrid": "retrieval.haystack",
    "LineRetrieval": "retrieval.lines",
    "PositionLoss": "loss.result",
    "line_retrieval": "retrieval.measure",
    "needle_in_a_haystack": "retrieval.measure",
    "position_loss": "loss.measure",
    "Run": "run.parts",
    "Reader": "run.reader",
    "LocalReader": "run.reader",
    "reader_for": "run.reader",
    "ServedModel": "run.served",
    "PositionLimitError": "curve.measure",
    "forgetting_curve": "curve.measure",
    "RopeBaseBound": "rope.bounds",
    "rope_base_bound": "rope.bounds",
    "rope_base_scan": "rope.bounds",
    "rope_base_table": "rope.bounds",
    "rope_context_bound": "rope.bounds",
    "rope_decay": "rope.bounds",
    "rope_inv_freq": "rope.bounds",
    "rope_variance_weights": "rope.bounds",
    "RopeLayers": "rope.verdict",
    "RopeReport": "rope.verdict",
    "rope_report": "rope.verdict",
    "QKSpread": "rope.spread",
    "measure_qk_spread": "rope.spread",
}

# Where the results of all metrics are defined, for `read_result`.
RESULT_MODULES = ("curve.result", "loss.result", "retrieval.haystack", "retrieval.lines", "rope.verdict")

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__
