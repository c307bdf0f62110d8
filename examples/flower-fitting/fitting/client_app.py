"""Clients: what they hold and do comes with the messages."""

from fipa.flower.experiment import client_app

app = client_app()
