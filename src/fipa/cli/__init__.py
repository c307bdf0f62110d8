"""The command line. `fipa.cli.app` lists the commands; each imports what it needs when it is called.

So `fipa --help`, `list` and `show` do without torch, which takes longer to import than all they do.
"""

from __future__ import annotations

import signal
import sys
from enum import IntEnum

from fipa.errors import FipaError, missing


class Exit(IntEnum):
    """What the shell is told, besides 0 for success and Python's own 1 for a traceback."""

    USAGE = 2  # the command, the experiment or what it met on the way is wrong: the message says what
    DIVERGED = 3  # everything was run, and at least one arm ended in NaN or infinity
    INTERRUPTED = 130


def entry() -> None:
    """Run the command; turn our own errors into one line and an exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore Ctrl-C
    try:
        from fipa.cli.app import app

        app(prog_name="fipa")
    except FipaError as error:
        from fipa.cli.common import fail

        fail(str(error))
        sys.exit(Exit.USAGE)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except ImportError as error:
        if (remedy := missing(error, "cli")) is None:
            raise
        sys.exit(f"the command line {remedy}")
