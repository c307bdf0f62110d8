"""The shared basis: orthonormal for good, the same bits in every copy, and nobody's direction in it as it was."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from aggregation.layouts import FORMS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.basis import NEWS, ROOT, Basis, Move, follow, new_columns
from fipa.federation.exact import FINE, GRID, mark_of, outside
from fipa.federation.fewbits import entries, pack

P = 300
SEEDS = st.integers(0, 2**31 - 1)
ROUGH = 0.2  # share of a direction's length that 4 bits per entry may leave out


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)


def directions(count: int, seed: int = 1, parameters: int = P) -> list[Tensor]:
    return list(randn(count, parameters, seed=seed))


def basis_of(count: int, seed: int = 1, parameters: int = P) -> Basis:
    return Basis.empty(parameters).widened(directions(count, seed, parameters), rng(seed))


def spd(size: int, seed: int = 1) -> Tensor:
    rows = randn(2 * size, size, seed=seed, dtype=torch.float64)
    return rows.T @ rows


def skewness(columns: Tensor) -> float:
    """The largest entry of Q^T Q - I."""
    wide = columns.double()
    return float((wide.T @ wide - torch.eye(wide.shape[1], dtype=torch.float64)).abs().max()) if wide.numel() else 0.0


def beyond(basis: Basis, vector: Tensor) -> float:
    """The share of a vector's length that lies outside of the span, by least squares."""
    wide, v = basis.columns.double(), vector.double()
    solution = torch.linalg.lstsq(wide, v[:, None]).solution
    return float((v - (wide @ solution)[:, 0]).norm() / v.norm())


# --- orthonormal ---


@pytest.mark.long
@pytest.mark.parametrize("bits", [2, 4])
def test_orthonormal_after_hundreds_of_rounds_and_the_same_in_every_copy(bits: int) -> None:
    """Growth and turns with a limit of 24 columns; three clients that are away for 1, 7 and 150 rounds at a time."""
    generator, basis, worst = rng(5), Basis.empty(P), 0.0
    drift = torch.randn(P, generator=generator)
    copies = dict.fromkeys((1, 7, 150), basis)
    for k in range(1, 401):
        drift = drift + 0.1 * torch.randn(P, generator=generator)  # gradients resemble those of the round before
        if len(basis) + 2 > 24:
            basis = basis.moved(basis.turn(spd(len(basis), seed=k), keep=18))
        news = [drift + 0.3 * torch.randn(P, generator=generator) for _ in range(2)]
        basis = basis.widened(news, generator, bits=bits)
        worst = max(worst, skewness(basis.columns))
        copies |= {every: brought(copy, basis) for every, copy in copies.items() if k % every == 0}
    assert worst < 1e-6
    assert len(basis) > 18
    assert basis.version > 480
    for copy in copies.values():
        assert torch.equal(brought(copy, basis).columns, basis.columns)


def brought(copy: Basis, basis: Basis) -> Basis:
    """A client's copy after the news, from where these begin: its own, or nothing."""
    moves = basis.news(copy.version)
    known = copy.columns if not moves or moves[0].mark == copy.mark else copy.columns[:, :0]
    columns = follow(known, moves)
    assert mark_of(columns) == basis.mark
    return Basis(columns, basis.version)


def test_single_precision_holds_all_digits() -> None:
    """Q^T Q in float32, as those compute who use it."""
    basis = basis_of(200)
    assert basis.columns.dtype == torch.float32
    assert float((basis.columns.T @ basis.columns - torch.eye(200)).abs().max()) < 1e-6


def test_a_turn_makes_it_orthonormal_again() -> None:
    bent = torch.round((basis_of(20).columns.double() + 1e-4 * randn(P, 20, seed=3)) * GRID) / GRID
    basis = Basis(bent.float())
    assert skewness(basis.columns) > 1e-4
    assert skewness(basis.moved(basis.turn(spd(20), keep=20)).columns) < 1e-6


@given(size=st.integers(2, 30), share=st.floats(0, 1), decay=st.floats(0.5, 1.0), seed=SEEDS)
def test_a_turn_keeps_the_span_of_the_leading_eigenvectors(size: int, share: float, decay: float, seed: int) -> None:
    """To what 8 bits per share leave of it, for any spectrum: here as random matrices have it, or falling faster."""
    basis, fall = basis_of(size, seed), decay ** torch.arange(size, dtype=torch.float64)
    S = fall[:, None] * spd(size, seed) * fall
    keep = round(share * size)
    move = basis.turn(S, keep)
    R, (values, vectors) = move.turn(basis.gram()), torch.linalg.eigh(S)
    leading = vectors[:, size - keep :]
    assert float((leading - R @ (R.T @ leading)).norm()) < 0.03 * math.sqrt(size)
    found = torch.linalg.eigvalsh(R.T @ S @ R)
    torch.testing.assert_close(found, values[size - keep :], rtol=0.05, atol=1e-3 * float(values[-1]))
    turned = basis.moved(move)
    assert len(turned) == keep
    torch.testing.assert_close(turned.columns.double(), basis.columns.double() @ R, rtol=0, atol=2 / GRID)
    assert all(beyond(basis, column) < 1e-6 for column in turned.columns.T)
    assert move.nbytes == (size - keep) * (keep + 8)


def test_the_columns_that_go_are_those_that_matter_least() -> None:
    """With a curvature that is diagonal they need give nothing to the others."""
    basis = basis_of(6)
    move = basis.turn(torch.tensor([4.0, 1e-3, 2.0, 3.0, 1e-4, 5.0]).double().diag(), keep=4)
    assert move.root is not None
    assert move.root[:, 0].tolist() == [1, 4]
    assert not move.tensor.any()
    torch.testing.assert_close(basis.moved(move).columns, basis.columns[:, [0, 2, 3, 5]], rtol=0, atol=4 / GRID)


# --- the same bits ---


def on_grid(tensor: Tensor, steps: float) -> bool:
    scaled = tensor.double() * steps
    return torch.equal(scaled, scaled.round())


def products(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """One matrix product, summed in several orders."""
    order = torch.randperm(a.shape[1], generator=rng(8))
    parts = [a[:, i : i + 7] @ b[i : i + 7] for i in range(0, a.shape[1], 7)]
    one_by_one = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
    for i in order.tolist():
        one_by_one += torch.outer(a[:, i], b[i])
    return {
        "as it is": a @ b,
        "transposed": (b.T.contiguous() @ a.T.contiguous()).T,
        "permuted": a[:, order] @ b[order],
        "einsum": torch.einsum("ik,kj->ij", a, b),
        "in chunks": sum(parts, torch.zeros_like(one_by_one)),
        "chunks backwards": sum(reversed(parts), torch.zeros_like(one_by_one)),
        "one by one": one_by_one,
        "summed exactly": torch.tensor(
            [[math.fsum((row * column).tolist()) for column in b.T] for row in a], dtype=torch.float64
        ),
    }


@pytest.mark.parametrize(("parameters", "size"), [(60, 40), (40, 40), (200, 11)])
def test_a_turn_is_exact_in_whatever_order_it_is_summed(parameters: int, size: int) -> None:
    """Of square bases too, whose rows are as long as rows can be."""
    basis = basis_of(size, parameters=parameters)
    move = basis.turn(spd(size), keep=size)
    assert on_grid(basis.columns, GRID)
    found = products(basis.columns.double(), move.turn(basis.gram()))
    assert [name for name, one in found.items() if not torch.equal(one, found["as it is"])] == []
    rounded = (found["as it is"] * GRID).round() / GRID
    assert torch.equal(basis.moved(move).columns.double(), rounded)


@pytest.mark.parametrize(("parameters", "size", "keep"), [(60, 40, 30), (40, 40, 20), (200, 11, 3)])
def test_what_makes_a_turn_orthonormal_is_exact_in_whatever_order(
    monkeypatch: pytest.MonkeyPatch, parameters: int, size: int, keep: int
) -> None:
    """Every product of two matrices on the way to the root, and the Gram matrix before it."""
    basis = basis_of(size, parameters=parameters)
    S = spd(size)
    move, seen = basis.turn(S, keep), []
    usual = Tensor.__matmul__

    def watched(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.clone(), b.clone()))
        return usual(a, b)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "__matmul__", watched)
        move.turn(basis.gram())
    assert len(seen) > 6
    for a, b in seen:
        found = products(a, b)
        assert [name for name, one in found.items() if not torch.equal(one, found["as it is"])] == []


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("parameters", "size"), [(61, 30), (40, 20), (200, 11)])
def test_codes_are_made_orthonormal_exactly_in_whatever_order(parameters: int, size: int, bits: int) -> None:
    """Each of the three products that every party computes; the last one again on the grid."""
    basis = basis_of(size, parameters=parameters)
    wide = basis.columns.double()
    new = new_columns(basis.columns, directions(size // 2, seed=4, parameters=parameters))
    codes = entries(pack(new, bits), parameters)
    lengths = codes.double().norm(dim=0)
    given = codes.double() / 2.0 ** torch.tensor([int(n**2 + 0.5).bit_length() // 2 for n in lengths.tolist()])
    inside = products(wide.T.contiguous(), given)
    assert [name for name, one in inside.items() if not torch.equal(one, inside["as it is"])] == []
    inner = (inside["as it is"] * FINE).round() / FINE
    removed = products(wide, inner)
    assert [name for name, one in removed.items() if not torch.equal(one, removed["as it is"])] == []
    loose = outside(basis.columns, codes)
    torch.testing.assert_close(loose, given - removed["as it is"], rtol=0, atol=0.5 / GRID)
    assert on_grid(loose, GRID)
    move = basis.widened(directions(size // 2, seed=4, parameters=parameters), rng(), bits=bits).moves[-1]
    assert move.root is not None
    ends = products(outside(basis.columns, entries(move.tensor, parameters)), move.root.double() / ROOT)
    assert [name for name, one in ends.items() if not torch.equal(one, ends["as it is"])] == []
    assert torch.equal(move(basis.columns)[:, size:].double(), (ends["as it is"] * GRID).round() / GRID)


@pytest.mark.parametrize("parameters", range(1, 10))
def test_few_parameters_whatever_the_bits(parameters: int) -> None:
    for bits in (2, 4):
        basis = Basis.empty(parameters).widened(directions(1, parameters=parameters), rng(), bits=bits)
        assert len(basis) == 1
        assert torch.equal(brought(Basis.empty(parameters), basis).columns, basis.columns)


def test_two_bits_take_half_of_the_bytes_and_lose_a_tenth_of_the_energy() -> None:
    (given,) = directions(1, parameters=10_000)
    fine, rough = (Basis.empty(10_000).widened([given], rng(), bits=bits) for bits in (4, 2))
    assert (fine.moves[0].tensor.nbytes, rough.moves[0].tensor.nbytes) == (5000, 2500 + 313)
    assert beyond(fine, given) ** 2 < 0.02
    assert 0.08 < beyond(rough, given) ** 2 < 0.12  # with one step for all, four levels lose 0.1175 at best


def test_codes_that_add_nothing() -> None:
    """Two columns that look the same in 4 bits add one."""
    basis = Basis.empty(4)
    one = torch.tensor([1.0, 0.02, 0.0, 0.0])
    assert len(basis.widened([one, torch.tensor([1.0, 0.0, 0.02, 0.0])], rng(), most=1)) == 1
    full = Basis(torch.eye(4)[:, :3].contiguous())
    assert outside(full.columns, torch.tensor([[7], [1], [0], [0]], dtype=torch.int8)).norm() == 0


def test_off_the_grid_the_order_matters() -> None:
    """So the test above can fail."""
    a, b = randn(60, 40, dtype=torch.float64), randn(40, 40, seed=2, dtype=torch.float64)
    found = products(a, b)
    assert any(not torch.equal(one, found["as it is"]) for one in found.values())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_same_bits_of_any_strides_and_addresses(form: Callable[[Tensor], Tensor]) -> None:
    basis, fresh, S = basis_of(33), directions(5, seed=7), spd(33)
    odd = Basis(form(basis.columns), basis.version)
    assert odd.mark == basis.mark
    wide, other = (one.widened(given, rng(3)) for one, given in ((basis, fresh), (odd, [form(d) for d in fresh])))
    assert torch.equal(wide.columns, other.columns)
    turn = basis.turn(S, keep=20)
    assert torch.equal(odd.turn(form(S), keep=20).tensor, turn.tensor)
    expected = turn(basis.columns)
    assert torch.equal(Move(form(turn.tensor), form(turn.root))(form(basis.columns)), expected)
    added = wide.moves[-1]
    assert torch.equal(Move(form(added.tensor), form(added.root))(form(basis.columns)), wide.columns)
    assert torch.equal(Move(form(expected))(form(basis.columns)), torch.cat([basis.columns, expected], dim=1))


def test_a_checksum_tells_copies_apart() -> None:
    columns = basis_of(4).columns
    other = columns.clone()
    other[17, 2] += 1 / GRID
    assert mark_of(columns) == mark_of(columns.clone())
    assert mark_of(columns) != mark_of(other)
    assert mark_of(columns) != mark_of(columns[:, [1, 0, 2, 3]])


# --- what is in it ---


@given(before=st.integers(0, 6), count=st.integers(1, 6), size=st.floats(-6, 6), seed=SEEDS)
def test_the_span_contains_the_directions(before: int, count: int, size: float, seed: int) -> None:
    old = directions(before, seed, 40)
    basis = Basis.empty(40).widened(old, rng(seed)) if before else Basis.empty(40)
    fresh = [10**size * d for d in directions(count, seed + 1, 40)]
    wider = basis.widened(fresh, rng(seed))
    assert len(wider) == before + count
    assert skewness(wider.columns) < 1e-6
    assert all(beyond(wider, d) < ROUGH for d in (*old, *fresh))
    assert torch.equal(wider.columns[:, :before], basis.columns)


@given(size=st.integers(1, 8), count=st.integers(1, 4), seed=SEEDS)
def test_nothing_is_added_for_what_is_in_it(size: int, count: int, seed: int) -> None:
    basis = basis_of(size, seed, 40)
    inside = list((basis.columns @ randn(size, count, seed=seed)).T)
    assert basis.widened(inside, rng()) is basis
    new, *rest = directions(3, seed + 1, 40)
    wider = basis.widened([inside[0], new, 2 * new, new - inside[0], *rest[:1]], rng())
    assert len(wider) == size + 2


@pytest.mark.parametrize(("share", "added"), [(0.5, 0), (2.0, 1)])
def test_how_much_of_a_direction_must_be_new(share: float, added: int) -> None:
    basis = basis_of(3)
    new = new_columns(basis.columns, directions(1, seed=9))[:, 0]
    direction = basis.columns[:, 0].double() + share * NEWS * new
    assert len(basis.widened([direction], rng())) == 3 + added


def test_of_most_directions_the_leading_ones() -> None:
    """Three clients agree on a, two on b, one says c: two columns span a and b."""
    a, b, c = basis_of(3).columns.T
    basis = Basis.empty(P).widened([a, -2 * a, a, 5 * b, b, 9 * c], rng(), most=2)
    assert len(basis) == 2
    assert max(beyond(basis, a), beyond(basis, b)) < ROUGH
    assert beyond(basis, c) > 0.95
    assert Basis.empty(P).widened([a, b], rng(), most=0).version == 0


def test_as_many_as_hold_a_share() -> None:
    """Five agree on a, three on b, one says c: a and b have eight ninths of the squared lengths."""
    a, b, c = basis_of(3).columns.T
    given = [a, a, -3 * a, a, a, b, b, 2 * b, c]
    empty = Basis.empty(P)
    assert [new_columns(empty.columns, given, share=s).shape[1] for s in (0.1, 0.5, 0.6, 0.88, 0.9, 1.0)] == [
        1, 1, 2, 2, 3, 3,
    ]  # fmt: skip
    assert new_columns(empty.columns, given, most=1, share=0.9).shape[1] == 1
    assert len(empty.widened(given, rng(), share=0.85)) == 2
    assert len(empty.widened([a], rng(), share=0.1)) == 1


def test_a_basis_of_all_there_is() -> None:
    basis = basis_of(9, parameters=6)
    assert len(basis) == 6
    assert skewness(basis.columns) < 1e-6
    assert basis.widened(directions(3, seed=4, parameters=6), rng()) is basis


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_directions_that_are_none(bad: float) -> None:
    """Of a client that is at its minimum, or that lies: they add nothing, and leave the others' as they were."""
    basis, good, none = basis_of(3), directions(2, seed=6), torch.full((P,), bad)
    assert basis.widened([none], rng()) is basis
    partly = good[0].clone()
    partly[3] = bad if bad else float("nan")
    wider = basis.widened([none, good[0], partly, good[1]], rng())
    assert torch.equal(wider.columns, basis.widened(good, rng()).columns)


def test_new_columns_are_no_clients_directions() -> None:
    """The rotation is as likely as any other: on average a column has the same share of each client's direction."""
    given = list(basis_of(4).columns.T)
    cosines = []
    for seed in range(400):
        (move,) = Basis.empty(P).widened(given, rng(seed)).moves
        codes = entries(move.tensor, P).float()
        cosines.append(torch.stack(given) @ (codes / codes.norm(dim=0)))
    found = torch.stack(cosines)
    assert float((found.square().mean(0) - 1 / 4).abs().max()) < 0.06
    assert float(found.mean(0).abs().max()) < 0.12
    assert float((found.abs() > 0.999).float().mean()) < 0.01


def test_the_rotation_is_the_generators() -> None:
    one, again, other = (Basis.empty(P).widened(directions(4), rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.columns, again.columns)
    assert not torch.allclose(one.columns, other.columns, atol=0.01)
    assert all(beyond(one, column) < 2 * ROUGH for column in other.columns.T)


# --- copies ---


def history() -> list[Basis]:
    """Nine versions: growth, turns that drop, growth."""
    found = [Basis.empty(P)]
    for k in range(8):
        basis = found[-1]
        grown = k % 3 != 2
        found.append(
            basis.widened(directions(4, seed=20 + k), rng(k))
            if grown
            else basis.moved(basis.turn(spd(len(basis), seed=k), keep=len(basis) - 3))
        )
    return found


def test_news_bring_every_earlier_copy_up_to_date() -> None:
    versions = history()
    copies = {basis.mark: basis.columns for basis in versions}
    for last in versions:
        for version in (*range(last.version + 1), None, last.version + 1):
            moves = last.news(version)
            if (version or 0) == last.version:
                assert moves == ()
                continue
            found = follow(copies[moves[0].mark], moves)
            assert torch.equal(found, last.columns)
            assert sum(move.nbytes for move in moves) <= last.columns.numel() * 4
            assert moves[0].mark in (versions[version].mark if version in range(9) else "", versions[0].mark)
    assert len(versions[-1].news(7)) == 1
    assert versions[-1].news(7)[0].tensor.shape == (P // 2, 4)


def test_those_who_know_nothing_are_sent_all_moves() -> None:
    basis = history()[2]
    assert basis.news(None) == basis.moves
    assert basis.news(None)[0].mark == mark_of(torch.zeros(P, 0))


def test_those_who_were_away_for_too_long_are_sent_all_columns() -> None:
    """What is larger than all columns is forgotten."""
    basis = basis_of(4)
    for k in range(20):
        basis = basis.moved(basis.turn(spd(len(basis), seed=k), keep=1)).widened(directions(3, seed=100 + k), rng(k))
    assert len(basis.moves) < basis.version
    for version in (None, 0):
        (move,) = basis.news(version)
        assert torch.equal(move.tensor, basis.columns)
        assert move.mark == mark_of(torch.zeros(P, 0))


def test_a_move_that_does_not_fit() -> None:
    columns = basis_of(4).columns
    codes, root = torch.zeros(P // 2, 2, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.int32)
    assert follow(columns, [Move(codes, root)]).shape == (P, 6)
    shares, twice, beyond = torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 2), torch.tensor([[1, 0], [4, 0]])
    gone = torch.tensor([[1, 0], [3, 0]], dtype=torch.int32)
    assert torch.equal(follow(columns, [Move(shares, gone)]), columns[:, [0, 2]])
    turns = [Move(shares), Move(shares[:, :1], gone), Move(shares, gone[1:]), Move(shares, twice.int())]
    turns += [Move(shares, beyond.int()), Move(shares, -beyond.int())]
    for move in (Move(torch.zeros(P + 1, 2)), *turns, Move(codes[1:], root), Move(codes, root[1:])):
        with pytest.raises(FipaError, match="does not fit this copy of it: ask for all columns"):
            follow(columns, [move])


@pytest.mark.parametrize("version", [0, 1, 3, 8])
def test_through_a_checkpoint(version: int) -> None:
    basis, file = history()[version], io.BytesIO()
    torch.save(basis.tensors(), file)
    file.seek(0)
    back = Basis.of(torch.load(file, weights_only=True))
    assert torch.equal(back.columns, basis.columns)
    assert back.version == version
    assert [move.mark for move in back.moves] == [move.mark for move in basis.moves]
    for one, other in zip(back.moves, basis.moves, strict=True):
        assert torch.equal(one.tensor, other.tensor)
        assert (one.root is None) == (other.root is None)
        assert one.root is None or torch.equal(one.root, other.root)
    fresh = directions(3, seed=50)
    assert torch.equal(back.widened(fresh, rng()).columns, basis.widened(fresh, rng()).columns)


@pytest.mark.parametrize("parameters", [7, 8, 23])
def test_products_in_parts_have_the_bits_of_whole_ones(monkeypatch: pytest.MonkeyPatch, parameters: int) -> None:
    """In parts of seven rows: one, one and a row, and three with a rest; and each of them a share of two threads."""
    found = {}
    monkeypatch.setattr("fipa.parallel.cores", lambda: 2 * torch.get_num_threads())
    for part, share in ((7, 1), (7, 16), (10**6, 16)):
        monkeypatch.setattr("fipa.parallel.PART", part)
        monkeypatch.setattr("fipa.parallel.SHARE", share)
        basis = basis_of(3, parameters=parameters)
        move = basis.turn(spd(3), keep=2)
        wider = basis.widened(list(torch.randn(2, parameters, generator=rng(4))), rng(5))
        found[part, share] = basis.gram(), basis.moved(move).columns, wider.columns
    for one, *others in zip(*found.values(), strict=True):
        assert all(torch.equal(one, other) for other in others)
