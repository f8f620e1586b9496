"""`python -m onepen` is the `onepen` command."""

import sys

from onepen.cli import main

if __name__ == "__main__":
    sys.exit(main())
