"""The server beside a run: `python -m fipa.serve DIR`, started by `fipa run --serve`."""

import sys
from pathlib import Path

from fipa.serve.command import until_alone

if __name__ == "__main__":
    until_alone(Path(sys.argv[1]))
