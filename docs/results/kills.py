"""Processes killed at random moments: `python docs/results/kills.py` prints a line for each run.

A SuperLink and two SuperNodes with TLS, 20 rounds of an arm of the experiment `demo`. Six times `kill -9` hits the
SuperLink, with the server that it has started, or a node, with the client at work; it is started again at once, and a
server resumes from its checkpoint. With `quorum=1.0` a round waits for nodes that died. A run has passed if its
parameters are those of a run in this process that nobody disturbed, to the last bit. Needs Linux, and minutes per run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fipa.errors import FipaError
from fipa.federation.checkpoint import load_state
from fipa.federation.parameters import load_theta
from fipa.flower.demo import EXPERIMENT, alone, changes, write_app
from fipa.flower.deployment import Deployment

NODES, ARM = 2, "FIPA completed"
KILLS, LATEST = 6, 10.0  # in a run; and seconds after the end of a round
PATIENCE = 3600.0  # seconds for the next of these moments


def last_round(checkpoint: Path) -> int:
    """Of a run that may not have ended one yet."""
    saved = load_state(checkpoint)
    return 0 if saved is None else saved[0].round_number


def until(condition: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise FipaError(f"nothing happens for {PATIENCE:g} s")
        time.sleep(0.1)


def disturbed(deployment: Deployment, app: Path, config: dict[str, Any], rounds: int, seed: int) -> list[str]:
    """A run to its end, with what was killed in which round; `seed` chooses victims and moments."""
    output, checkpoint = Path(config["output"]), Path(config["checkpoint"])
    dice, done = random.Random(seed), list[str]()
    drawn = [(dice.randrange(rounds), dice.uniform(0.0, LATEST), dice.randrange(NODES + 1)) for _ in range(KILLS)]
    deployment.submit(app, config)
    for after, seconds, victim in sorted(drawn):
        until(lambda after=after: last_round(checkpoint) >= after)
        time.sleep(seconds)
        if output.exists():
            break
        done.append(f"{'server' if victim == NODES else f'node {victim}'} in {last_round(checkpoint) + 1}")
        if victim < NODES:
            deployment.kill_node(victim)
            deployment.start_node(victim)
        else:
            deployment.kill_superlink()
            deployment.start_superlink()
            if not output.exists():
                deployment.submit(app, config)
    until(output.exists)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many, with the seeds from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    settings = changes(NODES, chosen.rounds)
    expected = alone(EXPERIMENT, ARM, settings)
    for seed in range(chosen.first, chosen.first + chosen.runs):
        begun = time.monotonic()
        with Deployment(NODES) as deployment:
            app, output = write_app(deployment.folder / "app"), deployment.folder / "theta.safetensors"
            config = {
                "experiment": EXPERIMENT, "arm": ARM, "set": ";".join(settings), "output": str(output),
                "checkpoint": str(deployment.folder / "run.pt"), "min-available-nodes": NODES, "quorum": 1.0,
                "deadline": 3600.0,
            }  # fmt: skip
            kills = disturbed(deployment, app, config, chosen.rounds, seed)
            reached = last_round(Path(config["checkpoint"]))
            same = torch.equal(load_theta(output), expected)
        outcome = "the same parameters" if same else "OTHER PARAMETERS"
        what, seconds = f"killed {', '.join(kills)}", time.monotonic() - begun
        print(f"seed {seed}: {what}, {reached} rounds, {seconds:.0f} s, {outcome}", flush=True)
        if not same:
            raise FipaError(f"seed {seed} did not come to the parameters of an undisturbed run")


if __name__ == "__main__":
    main()
