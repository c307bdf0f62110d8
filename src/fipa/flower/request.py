"""What the server asks of a client, as it travels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fipa.curvature.registry import kind_of, plan_of, settings_of
from fipa.curvature.summary import CurvaturePlan
from fipa.errors import SketchError
from fipa.flower.codec import PayloadError, Precision

VERSION = 1
KEY = "fipa"  # of the record, in messages and replies


@dataclass(frozen=True)
class Request:
    """What the server wants of a client, next to the parameters.

    Parameters
    ----------
    round_number, client
        Which round this is, and who is asked, by partition id.
    params
        Names of the parameters that are trained, sketched and sent.
    plan
        What to tell about the curvature; None for nothing.
    precision
        Of matrices on their way to the server.
    seed, test_seed
        Of this client's random numbers, and of the test matrix that all clients of the round share.
    lr_scale
        Factor for the client's learning rate.
    buffers
        Names of the arrays that are averaged instead of trained.
    """

    round_number: int
    client: int
    params: tuple[str, ...]
    plan: CurvaturePlan | None = None
    precision: Precision = "float32"
    seed: int = 0
    test_seed: int = 0
    lr_scale: float = 1.0
    buffers: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Of the curvature that is asked for."""
        return kind_of(self.plan)

    def record(self) -> ConfigRecord:
        """As it travels."""
        return ConfigRecord(
            {
                "version": VERSION, "round": self.round_number, "client": self.client, "params": list(self.params),
                "curvature": self.kind, "settings": json.dumps(settings_of(self.plan)), "precision": self.precision,
                "seed": self.seed, "test-seed": self.test_seed, "lr-scale": self.lr_scale,
                "buffers": list(self.buffers),
            }
        )  # fmt: skip

    @classmethod
    def of(cls, content: RecordDict) -> Request:
        """What a message asks for."""
        if KEY not in content:
            raise PayloadError("the message does not come from fipa.flower.FIPA: use that strategy in the ServerApp")
        record: Any = content[KEY]
        check_version(record)
        try:
            plan = plan_of(record["curvature"], json.loads(record["settings"]))
        except SketchError as error:
            raise PayloadError(str(error)) from error
        return cls(
            record["round"], record["client"], tuple(record["params"]), plan, record["precision"], record["seed"],
            record["test-seed"], record["lr-scale"], tuple(record["buffers"]),
        )  # fmt: skip


def check_version(record: Any) -> None:
    """Refuse other versions of the format."""
    version = record.get("version") if isinstance(record, ConfigRecord) else None
    if type(version) is not int or version != VERSION:
        raise PayloadError(f"is in version {version!r} of the format, not {VERSION}: use the same fipa everywhere")
