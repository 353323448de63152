"""`python -m pantheon`."""

import sys

from pantheon.cli import main

if __name__ == "__main__":
    sys.exit(main())
