"""python -m leanfleet, and the command leanfleet."""

import sys


def main() -> int:
    """cli.main; Ctrl-C while that is imported ends the process as quietly as later."""
    try:
        from leanfleet import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
