"""`python -m fipa` is the command `fipa`."""

from fipa.cli import entry

if __name__ == "__main__":
    entry()
