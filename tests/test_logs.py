"""What the log lines look like."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_line_of_a_library_names_its_logger_and_tells_no_secret() -> None:
    """In a process of its own: the configuration is the whole process's."""
    code = (
        "import logging, structlog\n"
        "from kvxfer.logs import configure\n"
        "configure('info', 'json')\n"
        "logging.getLogger('kvxfer.xfer.pump').warning('polling failed %d times', 3)\n"
        "structlog.get_logger().info('event', engine='x', lease_token='secret')\n"
        "structlog.get_logger().debug('not told')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    library, own = map(json.loads, done.stderr.splitlines())
    assert (library["logger"], library["event"], library["level"]) == (
        *("kvxfer.xfer.pump", "polling failed 3 times", "warning"),
    )
    assert (own["event"], own["engine"], own["lease_token"]) == ("event", "x", "<redacted>")
