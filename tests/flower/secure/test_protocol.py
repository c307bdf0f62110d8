"""The whole protocol: sums, clients that leave, parties that misbehave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fipa.flower.secure import SecureAggregationError, SecureClient, SecureServer
from fipa.flower.secure.fixed_point import FRACTION_BITS, encode

PHASES = ("keys", "shares", "masked", "unmask")
IDS = [12, 3, 2**63 + 1, 40, 7]  # as Flower's: neither sorted nor small
LENGTH = 6


def vectors(ids=IDS, seed=0):
    """Multiples of the step of the fixed point: their sums are exact."""
    generator = np.random.default_rng(seed)
    return {i: generator.integers(-(2**40), 2**40, LENGTH) * 2.0**-FRACTION_BITS for i in ids}


class Federation:
    """A server and its clients, each in a fresh process for every message."""

    def __init__(self, values, threshold=None):
        self.values = values
        self.server = SecureServer(values, "run", 1, LENGTH, threshold)
        self.states = {i: SecureClient(i, "run", 1).export() for i in values}

    def answer(self, client, request):
        one = SecureClient.restore(self.states[client])
        reply = one.reply(request, self.values[client] if request["phase"] == "masked" else None)
        self.states[client] = one.export()
        return reply

    def exchange(self, silent=()):
        """One phase."""
        for client, request in self.server.requests().items():
            if client not in silent:
                self.server.receive(client, self.answer(client, request))

    def until(self, phase):
        """Go through the phases before this one; return the requests of this one."""
        for _ in PHASES[: PHASES.index(phase)]:
            self.exchange()
        return self.server.requests()


def run(values, gone=None, threshold=None):
    """The sum when client i stays silent from phase gone[i] on."""
    gone = gone or {}
    federation = Federation(values, threshold)
    for k in range(4):
        federation.exchange({i for i, phase in gone.items() if PHASES.index(phase) <= k})
    return federation.server


# --- sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [None, 4, 5])
def test_sum_of_all(threshold):
    values = vectors()
    server = run(values, threshold=threshold)
    assert np.array_equal(server.total(), sum(values.values()))
    assert np.array_equal(server.total(), sum(values.values()))  # asking twice does no harm
    assert server.survivors == sorted(IDS)


@pytest.mark.parametrize(
    ("gone", "summed"),
    [
        ({3: "keys"}, [2**63 + 1, 12, 40, 7]),
        ({3: "shares"}, [2**63 + 1, 12, 40, 7]),
        ({3: "masked"}, [2**63 + 1, 12, 40, 7]),
        ({2**63 + 1: "masked", 7: "masked"}, [12, 3, 40]),
        ({3: "unmask", 40: "unmask"}, IDS),
        ({3: "shares", 12: "masked"}, [2**63 + 1, 40, 7]),
        ({3: "masked", 12: "unmask"}, [2**63 + 1, 12, 40, 7]),
    ],
)
def test_sum_of_those_who_stay(gone, summed):
    values = vectors()
    server = run(values, gone)
    assert np.array_equal(server.total(), sum(values[i] for i in summed))
    assert server.survivors == sorted(summed)


@st.composite
def histories(draw):
    ids = draw(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6, unique=True))
    threshold = draw(st.integers(max(2, len(ids) // 2 + 1), len(ids)))
    leaving = draw(st.permutations(ids))[threshold:]
    gone = {i: draw(st.sampled_from([*PHASES, "never"])) for i in leaving}
    return ids, threshold, {i: phase for i, phase in gone.items() if phase != "never"}


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(0, 1000))
def test_any_survivors_give_the_exact_sum(history, seed):
    ids, threshold, gone = history
    values = vectors(ids, seed)
    expected = sum(values[i] for i in ids if gone.get(i, "unmask") == "unmask")
    assert np.array_equal(run(values, gone, threshold).total(), expected)


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_survivors(phase):
    with pytest.raises(SecureAggregationError, match=rf"2 clients \(7, 40\) answered in phase '{phase}', 3 needed"):
        run(vectors(), dict.fromkeys([12, 3, 2**63 + 1], phase)).total()


def test_messages_fit_flower():
    """All but the masked vector can go into a ConfigRecord."""
    app = pytest.importorskip("flwr.app")
    federation = Federation(vectors())
    for phase in PHASES:
        for client, request in federation.server.requests().items():
            reply = federation.answer(client, request)
            federation.server.receive(client, reply)
            for message in (request, {name: value for name, value in reply.items() if name != "masked"}):
                assert dict(app.ConfigRecord(message)) == message
        assert request["phase"] == phase


# --- what the server sees ----------------------------------------------------------------------------------------


def uniformity(numbers):
    """p-value of the chi-square test that all bytes are equally likely."""
    from scipy import stats  # which takes a second to import

    return stats.chisquare(np.bincount(numbers.view(np.uint8), minlength=256)).pvalue


@pytest.mark.parametrize(
    "values", [np.zeros(20_000), np.random.default_rng(0).normal(size=20_000)], ids=["zero", "normal"]
)
def test_a_masked_vector_looks_random(values):
    server = SecureServer([1, 2], "run", 1, len(values))
    clients = {i: SecureClient(i, "run", 1) for i in (1, 2)}
    for _ in range(2):
        for i, request in server.requests().items():
            server.receive(i, clients[i].reply(request))
    masked = clients[1].reply(server.requests()[1], values)["masked"]
    assert uniformity(masked) > 1e-6
    assert uniformity(encode(values, FRACTION_BITS, 2)) < 1e-6


def test_no_secret_outlives_its_use():
    federation = Federation(vectors())
    request = federation.until("unmask")[3]
    assert b'"secrets": {}, "keys": {}, "shares": {"' in federation.states[3]
    federation.answer(3, request)
    assert b'"secrets": {}, "keys": {}, "shares": {}' in federation.states[3]


# --- what a client refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropped": [3]}, "both shares of 3"),
        ({"survivors": [3, 7, 12, 40]}, "not those that sent shares"),
        ({"survivors": [3, 7, 12, 40, 99]}, "not those that sent shares"),
        ({"survivors": [7, 12, 40, 2**63 + 1], "dropped": [3]}, "not those that sent shares"),  # 3 itself is asked
        ({"survivors": [3, 7], "dropped": [12, 40, 2**63 + 1]}, "only 2 clients are left, 3 needed"),
        ({"survivors": [3, 3, 7, 12, 40]}, "not a list of different client ids"),
    ],
)
def test_refuses_to_reveal(change, message):
    federation = Federation(vectors())
    request = federation.until("unmask")[3]
    with pytest.raises(SecureAggregationError, match=message):
        federation.answer(3, {**request, **change})


def test_reveals_only_once():
    federation = Federation(vectors())
    request = federation.until("unmask")[3]
    federation.answer(3, request)
    with pytest.raises(SecureAggregationError, match="this round is over"):
        federation.answer(3, {**request, "survivors": request["survivors"][1:], "dropped": [7]})


def test_changed_share_is_refused_by_name():
    federation = Federation(vectors())
    request = federation.until("masked")[3]
    place = request["ids"].index(40)
    sealed = bytearray(request["sealed"][place])
    sealed[20] ^= 1
    request["sealed"][place] = bytes(sealed)
    with pytest.raises(SecureAggregationError, match="shares of client 40 for client 3 were changed"):
        federation.answer(3, request)


def test_shares_for_another_client_are_refused():
    federation = Federation(vectors())
    requests = federation.until("masked")
    forged = requests[3]
    forged["sealed"][forged["ids"].index(7)] = requests[12]["sealed"][requests[12]["ids"].index(7)]
    with pytest.raises(SecureAggregationError, match="shares of client 7 for client 3"):
        federation.answer(3, forged)


def test_clients_with_different_lists_of_keys_cannot_read_each_other():
    federation = Federation(vectors())
    requests = federation.until("shares")
    without_last = {name: value[:4] if isinstance(value, list) else value for name, value in requests[3].items()}
    federation.answer(3, without_last)
    replies = {sender: federation.answer(sender, requests[sender]) for sender in (7, 12)}
    sealed = [reply["sealed"][reply["ids"].index(3)] for reply in replies.values()]
    with pytest.raises(SecureAggregationError, match="shares of client 7 for client 3"):
        federation.answer(3, {"phase": "masked", "run": "run", "round": 1, "ids": [7, 12], "sealed": sealed})


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("change", [{"round": 2}, {"run": "other"}, {"phase": "done"}])
def test_replay_is_refused(phase, change):
    federation = Federation(vectors())
    request = {**federation.until(phase)[3], **change}
    with pytest.raises(SecureAggregationError, match=f"the server sent a message of {next(iter(change))}"):
        federation.answer(3, request)


def test_shares_of_an_old_round_are_refused_whatever_their_label():
    old, new = Federation(vectors()), Federation(vectors())
    request = old.until("masked")[3]
    new.until("masked")
    with pytest.raises(SecureAggregationError, match=r"shares of client 7 for client 3 .* not of this round"):
        new.answer(3, request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 2}, "threshold 2 among 5 clients"),
        ({"threshold": 6}, "threshold 6 among 5 clients"),
        ({"fraction_bits": 60}, "60 fraction bits"),
        ({"length": -1}, "length -1"),
        ({"ids": [1, 7, 12, 40, 2**63 + 1]}, "has not those of client 3"),
        ({"mask_keys": [bytes(32)] * 5}, "has not those of client 3"),
        ({"mask_keys": [bytes(32)] * 4}, "4 instead of 5 mask_keys"),
        ({"channel_keys": [b""] * 5}, "channel_keys with 0 bytes"),
    ],
)
def test_refuses_bad_settings(change, message):
    federation = Federation(vectors())
    request = {**federation.until("shares")[3], **change}
    with pytest.raises(SecureAggregationError, match=message):
        federation.answer(3, request)


def test_sets_the_smallest_crowd_itself():
    federation = Federation(vectors())
    federation.states[3] = SecureClient(3, "run", 1, at_least=4).export()
    with pytest.raises(SecureAggregationError, match="at least 4"):
        federation.answer(3, federation.until("shares")[3])
    with pytest.raises(SecureAggregationError, match="at_least must be 2"):
        SecureClient(3, "run", 1, at_least=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(LENGTH + 1), r"client 3 has a vector of shape \(7,\)"),
        (np.full(LENGTH, np.nan), "entry 0 of the vector is nan"),
        (np.full(LENGTH, 1e12), r"largest entry 1e\+12 .* 5 clients"),
    ],
)
def test_refuses_bad_vectors_and_can_try_again(values, message):
    federation = Federation(vectors())
    request = federation.until("masked")[3]
    good, federation.values[3] = federation.values[3], values
    with pytest.raises(SecureAggregationError, match=message):
        federation.answer(3, request)
    federation.values[3] = good
    assert federation.answer(3, request)["masked"].dtype == np.uint64


def test_values_belong_to_one_phase():
    client, start = SecureClient(3, "run", 1), {"phase": "keys", "run": "run", "round": 1}
    with pytest.raises(SecureAggregationError, match="in the phase 'masked' and in no other"):
        client.reply(start, np.zeros(LENGTH))


def test_refuses_shares_of_strangers_or_of_too_few():
    federation = Federation(vectors())
    request = federation.until("masked")[3]
    for ids, message in (([99], "shares of 99"), ([3], "shares of 3"), ([7], "shares of 2 clients, 3 needed")):
        with pytest.raises(SecureAggregationError, match=message):
            federation.answer(3, {**request, "ids": ids, "sealed": request["sealed"][:1]})


# --- what the server refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "change", "message"),
    [
        ("keys", {"mask_key": b"short"}, "mask_key with 5 bytes"),
        ("keys", {"channel_key": "text"}, "channel_key with str"),
        ("keys", {"round": 0}, "message of round 0, expected 1"),
        ("shares", {"ids": [7, 12, 40, 99]}, "for other clients"),
        ("shares", {"sealed": []}, "0 instead of 4 sealed"),
        ("shares", {"sealed": [b""] * 4}, "sealed with 0 bytes"),
        ("shares", {"commitment": None}, "commitment with NoneType"),
        ("masked", {"masked": np.zeros(LENGTH)}, "float64"),
        ("masked", {"masked": np.zeros(2, dtype=np.uint64)}, "uint64"),
        ("masked", {"masked": b""}, "masked bytes"),
        ("unmask", {"ids": [3]}, "of other clients"),
        ("unmask", {"shares": [b""] * 5}, "shares with 0 bytes"),
    ],
)
def test_malformed_reply_is_refused_by_name_and_the_rest_go_on(phase, change, message):
    federation = Federation(vectors())
    for one in PHASES:
        requests = federation.server.requests()
        for client, request in requests.items():
            reply = federation.answer(client, request)
            if (one, client) == (phase, 3):
                with pytest.raises(SecureAggregationError, match=f"client 3 (sent|revealed) .*{message}"):
                    federation.server.receive(3, {**reply, **change})
            else:
                federation.server.receive(client, reply)
    summed = IDS if phase == "unmask" else [i for i in IDS if i != 3]
    assert np.array_equal(federation.server.total(), sum(federation.values[i] for i in summed))


@pytest.mark.parametrize("silent", [(), (7,)], ids=["seed", "mask key"])
def test_wrong_share_is_noticed(silent):
    federation = Federation(vectors())
    for _ in range(2):
        federation.exchange()
    federation.exchange(silent)
    for client, request in federation.server.requests().items():
        reply = federation.answer(client, request)
        place = reply["ids"].index(7)
        if client == 3:
            reply["shares"][place] = bytes(66)
        federation.server.receive(client, reply)
    with pytest.raises(SecureAggregationError, match=r"shares of client 7's secret do not fit: .* 3, "):
        federation.server.total()


def test_uninvited_or_repeated_reply():
    federation = Federation(vectors())
    requests = federation.until("keys")
    reply = federation.answer(3, requests[3])
    federation.server.receive(3, reply)
    for client in (3, 99):
        with pytest.raises(SecureAggregationError, match=f"client {client} was not asked, or has answered already"):
            federation.server.receive(client, reply)


def test_no_total_before_the_end_and_no_phase_after_it():
    federation = Federation(vectors())
    with pytest.raises(SecureAggregationError, match="go through all four phases"):
        federation.server.total()
    federation.until("unmask")
    with pytest.raises(SecureAggregationError, match=r"take the total\(\)"):
        federation.server.requests()


@pytest.mark.parametrize(("count", "threshold"), [(1, None), (4, 2), (4, 5), (2, 1)])
def test_server_needs_a_sound_threshold(count, threshold):
    with pytest.raises(SecureAggregationError, match=f"of {count} clients: it must be at least 2"):
        SecureServer(range(count), "run", 1, LENGTH, threshold)


def test_server_needs_sound_fraction_bits():
    with pytest.raises(SecureAggregationError, match="fraction_bits 60"):
        SecureServer(range(3), "run", 1, LENGTH, fraction_bits=60)
