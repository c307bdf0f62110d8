"""Settings of arms, chosen on seed 5, which no table has: `python docs/results/tune.py NAME [--warmup RUN] [ARM...]`.

Every setting below is run once. tuning-NAME.csv keeps what came of it: the better of the last five rounds and of the
mean of the last ten models where a larger metric is better, and the last error where a smaller one is. A setting whose
row is there is not run again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from tables import HERE, read, write

import fipa

SEED = 5
HALF = {"head-cifar10-fedrcl": {"warmup.rounds": 60}}  # of the rounds of an experiment whose warm-up takes long
COLUMNS = ("arm", "setting", "score", "seconds")
Choice = dict[str, Any]  # settings of an arm that go together


def each(key: str, *values: Any) -> list[Choice]:
    """One setting, with each of these values."""
    return [{key: value} for value in values]


def shared(**settings: Any) -> Choice:
    """The rule of a shared basis with these settings, whatever the experiment has."""
    return {"rule": {"name": "shared-fipa", **settings}}


RATES = each("local.lr", 0.001, 0.003, 0.01, 0.03)
FASTER = each("local.lr", 0.01, 0.03, 0.1, 0.3)  # of sets with more classes
DECAY, MEMORY = "-decay", "-memory"  # further grids for the same experiment
DECAYS = (1e-3, 1e-2, 3e-2, 1e-1)
HEADS: dict[str, list[list[Choice]]] = {
    "FedAvg": [RATES],
    "FedProx": [each("local.proximal", 0.01, 0.1, 1.0)],
    "SCAFFOLD": [each("local.lr", 0.003, 0.01, 0.03)],
    "FedAvgM": [each("rule.momentum", 0.5, 0.9), each("rule.lr", 0.5, 1.0)],
    "FedVARP": [RATES, each("rule.step", 0.5, 1.0)],
    "FOOF mixing (FedPM)": [each("rule.damping", 0.01, 0.1, 1.0)],
    "Fed3R": [each("rule.ridge", 100.0, 1000.0, 10000.0)],
    "FIPA (paper)": [each("rule.damping", 0.001, 0.01, 0.1, 1.0), each("rule.step", 0.25, 0.5, 1.0)],
    "FIPA shared basis": [[shared(columns=200), shared(columns=300)]],
}
MANY_CLASSES = HEADS | {
    "FedAvg": [[*FASTER, {"local.lr": 1.0}]],
    "SCAFFOLD": [FASTER],
    "FedVARP": [FASTER, each("rule.step", 0.5, 1.0)],
    "FOOF mixing (FedPM)": [
        [
            *({"local.lr": 0.01, "rule.damping": damping} for damping in (0.01, 0.1, 1.0, 10.0)),
            *({"local.lr": lr, "rule.damping": 1.0} for lr in (0.03, 0.1, 0.3)),
        ]
    ],
    "FIPA (paper)": [
        [
            *({"local.lr": 0.01, "rule.damping": damping} for damping in (0.001, 0.01, 0.1)),
            *({"local.lr": lr, "rule.damping": 0.01} for lr in (0.03, 0.1)),
        ]
    ],
}
# weight decay with the best of the settings above
DECAYED = {
    "SCAFFOLD": [each("local.lr", 0.03), each("local.weight_decay", *DECAYS)],
    "FedVARP": [each("local.lr", 0.3), each("rule.step", 0.5), each("local.weight_decay", *DECAYS)],
    "FIPA shared basis": [
        [
            *(shared(weight_decay=decay) for decay in DECAYS),
            shared(weight_decay=0.03, columns=300),
            shared(weight_decay=0.03, memory={"discount": 0.95}),
        ],
    ],
}
WIDER = [
    *(shared(columns=200, weight_decay=decay) for decay in (0.0, 1e-3, 1e-2, 3e-2)),
    *(shared(columns=300, weight_decay=decay) for decay in (0.0, 1e-2)),
]
REMEMBERED = [
    shared(memory={"discount": discount}, damping=damping)
    for discount, damping in product((1.0, 0.95, 0.9), (0.001, 0.003, 0.01))
]
# after FedRCL: features are not standardised, and there are 64 of them
TRAINED_HERE = HEADS | {
    "FedAvg": [FASTER],
    "SCAFFOLD": [FASTER],
    "FedVARP": [FASTER, each("rule.step", 0.5, 1.0)],
    "Fed3R": [each("rule.ridge", 0.1, 1.0, 10.0, 100.0)],
    "FIPA (paper)": [each("rule.damping", 0.0001, 0.001, 0.01), each("rule.step", 0.25, 0.5)],
}
# the same number of local steps in all
STEPS: list[Choice] = [{"local.steps": 10, "rounds": 80}, {"local.steps": 50, "rounds": 16}]
HALF_STEPS: list[Choice] = [{"local.steps": 10, "rounds": 40}, {"local.steps": 50, "rounds": 8}]
EQUATIONS = {"FedAvg": [each("local.lr", 3e-4, 1e-3, 3e-3), STEPS]}
GRIDS = {
    "head-cifar10": HEADS,
    "head-cifar100": MANY_CLASSES,
    f"head-cifar100{DECAY}": {"FIPA shared basis": [WIDER]},
    f"head-cifar100{MEMORY}": {"FIPA shared basis": [REMEMBERED]},
    "head-tiny-imagenet": MANY_CLASSES,
    f"head-tiny-imagenet{DECAY}": DECAYED,
    "head-cifar10-fedrcl": TRAINED_HERE,
    "pde-burgers": EQUATIONS,
    "pde-allen-cahn-2d": EQUATIONS,
    "poisson-5d-hard": {"FedAvg, tuned": [each("local.lr", 3e-4, 1e-3, 3e-3), HALF_STEPS]},
    "fit-mixture2d": {
        "FedAvg": [
            each("local.lr", 1e-4, 3e-4, 1e-3),
            [{"local.steps": 1000, "rounds": 6}, {"local.steps": 100, "rounds": 60}],
        ]
    },
}


def settings(arm: str, name: str) -> Iterator[Choice]:
    """All combinations."""
    for choices in product(*GRIDS[name][arm]):
        yield {key: value for choice in choices for key, value in choice.items()}


def told(setting: Choice, before: str = "") -> Iterator[str]:
    """Its parts, as they stand in a CSV."""
    for key, value in setting.items():
        if isinstance(value, dict):
            yield from told({inner: v for inner, v in value.items() if inner != "name"}, f"{before}{key}.")
        else:
            yield f"{before}{key} = {value}"


def score(results: fipa.Results, arm: str) -> float | None:
    """What an arm is judged by; None if it diverged."""
    if results.status(arm)[SEED] != "finished":
        return None
    run = results.content["arms"][arm][str(SEED)]
    if results.content["metric"]["goal"] == "min":
        return float(run["metric"][-1])
    averaged = [value for value in run["averaged_metric"] if value is not None]
    return round(max(statistics.mean(run["metric"][-5:]), averaged[-1]), 3)


def main(name: str, chosen: Sequence[str], warmup: str | None = None) -> None:
    """Run all settings of these arms, or of all; from the warm-up of a run that has seed 5, if there is one."""
    file = HERE / f"tuning-{name}.csv"
    for arm in chosen or GRIDS[name]:
        for setting in settings(arm, name):
            rows, text = read(file), ", ".join(told(setting))
            if any((row["arm"], row["setting"]) == (arm, text) for row in rows):
                continue
            with tempfile.TemporaryDirectory() as folder:
                changes = HALF.get(name, {}) | {f"arms.{arm}.{key}": value for key, value in setting.items()}
                experiment = name.removesuffix(DECAY).removesuffix(MEMORY)
                results = fipa.run(
                    experiment, arms=[arm], seeds=SEED, set=changes, out=f"{folder}/run", quiet=True, warmup=warmup
                )
            seconds = round(sum(results.content["arms"][arm][str(SEED)]["seconds"]), 1)
            rows.append({"arm": arm, "setting": text, "score": score(results, arm), "seconds": seconds})
            print(*rows[-1].values(), sep=" | ", flush=True)
            write(file, COLUMNS, rows)  # one by one: they take long


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=GRIDS)
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--warmup")
    args = parser.parse_args()
    main(args.name, args.arms, args.warmup)
