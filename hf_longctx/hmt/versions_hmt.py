"""The tested versions of transformers.

configuration_hmt.py, the first file loaded from a saved folder, imports this file, so the warning about an untested
version appears before anything can fail.
"""

import transformers
from transformers.utils import logging
from transformers.utils.versions import require_version


TESTED = (5, 15), (5, 24)  # the oldest and the newest minor version with which this code was tested
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)
IS_TESTED = tuple(map(int, transformers.__version__.split(".")[:2])) <= TESTED[1]
REPAIR = (
    f"this code of hf-longctx was tested with transformers {OLDEST} to {NEWEST}, not with {transformers.__version__}: "
    "`pip install -U hf-longctx` and load without trust_remote_code, or pin "
    f"'transformers<{TESTED[1][0]}.{TESTED[1][1] + 1}' (owners of a repository update its code: `hf download REPO "
    "--local-dir FOLDER`, then `hf-longctx push FOLDER REPO`)."
)

require_version(f"transformers>={OLDEST}", "HMT is tested from there on: pip install -U transformers")
if not IS_TESTED:
    # the logger and the message are the same in all copies of this file, so that the warning appears once
    logging.get_logger("transformers.hf_longctx").warning_once(REPAIR[0].upper() + REPAIR[1:])
