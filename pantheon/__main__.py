"""`python -m pantheon`."""

import sys


def run() -> int:
    """Import and run the command line; a Ctrl-C while it is still being imported ends without a traceback."""
    try:
        from pantheon.cli import main

        return main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
