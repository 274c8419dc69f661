"""How far a language model really remembers.

Names are imported on first use, so that the metric you want is all you load. No module has the name of a function: once
imported, it would take the function's place.
"""

import importlib


_HOME = {
    "module_path": "evaluate_modules",
    "register": "evaluate_modules",
    "card_snippet": "model_card",
    "eval_results": "model_card",
    "comparison_table": "results",
    "plot_comparison": "plots_comparison",
    "read_result": "results",
    "write_report": "report_html",
    "CurvePoint": "curve",
    "ForgettingCurve": "curve",
    "MemoryLength": "curve",
    "LengthInterval": "intervals",
    "SourceTest": "intervals",
    "irrelevant_source_test": "intervals",
    "Journal": "journal",
    "linear_lengths": "curve",
    "log_lengths": "curve",
    "NeedleGrid": "haystack",
    "LineRetrieval": "lines",
    "PositionLoss": "loss",
    "line_retrieval": "run_companions",
    "needle_in_a_haystack": "run_companions",
    "position_loss": "run_companions",
    "EndpointModel": "endpoint",
    "PositionLimitError": "runner",
    "forgetting_curve": "runner",
    "RopeBaseBound": "rope_bounds",
    "rope_base_bound": "rope_bounds",
    "rope_base_scan": "rope_bounds",
    "rope_base_table": "rope_bounds",
    "rope_context_bound": "rope_bounds",
    "rope_decay": "rope_bounds",
    "rope_inv_freq": "rope_bounds",
    "rope_variance_weights": "rope_bounds",
    "RopeLayers": "rope_verdict",
    "RopeReport": "rope_verdict",
    "rope_report": "rope_verdict",
    "QKSpread": "rope_measure",
    "measure_qk_spread": "rope_measure",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__
