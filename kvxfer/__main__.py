"""``python -m kvxfer``."""

from kvxfer.cli import main

main()
