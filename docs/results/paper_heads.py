"""Table 2 of the paper beside ours, from CSVs that `docs/results/shared.py` has written of `fipa run head-...`."""

from __future__ import annotations

from statistics import mean

from paper_cells import OURS, PAPERS, told
from paper_cells import score as late_score
from tables import HERE, Row, by_arm, spread

SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny-ImageNet"}
ALPHAS = ("0.05", "0.1", "0.3", "0.6", "iid")
# the best round of FedAvg and of FIPA for each alpha, after 1000 rounds of FedRCL on ResNet-18
PUBLISHED = {
    "cifar10": ((79.27, 81.87), (84.42, 86.17), (88.88, 89.44), (89.92, 90.24), (92.04, 92.30)),
    "cifar100": ((54.97, 57.09), (59.62, 61.41), (62.95, 64.25), (64.81, 65.80), (64.78, 65.18)),
    "tiny-imagenet": ((37.38, 39.86), (43.68, 45.41), (48.00, 48.94), (49.53, 50.06), (48.94, 49.03)),
}
FIRST_ORDER = ("FedAvg", "FedProx", "SCAFFOLD", "FedAvgM", "FedVARP")
CEILING = "centralised"
SEEDS = {1: "one seed", 3: "three seeds"}
WARM = f"{OURS}, warm-up"
WARM_ROUNDS = {"cifar100": 10, "tiny-imagenet": 20}
REMARKS = {
    "cifar10": "We had aimed at two points: that is more than the ceiling leaves.",
    "cifar100": (
        "For a seventh of SCAFFOLD's uplink and five times its downlink it is level with SCAFFOLD where clients differ "
        "most, behind elsewhere, and far above Fed3R. Here it forgets: a client's weight is multiplied by 0.95 in each "
        "round since it was seen, and the damping is 0.003 (`tuning-head-cifar100-memory.csv`). Without that it was "
        "0.8 ± 0.9 behind SCAFFOLD at alpha 0.05: a client is asked three times in 60 rounds, and what it told of a "
        "head that was still far away is no longer true. Without forgetting, weight decay does not help, and 300 "
        "columns gain 0.2 to 0.3 points (`tuning-head-cifar100-decay.csv`). Runs that differ in rounding only are up "
        "to 0.2 points apart here. The paper's rule sends 20 eigenpairs each, fewer than there are classes; with "
        "dampings from 0.001 to 0.1 it is between 23.4 and 26.9 on seed 5, and learning rates of 0.03 and 0.1 give it "
        "27.6 and 23.7."
    ),
    "tiny-imagenet": (
        "Behind SCAFFOLD, above Fed3R, with 200 classes and 100 images of each. It has a weight decay of 0.03, which "
        "takes it from 50.7 to 51.9 on seed 5 and does no good to SCAFFOLD (52.7) and FedVARP "
        "(`tuning-head-tiny-imagenet-decay.csv`; 300 columns have 52.1 there, and we kept 200): we think that without "
        "it, it learns images by heart, as the ceiling does. Forgetting as on CIFAR-100 takes it to 51.3. After "
        "FedAvg's rounds it was not tuned. The paper's rule, with 20 eigenpairs per client, is at 7.7, 10.7 and 11.5 "
        "on seed 5 with dampings of 0.1, 0.01 and 0.001, and a learning rate of 0.03 gives it 11.4 instead of 10.7."
    ),
}
# where first-order rules are ahead of the shared basis
BEHIND = {"cifar10": {"iid"}, "cifar100": {"0.1", "0.3", "0.6", "iid"}, "tiny-imagenet": set(ALPHAS)}


def cell(name: str, alpha: str) -> dict[str, dict[int, Row]]:
    """The rows of a set and an alpha by arm and seed; nothing where they have not been run.

    The ceiling has all data in one place, so it is that of the first alpha, or of seed 0, where it was not run.
    """
    arms, first = (by_arm(HERE / f"table2-{name}-{one}.csv") for one in (alpha, ALPHAS[0]))
    if arms:
        found = arms.get(CEILING, first[CEILING])
        arms[CEILING] = {seed: found.get(seed, found[0]) for seed in arms[OURS]}
    return arms


def run() -> list[tuple[str, str]]:
    """Sets and alphas that have been run."""
    return [(name, alpha) for name in SETS for alpha in ALPHAS if cell(name, alpha)]


def score(row: Row) -> float:
    """What an arm is judged by; a ceiling by its best round, as it learns the examples by heart in the end."""
    return row["best"] if row["arm"] == CEILING else late_score(row)


def best_first_order(arms: dict[str, dict[int, Row]]) -> str:
    """The first-order rule with the highest mean."""
    return max((arm for arm in FIRST_ORDER if arm in arms), key=lambda arm: mean(map(score, arms[arm].values())))


def above(arms: dict[str, dict[int, Row]], ours: str, other: str) -> list[float]:
    """By how much an arm is above another one on each seed that both have."""
    return [score(row) - score(arms[other][seed]) for seed, row in arms[ours].items() if seed in arms[other]]


def table_2() -> list[str]:
    """The lines of the table."""
    head = ["set, alpha", "paper: FedAvg", "paper: FIPA", "FedAvg", "best first-order", "Fed3R", PAPERS, OURS]
    head += ["ceiling", "shared basis above first-order", "below the ceiling", "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, alpha in run():
        arms, place = cell(name, alpha), ALPHAS.index(alpha)
        best = best_first_order(arms)
        cells = [f"{SETS[name]}, {alpha}", *(f"{value:.2f}" for value in PUBLISHED[name][place])]
        cells += [_shown(arms, "FedAvg"), f"{_shown(arms, best)} ({best})"]
        cells += [_shown(arms, arm) for arm in ("Fed3R", PAPERS, OURS, CEILING)]
        cells += [told(above(arms, OURS, best)), told(above(arms, CEILING, OURS)) if CEILING in arms else ""]
        lines.append("| " + " | ".join([*cells, str(len(arms[OURS]))]) + " |")
    return lines


def _shown(arms: dict[str, dict[int, Row]], arm: str) -> str:
    return spread([score(row) for row in arms[arm].values()], 1) if arm in arms else ""


def section() -> list[str]:
    """What stands in the page."""
    if not run():
        return ["Not in this form yet: see [heads](vision.md#heads)."]
    cells = [cell(name, alpha) for name, alpha in run()]
    words = (
        "Not the paper's protocol, which two processors cannot bear (1000 rounds of FedRCL on ResNet-18; below is a "
        "smaller one), but how it is done today: the head of a frozen, public backbone, from zero, 60 rounds, 5 of 100 "
        "clients. So the paper's accuracies are those of other networks; what can be compared is who is ahead. Ours "
        "are the better of the last five rounds and of the mean of the last ten heads. Settings were chosen on seed 5 "
        "of each set at alpha 0.05; FedProx and FedAvgM have FedAvg's learning rate. Of Tiny-ImageNet we have a fifth "
        "of the training images. The seeds are those of the shared basis; on CIFAR-100 and Tiny-ImageNet the paper's "
        "rule has one. *Ceiling* is the best of 100 rounds of L-BFGS (30 on Tiny-ImageNet) on all data in one place, "
        "whatever alpha and the seed are. With many classes, rules that are noisier can end above it: in the end it "
        "has learned the images by heart "
        f"({min(row['last'] for arms in cells for row in arms.get(CEILING, {}).values()):.1f} at the worst)."
    )
    command = (
        "`fipa run head-cifar10`, `head-cifar100`, `head-tiny-imagenet`, with `--set problem.partition.alpha=0.1` and "
        "so on, or "
    )
    return [
        words, "\n".join(table_2()), *(_verdict(name) for name in dict.fromkeys(name for name, _ in run())),
        command + "`--set 'problem.partition={name=\"iid\"}'`.", *protocol(),
    ]  # fmt: skip


def protocol(name: str = "cifar10") -> list[str]:
    """The paper's own protocol at a size that two processors can bear."""
    found = {alpha: by_arm(HERE / f"table2-fedrcl-{name}-{alpha}.csv") for alpha in ALPHAS}
    cells = {alpha: arms for alpha, arms in found.items() if arms}
    one = next(iter(next(iter(cells.values()))["FedAvg"].values()))
    words = (
        f"*The paper's protocol, smaller*, {SETS[name]}: {one['after']} rounds of FedRCL of a residual network of 4 "
        f"blocks (the paper: 1000 rounds of ResNet-18), then {one['rounds']} rounds in which the head alone is "
        f"trained, sketched, sent and aggregated; {SEEDS[len(next(iter(cells.values()))[OURS])]}. Settings of the arms "
        f"in `tuning-head-{name}-fedrcl.csv` were chosen on seed 5 at alpha 0.3, after half as many rounds of FedRCL. "
        "The first rows are the paper's; then come ours, the arms in the order of their means."
    )
    lines = ["| arm | rounds | up, p | down, p | " + " | ".join(cells) + " |", "|---" * (4 + len(cells)) + "|"]
    for place, rule in enumerate(("FedAvg", "FIPA")):
        published = (f"{PUBLISHED[name][ALPHAS.index(alpha)][place]:.2f}" for alpha in cells)
        lines.append(f"| *paper: {rule}* |  |  |  | " + " | ".join(published) + " |")
    before = (f"{next(iter(arms['FedAvg'].values()))['initial']:.1f}" for arms in cells.values())
    lines.append("| *before the heads* |  |  |  | " + " | ".join(before) + " |")
    scores = {
        arm: [mean(map(score, arms[arm].values())) for arms in cells.values()] for arm in next(iter(cells.values()))
    }
    for arm, values in sorted(scores.items(), key=lambda pair: -mean(pair[1])):
        rows = [row for arms in cells.values() for row in arms[arm].values()]
        cost = [str(rows[0]["rounds"]), *(f"{mean(row[key] for row in rows):.0f}" for key in ("up_p", "down_p"))]
        lines.append("| " + " | ".join([arm, *cost, *(f"{value:.1f}" for value in values)]) + " |")
    return [words, "\n".join(lines), _protocol_verdict(cells), f"`fipa run head-{name}-fedrcl`."]


def _protocol_verdict(cells: dict[str, dict[str, dict[int, Row]]]) -> str:
    """What the rows of the smaller protocol say."""
    best = {alpha: best_first_order(arms) for alpha, arms in cells.items()}
    papers = [mean(above(arms, PAPERS, "FedAvg")) for arms in cells.values()]
    control = [mean(above(arms, PAPERS, best[alpha])) for alpha, arms in cells.items()]
    ours = [mean(above(arms, OURS, best[alpha])) for alpha, arms in cells.items()]
    left = [mean(above(arms, CEILING, OURS)) for arms in cells.values()]
    return (
        f"In the order of the columns, the paper's rule is {_signed(papers)} points from FedAvg, and "
        f"{_signed(control)} from the best first-order rule ({', '.join(best.values())}). The shared basis is "
        f"{_signed(ours)} points from "
        f"that one, and the ceiling {_signed(left)} above it."
    )


def _signed(values: list[float]) -> str:
    return ", ".join(f"{value:+.1f}" for value in values)


def _verdict(name: str) -> str:
    """What the rows of a set say."""
    found = {alpha: cell(name, alpha) for other, alpha in run() if other == name}
    cells = list(found.values())
    gains = [above(arms, OURS, best_first_order(arms)) for arms in cells]
    behind = {alpha for alpha, values in zip(found, gains, strict=True) if mean(values) < 0}
    papers = [above(arms, PAPERS, "FedAvg") for arms in cells if PAPERS in arms]
    if any(mean(values) > 0 for values in papers) or behind != BEHIND[name]:
        raise SystemExit(f"Table 2: the CSVs of {name} do not bear out what is said of them")
    text = f"{SETS[name]}: "
    if papers:
        text += (
            "FIPA improves heads, most where clients differ most. **Does not hold for the paper's rule here**: its "
            f"lead over FedAvg is {', '.join(map(told, papers))} points. "
        )
    text += f"The lead of the shared basis over the best first-order rule is {', '.join(map(told, gains))} points"
    text += " (in the order of the table; 95 % intervals, paired by seed, where there are several)."
    warm = {alpha: cell(name, alpha) for other, alpha in run() if other == name and WARM in cell(name, alpha)}
    for alpha, arms in warm.items():
        text += (
            f" If the first {WARM_ROUNDS[name]} of its rounds are FedAvg's (alpha {alpha}), the lead is "
            f"{told(above(arms, WARM, best_first_order(arms)))}."
        )
    return f"{text} {REMARKS[name]}"
