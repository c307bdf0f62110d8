"""The server: experiment, arm and all other settings stand in pyproject.toml."""

from fipa.flower.experiment import server_app

app = server_app("demo", "FIPA completed")
