"""Which updates a round uses: those in time, and late ones of earlier rounds with less weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fipa.aggregation.update import ClientUpdate
from fipa.federation.arm import Arm
from fipa.federation.messages import Answers, Late, Reply
from fipa.federation.stage import Stage

Say = Callable[[int | str | None, str], None]


def arrivals(
    arm: Arm, stage: Stage, k: int, since: int, waiting: Sequence[Late], answers: Answers, say: Say
) -> tuple[list[ClientUpdate], tuple[Late, ...]]:
    """The updates of round k, and the late answers that are still to come or to be used.

    Where too few answered, or steps are judged and nobody is there to do so, late answers wait for the next round.
    Those to orders from before round `since`, in which the stage began, are of no use.
    """
    replies: Mapping[int, Reply] = answers.values
    late = [one for one in (*waiting, *answers.late) if one.sent >= since]
    for one in (*waiting, *answers.late):
        if one.sent < since:
            say(one.update.client_id, "its late answer belongs to the last stage: not used")
    alike = arm.participation.kind == "weighted"
    updates = [replace(reply.update, weight=1.0) if alike else reply.update for reply in replies.values()]
    present: set[int | str | None] = {update.client_id for update in updates}
    arriving = sorted((one for one in late if one.arrives <= k and one.sent < k), key=lambda one: -one.sent)
    still = [one for one in late if one.arrives > k and one.sent < k]
    reason = (
        "fewer than the quorum answered" if not answers.enough
        else "nobody answered in time to judge a step" if stage.control is not None and not replies
        else None
    )  # fmt: skip
    if reason is not None and arriving:
        say(None, f"{reason}: late answers wait")
        still += [replace(one, arrives=k + 1) for one in arriving]
        arriving = []
    for one in arriving:
        client, age, discount = one.update.client_id, k - one.sent, arm.faults.discount ** (k - one.sent)
        if client in present:
            say(client, f"late by {age}: a fresher answer is there, not used")
        elif not arm.faults.use_late or stage.sums:  # sums are of one round's random numbers
            say(client, f"late by {age}: not used")
        else:
            present.add(client)
            updates.append(replace(one.update, weight=(1.0 if alike else one.update.num_examples) * discount))
            say(client, f"late by {age}: used with weight x {discount:g}")
    for one in late:
        if one.sent == k:
            say(one.update.client_id, f"will be late by {one.arrives - k}{'' if arm.faults.use_late else ': not used'}")
            still += [one] if arm.faults.use_late else []
    return updates, tuple(still)


def arrived(updates: Sequence[ClientUpdate], replies: Mapping[int, Reply], waiting: Sequence[Late]) -> list[Late]:
    """The late answers among a round's updates, as they were sent: of each client the last that has arrived."""
    used = {update.client_id for update in updates} - set(replies)
    late = [one for one in waiting if one.update.client_id in used]
    return [one for one in late if any(one.update.delta is update.delta for update in updates)]
