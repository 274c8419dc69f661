"""`python -m hf_longctx` is the command line, `hf-longctx`."""

import sys

from .cli import main


sys.exit(main())
