"""The library `kernels`, in a version that transformers takes."""

import importlib.metadata
import importlib.util

from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available


def kernels_library(folder) -> list[str] | None:
    """Return the folders that must be first in PYTHONPATH so that transformers uses the installed `kernels`.

    Without `kernels`, return None.

    Each version of transformers requires one or two versions of `kernels` (5.23: 0.18). 0.16 to 0.18 load attention in
    the same way, so the folder contains metadata that gives another version the required number.
    """
    if importlib.util.find_spec("kernels") is None:
        return None
    if is_kernels_available():
        return []
    metadata = importlib.metadata.distribution("kernels")
    path = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    path.parent.mkdir(parents=True)
    text = metadata.read_text("METADATA")
    path.write_text(text.replace(f"\nVersion: {metadata.version}\n", f"\nVersion: {KERNELS_MIN_VERSION}\n", 1))
    is_kernels_available.cache_clear()
    return [str(folder)]
