"""`python -m hf_longctx.cli` is the command line, `hf-longctx`."""

import sys

from . import main


sys.exit(main())
