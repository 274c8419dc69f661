"""Measure the forgetting curve of a model with the evaluate library."""

from pathlib import Path

import evaluate

import hf_longctx


MODEL = "model_cards/fox-demo"
# The same module is a Space after `hf-longctx push forgetting_curve NAME/forgetting_curve`.
MODULE = Path(hf_longctx.__file__).parent / "metrics" / "modules" / "forgetting_curve"

curve = evaluate.load(str(MODULE))
result = curve.compute(model=MODEL, corpus=None, data_type="random", lengths=[64, 128, 192], repeats=3)
print(result["summary"])
for point in result["points"]:
    print(point["length"], f"{point['copy_mean']:.1%} copied, {point['lm_mean']:.1%} by language modelling alone")
