"""`python -m flashviz` is the command `flashviz`."""

import sys

from flashviz.cli import main

sys.exit(main())
