"""python -m leanfleet: the same as the command leanfleet."""

import sys

from leanfleet.cli import main

sys.exit(main())
