"""The agent: stepping, whole sequences and the naive loop agree (invariants 3 and 5); actions and their probabilities."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
from reference import args, gradient, make_agent, make_envs, naive_outputs, random_rollout, random_valid, relative_error

VARIANTS = [
    ("--critic-lstm", "separate"),
    ("--critic-lstm", "shared"),
    ("--critic-lstm", "none"),
    ("--critic-lstm", "separate", "--lstm-layers", "2"),
]


def table_outputs(agent, rollout, pieces, **how):
    """Policy, value and index of all steps of all pieces, in one call."""
    b_obs = [x.flatten(0, 1) for x in rollout.obs]
    state = ppo.states_before(agent, b_obs, rollout.initial_state, pieces)
    rows, lengths, index = ppo.time_major(pieces, np.arange(len(pieces.env)), rollout.valid.shape[1])
    policy, value, _ = agent.run_sequences([leaf[index] for leaf in b_obs], state[..., rows, :], lengths, **how)
    return policy, value, index


def weighted_sum(policy, value, index):
    """A loss that gives every output of every slot a weight of its own, so that no two errors cancel."""
    weight = torch.sin(1.7 * index + 1).double()
    return (policy * weight[:, None, None]).sum() + (value * weight.cos()).sum()


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_seq_len", [None, 3])
def test_sequences_give_the_naive_loops_outputs_and_gradient(flags, packed, max_seq_len):
    """Invariant 5, float64. Seen to fail if a stored state is zeroed, a reset is one step off, a sequence runs into the next one, the
    state at a cut is wrong, or the gradient does not stop at a cut."""
    agent = make_agent(args("--lstm-hidden-size", "5", *flags), torch.float64)
    valid = random_valid(11, 3, np.random.default_rng(3))
    assert len(ppo.whole_sequences(valid).env) > 4
    rollout = random_rollout(agent, valid)
    pieces, _ = ppo.drawn_minibatches(ppo.whole_sequences(valid), "whole-seq", 1, max_seq_len, np.random.default_rng(0))
    policy, value, index = table_outputs(agent, rollout, pieces, packed=packed)
    weighted_sum(policy, value, index).backward()
    grad = gradient(agent)

    naive = naive_outputs(agent, rollout.obs, valid, rollout.initial_state, detach_every=max_seq_len)
    slots = [(int(i) // 3, int(i) % 3) for i in index]
    naive_policy, naive_value = (torch.stack([naive[s][k] for s in slots]) for k in (0, 1))
    agent.zero_grad()
    weighted_sum(naive_policy, naive_value, index).backward()
    assert relative_error(policy, naive_policy) < 1e-10 and relative_error(value, naive_value) < 1e-10
    assert relative_error(grad, gradient(agent)) < 1e-10


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_stepping_gives_the_naive_loops_outputs_and_states(flags):
    agent = make_agent(args("--lstm-hidden-size", "5", *flags), torch.float64)
    rollout = random_rollout(agent, np.ones((6, 3), bool))
    naive = naive_outputs(agent, rollout.obs, rollout.valid, rollout.initial_state)
    state = rollout.initial_state
    for t in range(6):
        policy, value, state = agent.step([x[t] for x in rollout.obs], state)
        for n in range(3):
            for ours, theirs in zip((policy[n], value[n], state[..., n, :]), naive[t, n], strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_state_behind_a_cut_is_the_one_the_naive_loop_has_there():
    agent = make_agent(args("--lstm-hidden-size", "5"), torch.float64)
    valid = random_valid(11, 3, np.random.default_rng(3), chance=0.1)
    rollout = random_rollout(agent, valid)
    pieces, _ = ppo.drawn_minibatches(ppo.whole_sequences(valid), "fixed-size", 7, 4, np.random.default_rng(0))
    assert pieces.piece.max() >= 2
    state = ppo.states_before(agent, [x.flatten(0, 1) for x in rollout.obs], rollout.initial_state, pieces)
    naive = naive_outputs(agent, rollout.obs, valid, rollout.initial_state)
    for i in np.flatnonzero(pieces.piece):
        assert torch.allclose(state[..., i, :], naive[pieces.start[i] - 1, pieces.env[i]][2], rtol=1e-10, atol=1e-12)


def test_what_the_padding_holds_changes_nothing():
    """Invariant 3: seen to fail if padded steps reach the heads or the loss."""
    agent = make_agent(args("--lstm-hidden-size", "5"), torch.float64)
    rollout = random_rollout(agent, random_valid(11, 3, np.random.default_rng(3)))
    pieces = ppo.whole_sequences(rollout.valid)
    assert len(set(pieces.length)) > 2
    results = []
    for pad in (0.0, 1e6, -3.0):
        agent.zero_grad()
        policy, value, index = table_outputs(agent, rollout, pieces, packed=False, pad=pad)
        weighted_sum(policy, value, index).backward()
        results.append((policy, value, gradient(agent)))
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


def test_one_environments_observations_do_not_reach_another():
    agent = make_agent(args())
    rollout = random_rollout(agent, np.ones((11, 3), bool))
    changed = rollout._replace(obs=(rollout.obs[0].clone(), rollout.obs[1]))
    changed.obs[0][:, 0] += 1
    pieces = ppo.whole_sequences(rollout.valid)
    (before, _, index), (after, _, _) = (table_outputs(agent, r, pieces) for r in (rollout, changed))
    same = index % 3 != 0
    assert torch.equal(before[same], after[same]) and not torch.isclose(before[~same], after[~same])[..., 0].any()


def test_gaussian_log_probability_and_entropy_are_summed_over_a_steps_actions():
    space = gym.spaces.Box(-1, 1, (2, 3), np.float32)
    policy, action = torch.randn(4, 6, 2), torch.randn(4, 6)
    logprob, entropy = ppo.logprob_and_entropy(space, policy, action)
    normal = torch.distributions.Normal(policy[..., 0], policy[..., 1].exp())
    assert torch.allclose(logprob, normal.log_prob(action).sum(-1), rtol=1e-5)
    assert torch.allclose(entropy, normal.entropy().sum(-1), rtol=1e-5)
    torch.manual_seed(3)
    draws = ppo.sampled_action(space, policy[:1].expand(20000, -1, -1))
    assert torch.allclose(draws.mean(0), policy[0, :, 0], atol=0.1) and torch.allclose(draws.std(0), policy[0, :, 1].exp(), rtol=0.05)
    assert torch.equal(ppo.sampled_action(space, policy, deterministic=True), policy[..., 0])


def distribution_of(space, logits, mask):
    """The (masked) logits (n, A, M) of an agent whose actor is `logits`, and torch's own distribution of each entry."""
    obs_space = gym.spaces.Tuple([gym.spaces.Box(-1, 1, (1,)), gym.spaces.MultiBinary(mask.shape[1:])])
    agent = ppo.Agent(obs_space, space, args())
    del agent.actor
    agent.actor = lambda _: logits.flatten(1)
    policy, _ = agent.heads(None, [torch.zeros(len(logits), 64)] * 2, mask)
    return policy, [
        torch.distributions.Categorical(logits=logits[:, a].masked_fill(~mask[:, a], -torch.inf)) for a in range(logits.shape[1])
    ]


@pytest.mark.parametrize(
    "space, counts, start",
    [
        (gym.spaces.Discrete(3, start=5), [3], [5]),
        (gym.spaces.MultiDiscrete([2, 5, 3]), [2, 5, 3], [0, 0, 0]),
        (gym.spaces.MultiDiscrete([[2, 5], [3, 1]], start=[[1, 0], [0, -2]]), [2, 5, 3, 1], [1, 0, 0, -2]),
        (gym.spaces.MultiBinary(2), [2, 2], [0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_discrete_log_probability_entropy_and_frequencies(space, counts, start, masked):
    """Against `torch.distributions`, one entry at a time, summed; invalid actions have probability 0 and add nothing to the entropy,
    and their logits get no gradient and no NaN."""
    A, M = len(counts), max(counts)
    logits = torch.randn(4, A, M, requires_grad=True)
    mask = torch.arange(M).expand(4, A, M) < torch.tensor(counts)[:, None]
    if masked:
        mask[1, 0, 0] = mask[2, -1, -1] = mask[0, 0, 1] = False
        mask |= torch.zeros(4, A, M, dtype=bool) | (~mask.any(-1, keepdim=True) & (torch.arange(M) < torch.tensor(counts)[:, None]))
    policy, categoricals = distribution_of(space, logits, mask)
    draws = ppo.sampled_action(space, policy[1:2].expand(20000, -1, -1))
    action = ppo.sampled_action(space, policy)
    logprob, entropy = ppo.logprob_and_entropy(space, policy, action)
    assert torch.allclose(logprob, sum(c.log_prob(action[:, a]) for a, c in enumerate(categoricals)))
    assert torch.allclose(entropy, sum(c.entropy() for c in categoricals), atol=1e-6)
    for a, c in enumerate(categoricals):
        assert torch.allclose(torch.bincount(draws[:, a], minlength=M) / 20000, c.probs[1], atol=0.02)
        assert not torch.bincount(draws[:, a], minlength=M)[~mask[1, a]].any()
    assert torch.equal(ppo.sampled_action(space, policy, deterministic=True), logits.masked_fill(~mask, -torch.inf).argmax(-1))
    sent = ppo.env_action(space, action)
    assert sent.dtype == space.dtype and all(row in space for row in sent)
    assert np.array_equal(sent.reshape(4, -1), action.numpy() + start)
    (logprob + entropy).sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[~mask].any()


def test_actions_are_clipped_for_the_environment_only():
    envs = make_envs("Pendulum-v1", 3)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args())
    agent.logstd.data.fill_(3.0)  # a std of 20 against bounds of +-2
    sent, step = [], envs.step
    envs.step = lambda action: (sent.append(action), step(action))[1]
    rollout, _, _ = ppo.collect(envs, agent, (envs.reset(seed=[0, 1, 2])[0], agent.initial_state(3)), 20)
    raw = rollout.actions.numpy()
    assert np.abs(raw).max() > 10
    assert np.allclose(np.stack(sent), (2 * raw).clip(-2, 2))  # in units of the bounds


def test_observations_are_normalised_by_running_statistics_and_clipped():
    agent = make_agent(args())
    data = np.random.default_rng(0).normal(50, 4, (1000, 2)).astype(np.float32)
    for part in np.split(data, [10, 400]):
        ppo.update_statistics(agent.obs_stats, torch.as_tensor(part))
    assert np.allclose(agent.obs_stats[1], data.mean(0)) and np.allclose(agent.obs_stats[2], data.var(0))
    assert agent.obs_stats[0].tolist() == [1000, 1000]
    features = agent.features([torch.as_tensor(np.array([data.mean(0) + data.std(0), [1e9, -1e9]])), None])
    assert torch.allclose(features, torch.tensor([[1.0, 1.0], [10.0, -10.0]]), atol=1e-3)
    agent.norm_obs = False
    assert agent.features([torch.tensor([[1e9, -3.0]]), None]).tolist() == [[1e9, -3.0]]
    before = agent.obs_stats.clone()
    ppo.update_statistics(agent.obs_stats, torch.zeros(0, 2))
    assert torch.equal(before, agent.obs_stats)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_packed_gives_the_cpus_padded_gradient():
    rollout = random_rollout(make_agent(args()), random_valid(11, 3, np.random.default_rng(3)))
    gradients = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        agent = make_agent(args()).to(device)
        moved = rollout._replace(obs=tuple(x.to(device) for x in rollout.obs), initial_state=rollout.initial_state.to(device))
        policy, value, index = table_outputs(agent, moved, ppo.whole_sequences(rollout.valid))
        weighted_sum(policy, value, index.to(device)).backward()
        gradients.append(gradient(agent).cpu())
    assert relative_error(*gradients) < 1e-4


def test_actions_are_in_units_of_the_bounds_where_there_are_any():
    low, high = np.array([-2, -np.inf, -1e4, -3e38], np.float32), np.array([0.5, np.inf, 3e4, 3e38], np.float32)
    space = gym.spaces.Box(low, high)
    actions = torch.tensor([[-1.0, -1, -1, -1], [1, 1, 1, 1], [0, 0, 0, 0], [9, 9, 9, 9]])
    expected = [[-2, -1, -1e4, -1], [0.5, 1, 3e4, 1], [-0.75, 0, 1e4, 0], [0.5, 9, 3e4, 9]]
    assert ppo.env_action(space, actions).tolist() == expected


def test_a_fresh_agent_sees_observations_as_they_are_and_remembers():
    """Statistics that change nothing but the clip, and forget-gate biases of 1 (the second quarter), all others 0."""
    envs = make_envs("Ragged-v0", 1)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args())
    assert torch.allclose(agent.features([torch.tensor([[3.0, -20.0]]), None]), torch.tensor([[3.0, -10.0]]))
    for lstm in agent.lstms:
        bias = (lstm.bias_ih_l0 + lstm.bias_hh_l0).view(4, -1)
        assert (bias[1] == 1).all() and not bias[[0, 2, 3]].any()


def test_integer_boxes_get_the_nearest_integer():
    space = gym.spaces.Box(0, 4, (1,), np.int64)
    assert ppo.env_action(space, torch.tensor([[-1.0], [-0.3], [0.8], [3.0]]))[:, 0].tolist() == [0, 1, 4, 4]
