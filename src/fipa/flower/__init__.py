"""FIPA on Flower: a strategy, what turns an app's clients into its clients, and the payload between them."""

from fipa.errors import missing

try:
    from fipa.flower.answer import Limits
    from fipa.flower.client import client, reply
    from fipa.flower.codec import PayloadError
    from fipa.flower.secure_strategy import SecureFIPA
    from fipa.flower.strategy import FIPA
except ImportError as error:
    if (remedy := missing(error, "flower")) is None:
        raise
    raise ModuleNotFoundError(f"fipa.flower {remedy}", name=error.name) from None

__all__ = ["FIPA", "Limits", "PayloadError", "SecureFIPA", "client", "reply"]
