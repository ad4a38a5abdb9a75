"""The sequence table and the three ways to make minibatches of it (invariants 1 and 7)."""

import numpy as np
import pytest

import ppo_lstm_seq as ppo
from reference import random_valid


def alternating(T, N, first):
    valid = np.ones((T, N), bool)
    valid[(0 if not first else 1) :: 2] = False
    return valid


VALID = {
    "random": random_valid(23, 5, np.random.default_rng(1)),
    "no episode ends": np.ones((7, 3), bool),
    "every episode has one step": alternating(8, 3, True),
    "an episode ended on the last rollout's last step": alternating(8, 3, False),
    "one step, one environment": np.ones((1, 1), bool),
    "one environment": random_valid(40, 1, np.random.default_rng(2)),
    "an episode ends on the last but one step": np.pad(np.ones((5, 2), bool), ((0, 1), (0, 0))),
}
STRATEGIES = [("whole-seq", None), ("fixed-size", None), ("env-split", None), ("whole-seq", 3), ("fixed-size", 2), ("env-split", 1)]


def taken_slots(pieces, groups, N):
    """The flat slot of every step of every minibatch."""
    return [ppo.time_major(pieces, rows, N)[2].numpy() for rows in groups]


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID.keys())
def test_whole_sequences_are_the_runs_a_loop_finds(valid):
    expected = []
    for n in range(valid.shape[1]):
        for t in range(len(valid)):
            if valid[t, n] and (t == 0 or not valid[t - 1, n]):
                expected.append([n, t, 0])
            if valid[t, n]:
                expected[-1][2] += 1
    table = ppo.whole_sequences(valid)
    assert np.column_stack([table.env, table.start, table.length]).tolist() == expected
    assert (table.length > 0).all() and (table.piece == 0).all()


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID.keys())
@pytest.mark.parametrize("batching, max_seq_len", STRATEGIES)
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_every_valid_step_is_in_exactly_one_minibatch(valid, batching, max_seq_len, num_minibatches):
    """Invariant 1. Seen to fail if a remainder, a first or a last sequence is dropped, or an ignored slot is taken."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        pieces, groups = ppo.drawn_minibatches(ppo.whole_sequences(valid), batching, num_minibatches, max_seq_len, rng)
        steps = taken_slots(pieces, groups, valid.shape[1])
        assert all(len(s) for s in steps) and len(groups) <= num_minibatches
        assert sorted(np.concatenate(steps)) == np.flatnonzero(valid).tolist()
        if max_seq_len is not None:
            assert pieces.length.max() <= max_seq_len
        if batching == "fixed-size":
            assert max(map(len, steps)) - min(map(len, steps)) <= 1
            assert len(groups) == min(num_minibatches, valid.sum())
        if batching == "env-split":
            envs = [set(pieces.env[rows]) for rows in groups]
            assert sum(map(len, envs)) == len(set.union(*envs))  # no environment in two minibatches
        if batching == "whole-seq":
            assert len(groups) == min(num_minibatches, len(pieces.env))  # fewer sequences than minibatches: one each
            if max_seq_len is None:
                whole = ppo.whole_sequences(valid)
                assert set(zip(*pieces, strict=True)) == set(zip(*whole, strict=True))


def test_pieces_continue_the_row_before():
    """The states behind a cut are rebuilt by this rule."""
    valid = VALID["random"]
    for batching, max_seq_len in STRATEGIES:
        pieces, _ = ppo.drawn_minibatches(ppo.whole_sequences(valid), batching, 4, max_seq_len, np.random.default_rng(0))
        whole = {(env, start) for env, start, _, _ in zip(*ppo.whole_sequences(valid), strict=True)}
        for i, piece in enumerate(pieces.piece):
            if piece == 0:
                assert (pieces.env[i], pieces.start[i]) in whole
            else:
                assert pieces.piece[i - 1] == piece - 1 and pieces.env[i - 1] == pieces.env[i]
                assert pieces.start[i - 1] + pieces.length[i - 1] == pieces.start[i]


def test_planted_numbers_come_out_in_time_order():
    """Slot (t, n) holds 100 t + n. A reshape that interleaves time, or swaps time and environments, breaks the order."""
    valid = VALID["random"]
    T, N = valid.shape
    planted = (100 * np.arange(T)[:, None] + np.arange(N)).flatten()
    pieces = ppo.whole_sequences(valid)
    rows, lengths, index = ppo.time_major(pieces, np.arange(len(pieces.env)), N)
    assert (np.diff(lengths) <= 0).all()
    expected = []
    for step in range(lengths.max()):  # step-major, the longest sequence first
        expected += [100 * (pieces.start[r] + step) + pieces.env[r] for r in rows if pieces.length[r] > step]
    assert planted[index.numpy()].tolist() == expected


def test_groups_are_even_and_drawn_anew():
    """Balance comes first: on lengths from 1 to 100 the largest group is within 5% of the smallest; and no epoch's grouping
    is the last one's."""
    lengths = np.random.default_rng(0).integers(1, 101, 60)
    rng = np.random.default_rng(0)
    draws = [ppo.balanced_groups(lengths, 4, rng) for _ in range(5)]
    for group in draws:
        steps = np.bincount(group, lengths)
        assert len(steps) == 4 and steps.max() - steps.min() < 0.05 * steps.min()
    assert len({tuple(d) for d in draws}) == 5
    assert len({tuple(g) for g in (ppo.balanced_groups(np.full(8, 9), 4, rng) for _ in range(5))}) > 1
    assert (np.bincount(ppo.balanced_groups(np.full(8, 9), 4, rng)) == 2).all()


def test_of_the_draws_the_most_even_one_wins_and_of_equally_even_ones_the_least_padded():
    lengths = np.arange(1, 31)

    def score(group):
        steps = np.bincount(group, lengths)
        padding = sum((group == g).sum() * lengths[group == g].max() for g in range(3)) - lengths.sum()
        return round(100 * (steps.max() - steps.min()) / (lengths.sum() / 3)), padding

    ties_decided_by_padding = 0
    for seed in range(20):
        winner = ppo.balanced_groups(lengths, 3, np.random.default_rng(seed), draws=8)
        rng = np.random.default_rng(seed)
        scores = [score(ppo.balanced_groups(lengths, 3, rng, draws=1)) for _ in range(8)]
        assert score(winner) == min(scores)
        even = [s for s in scores if s[0] == min(scores)[0]]
        ties_decided_by_padding += len(set(even)) > 1
    assert ties_decided_by_padding > 0
