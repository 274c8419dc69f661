"""Mistakes that users make, as tables of rows: tests/fox/test_fox_bad_input.py and its siblings.

A row is `refused(name, call, says)`: the call raises one clear error that matches the regular expression `says`; or
`harmless(name, call)`: the call returns what the mistake gives and what the right call gives, and the two are equal.
A call takes the argument that the table's test hands to it, such as a small model.
"""

from dataclasses import dataclass

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError


CLEAR_ERRORS = (ValueError, TypeError, NotImplementedError, ImportError, OSError, StrictDataclassError)


@dataclass(frozen=True)
class Mistake:
    name: str
    call: object
    says: str | None = None
    error: type | tuple = CLEAR_ERRORS

    def __str__(self):
        return self.name

    def check(self, *arguments):
        """Make the mistake, and check that it is refused or harmless."""
        if self.says is None:
            torch.testing.assert_close(*self.call(*arguments))
            return
        with pytest.raises(self.error, match=self.says) as raised:
            self.call(*arguments)
        assert isinstance(raised.value, CLEAR_ERRORS), f"{type(raised.value).__name__} is not an error of ours"
        message = str(raised.value)
        assert 20 < len(message) < 1000, f"{len(message)} characters: {message}"


def refused(name, call, says, error=CLEAR_ERRORS):
    return Mistake(name, call, says, error)


def harmless(name, call):
    return Mistake(name, call)
