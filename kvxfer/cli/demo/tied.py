"""Processes that end with their parent, whatever happens to it.

    python -m kvxfer.cli.demo.tied PARENT_PID serve --engine-socket ...

runs ``kvxfer serve ...`` so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tie(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    :param parent: the pid that the parent is known by; if another process has inherited us, it has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    from kvxfer.cli import main

    tie(int(sys.argv[1]))
    sys.argv = ["kvxfer", *sys.argv[2:]]
    main()
