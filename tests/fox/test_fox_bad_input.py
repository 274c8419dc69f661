"""What users of FoX get wrong: each row is refused with one clear error, or changes no number."""

import pytest
from mistakes import refused

from hf_longctx.fox import FoxConfig


CONFIG = [refused("no heads", lambda: FoxConfig(num_attention_heads=0), "num_attention_heads")]


@pytest.mark.parametrize("mistake", CONFIG, ids=str)
def test_configurations(mistake, record_property):
    record_property("mistake", mistake.check())
