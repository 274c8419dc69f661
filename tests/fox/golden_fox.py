"""Read the golden FoX vectors (the README next to the data describes the format)."""

import json
import re

from safetensors.torch import load_file


def load_cases(folder, kind):
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        if case["kind"] == kind:
            yield case, load_file(folder / case["file"])


def weights(tensors, prefix="weights/"):
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def check(case, tensors, key, got):
    """Assert that `got` agrees with `tensors[key]` as closely as the case asks; returns True if it asks."""
    checks = [c for c in case["compare"] if c["key"] == key]
    for c in checks:
        want = tensors[key].double()
        excess = (got.detach().double() - want).abs() - (c["atol"] + c["rtol"] * want.abs())
        if "where" in c:
            name, cut = re.fullmatch(r"([^\[]+)(?:\[:, :(\d+)\])?", c["where"]).groups()
            mask = tensors[name].bool()
            excess = excess[mask[:, : int(cut)] if cut else mask]
        assert excess.max() <= 0, f"{case['name']} {key}: {excess.max():.2e} beyond the tolerance"
    return bool(checks)
