"""Tasks of lm-eval (forgetting curve, per-token loss, line retrieval), and FoX and HMT as its model type `hf-longctx`.

lm-eval finds the tasks in the folder `TASKS`: `lm_eval run --include_path "$(hf-longctx lm-eval-tasks)" --tasks
forgetting_curve`. It knows the model type once `model` has been imported, as `hf-longctx lm-eval` does.
"""

from pathlib import Path


TASKS = Path(__file__).parent / "yaml"
