"""The plugin does not stop a vLLM that it does not support, which serves other models."""

import sys
from types import SimpleNamespace

import pytest

from hf_longctx import vllm as plugin


@pytest.mark.parametrize(
    "release, found", [("0.32.0", "ModelRegistry"), ("0.41.2", "this is vLLM 0.41"), ("dev", "dev")]
)
def test_another_vllm_is_a_warning(monkeypatch, caplog, release, found):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    caplog.set_level("WARNING", plugin.logger.name)  # an engine of another test has set ERROR
    monkeypatch.setattr(plugin.logger, "handlers", [caplog.handler])  # vLLM's loggers do not propagate
    monkeypatch.setattr(plugin.logger, "propagate", False)
    plugin.register()
    (message,) = caplog.messages
    assert "requires vLLM 0.32 or 0.33" in message and found in message and "Other models are not affected" in message
