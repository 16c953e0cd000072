"""``kvxfer``, also as ``python -m kvxfer``."""

import sys


def main() -> None:
    """Entry point.  Ctrl-C is no fault, also while the command is still being imported."""
    try:
        from kvxfer.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
