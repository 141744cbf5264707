"""`python -m giveway` is the command line."""

import sys

from giveway.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
