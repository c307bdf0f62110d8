"""The cells of the paper's Tables 1 and 2 beside ours, from CSVs that `docs/results/shared.py` has written."""

from __future__ import annotations

from statistics import mean

from tables import HERE, Row, by_arm, interval, spread

MODELS = {"cnn8k": "CNN-8k", "cnn23k": "CNN-23k", "cnn207k": "CNN-207k", "resnet20": "ResNet-20"}
SHORTER = {"cnn207k": 400, "resnet20": 100}  # rounds of warm-up where they are not 1000
ALPHAS = (0.01, 0.05, 0.1, 0.3, 0.6)
# Table 1, by model: FedAvg and FIPA for each alpha, the best of the rounds and their mean
BEST = {
    "cnn8k": ((44.09, 54.08), (47.76, 56.68), (54.08, 58.74), (57.37, 59.83), (60.06, 62.16)),
    "cnn23k": ((51.12, 60.66), (57.46, 62.89), (61.94, 65.33), (64.52, 67.23), (67.00, 69.29)),
    "cnn207k": ((58.45, 65.80), (68.07, 72.58), (72.62, 75.36), (76.21, 78.40), (77.75, 78.99)),
    "resnet20": ((43.10, 51.03), (61.45, 68.19), (73.49, 75.98), (83.50, 85.03), (85.94, 87.09)),
}
MEAN = {
    "cnn8k": ((38.80, 50.42), (44.41, 53.05), (48.16, 56.33), (52.63, 58.56), (57.13, 60.89)),
    "cnn23k": ((45.63, 56.49), (52.32, 59.93), (56.11, 63.58), (60.54, 65.99), (65.39, 68.77)),
    "cnn207k": ((53.14, 62.53), (65.14, 71.03), (68.53, 73.93), (73.80, 77.39), (76.31, 78.67)),
    "resnet20": ((36.17, 47.17), (56.66, 64.80), (69.25, 74.44), (81.98, 84.42), (85.12, 86.70)),
}
CONTROLS = ("FedAvg (lr/10)", "FedAvg (lr/10, tuned step)", "FedAvgM", "FedAdam", "SCAFFOLD", "FedVARP")
PAPERS, OURS = "FIPA (paper)", "FIPA shared basis"


def cell(model: str, alpha: float) -> dict[str, dict[int, Row]]:
    """The rows of a cell by arm and seed; nothing where it has not been run."""
    return by_arm(HERE / f"table1-{model}-{alpha}.csv")


def best_control(arms: dict[str, dict[int, Row]], key: str) -> str:
    """The control with the highest mean."""
    return max((arm for arm in CONTROLS if arm in arms), key=lambda arm: mean(row[key] for row in arms[arm].values()))


def differences(arms: dict[str, dict[int, Row]], ours: str, other: str, key: str) -> list[float]:
    """By how much an arm is above another one on each seed that both have."""
    return [row[key] - arms[other][seed][key] for seed, row in arms[ours].items() if seed in arms[other]]


def gain(arms: dict[str, dict[int, Row]], ours: str, key: str) -> str:
    """By how much an arm is above the best control, paired by seed."""
    if ours not in arms:
        return ""
    return told(differences(arms, ours, best_control(arms, key), key))


def told(gains: list[float]) -> str:
    """Paired gains as their mean, with a 95 % interval if there are several."""
    if len(gains) < 2:
        return f"{mean(gains):+.1f}"
    middle, half = interval(gains)
    return f"{middle:+.1f} ± {half:.1f}"


def table_1() -> list[str]:
    """The lines of the table: for each cell the best round, the mean of the rounds, and the paired gains."""
    head = ["model, alpha", "", "paper: FedAvg", "paper: FIPA", "FedAvg", "control", PAPERS, OURS]
    head += ["FIPA (paper), gain", "shared basis, gain", "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model, name in MODELS.items():
        for place, alpha in enumerate(ALPHAS):
            arms = cell(model, alpha)
            for what, key, paper in (("best", "best_15", BEST), ("mean", "mean_15", MEAN)):
                theirs = [f"{value:.2f}" for value in paper[model][place]]
                cells = [f"{name}, {alpha}" if what == "best" else "", what, *theirs]
                if arms:
                    cells += [_shown(arms, "FedAvg", key), _shown(arms, best_control(arms, key), key)]
                    cells += [_shown(arms, PAPERS, key), _shown(arms, OURS, key)]
                    cells += [gain(arms, PAPERS, key), gain(arms, OURS, key)]
                    cells.append(str(max(len(seeds) for seeds in arms.values())))
                lines.append("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
    return lines


def shorter_warmups() -> str:
    """What is smaller for larger networks."""
    run = {MODELS[model]: n for model, n in SHORTER.items() if any(cell(model, alpha) for alpha in ALPHAS)}
    each = " and ".join(f"{name} has {n} rounds of warm-up (`--set warmup.rounds={n}`)" for name, n in run.items())
    return f"{each}, and fewer controls."


LATE = 50  # rounds, of the controls that are in the running and of ours


def score(row: Row) -> float:
    """The better of the last five rounds and of the mean of the last ten models."""
    return max(row["last_5"], row["averaged"])


def late_cell(model: str, alpha: float) -> dict[str, dict[int, Row]]:
    """What ran for 50 rounds of a cell, with its score."""
    found: dict[str, dict[int, Row]] = {}
    for arm, seeds in cell(model, alpha).items():
        rows = {seed: row | {"score": score(row)} for seed, row in seeds.items() if row["rounds"] >= LATE}
        if rows:
            found[arm] = rows
    return found


def table_1_late() -> list[str]:
    """The same cells after 50 rounds, averaged models included: the best control and ours."""
    head = ["model, alpha", "control", "", OURS, "gain", "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model, name in MODELS.items():
        for alpha in ALPHAS:
            arms = late_cell(model, alpha)
            if OURS not in arms:
                continue
            best = best_control(arms, "score")
            cells = [f"{name}, {alpha}", best, _shown(arms, best, "score"), _shown(arms, OURS, "score")]
            lines.append("| " + " | ".join([*cells, gain(arms, OURS, "score"), str(len(arms[OURS]))]) + " |")
    return lines


def _shown(arms: dict[str, dict[int, Row]], arm: str, key: str) -> str:
    return spread([row[key] for row in arms[arm].values()], 1) if arm in arms else ""


def table_1_verdict() -> str:
    """What the cells that were run say, in words that follow from the numbers."""
    run = [(model, alpha, cell(model, alpha)) for model in MODELS for alpha in ALPHAS if cell(model, alpha)]
    if not run:
        return "No cell has been run in this form yet; [older runs](vision.md#five-of-a-hundred) have some of them."
    text = f"{len(run)} of 20 cells have been run. Gains are on the mean of the 15 rounds, paired by seed."
    papers = [arms for _, _, arms in run if PAPERS in arms]
    if papers:
        text += (
            f" The paper's rule is {_range([differences(arms, PAPERS, 'FedAvg', 'mean_15') for arms in papers])} "
            f"points above FedAvg, and {_over_control(papers, PAPERS)}: **the gain holds, but not for the reason "
            "given**. Most of it is the learning rate of the clients, which the published FIPA rounds divide by ten."
        )
    ours = [arms for _, _, arms in run if OURS in arms]
    return text + (f" The shared basis is {_over_control(ours, OURS)}." if ours else "")


def _over_control(cells: list[dict[str, dict[int, Row]]], rule: str) -> str:
    """By how much a rule is above the best control of each cell, and in how many of them that is no chance."""
    gains = [differences(arms, rule, best_control(arms, "mean_15"), "mean_15") for arms in cells]
    several = [interval(one) for one in gains if len(one) > 1]
    above, below = (sum(sign * middle > half for middle, half in several) for sign in (1, -1))
    return (
        f"{_range(gains)} above the best control of each cell (95 % intervals of {len(several)} cells with several "
        f"seeds: {above} above zero, {below} below)"
    )


def _range(gains: list[list[float]]) -> str:
    """From the least to the largest mean."""
    means = sorted(map(mean, gains))
    return f"{means[0]:+.1f} to {means[-1]:+.1f}" if len(means) > 1 else f"{means[0]:+.1f}"
