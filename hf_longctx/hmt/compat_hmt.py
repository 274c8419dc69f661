"""Compatibility with different versions of transformers: a version check, and the name of the cache argument.

When transformers loads a saved folder, it reads configuration_hmt.py first. That file imports this one, so the warning
about an untested version appears before anything can fail.

transformers 5.24 renamed `past_key_values` to `cache`. HMT accepts both names.
"""

import functools
import inspect

import transformers
from transformers.utils import logging
from transformers.utils.versions import require_version


TESTED = (5, 15), (5, 24)  # the oldest and the newest minor version with which this code was tested
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)
REPAIR = (
    f"this code of hf-longctx was tested with transformers {OLDEST} to {NEWEST}, not with {transformers.__version__}. "
    "Run `pip install -U hf-longctx` and load without trust_remote_code, or pin "
    f"'transformers<{TESTED[1][0]}.{TESTED[1][1] + 1}'. If you own the repository, update its code: run `hf download "
    "REPO --local-dir FOLDER`, then `hf-longctx push FOLDER REPO`."
)

require_version(f"transformers>={OLDEST}", "HMT does not support older versions. Run: pip install -U transformers")
if tuple(map(int, transformers.__version__.split(".")[:2])) > TESTED[1]:
    # All copies of this file use the same logger and message, so the warning appears only once.
    logging.get_logger("transformers.hf_longctx").warning_once(REPAIR[0].upper() + REPAIR[1:])


@functools.cache
def cache_name(model_class: type) -> str | None:
    """Return the name of a model's cache argument. If its forward does not take a cache, return None.

    Models with remote code may use the old name with any version of transformers.
    """
    parameters = inspect.signature(model_class.forward).parameters  # ty: ignore[missing-attribute]
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)
