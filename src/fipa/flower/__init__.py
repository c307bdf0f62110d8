"""FIPA on Flower: a strategy, what turns an app's clients into its clients, and the payload between them."""

from fipa.flower.answer import Limits
from fipa.flower.client import client, reply
from fipa.flower.codec import PayloadError
from fipa.flower.secure_strategy import SecureFIPA
from fipa.flower.strategy import FIPA

__all__ = ["FIPA", "Limits", "PayloadError", "SecureFIPA", "client", "reply"]
