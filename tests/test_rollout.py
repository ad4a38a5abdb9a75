"""Acting: what a rollout keeps, episode ends, and that learning rebuilds what acting computed (invariants 2 and 6)."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
import toy_envs
from reference import GradientRecorder, args, make_agent


def rollouts(env_id, count, *flags, agent=None):
    """The first `count` rollouts of an agent that does not learn, with their carries and episodes."""
    a = args("--env-id", env_id, *flags)
    envs = ppo.make_envs(env_id, a.num_envs)
    agent = agent or make_agent(a)
    carry, results = ppo.first_carry(envs, agent, range(a.num_envs)), []
    for _ in range(count):
        rollout, carry, episodes = ppo.collect(envs, agent, carry, a.num_steps)
        results.append((rollout, carry, episodes))
    return a, agent, results


def ratio_error(a, agent, rollout):
    zeros = np.zeros(rollout.valid.shape)
    return ppo.update(agent, GradientRecorder(agent), rollout, zeros, a, np.random.default_rng(0))["debug/ratio_error"]


FLAGS = [
    (),
    ("--critic-lstm", "shared"),
    ("--critic-lstm", "none", "--lstm-layers", "2"),
    ("--batching", "fixed-size", "--max-seq-len", "4"),
]


@pytest.mark.parametrize("env_id", ["Ragged-v0", "Long-v0", "Three-v0", "Single-v0", "CartPoleNoVel-v1", "ShapesDiscrete-v0", "Shapes-v0"])
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_learning_rebuilds_the_log_probabilities_of_acting(env_id, flags):
    """Invariant 2, over four rollouts of 3 x 11 slots, with episodes that span rollouts. Fails if the stored state is zeroed, is
    the one after the step, or if a reset is one step off; time and environments can't be swapped, their numbers differ."""
    a, agent, results = rollouts(env_id, 4, "--update-epochs", "1", *flags)
    for rollout, _, _ in results:
        assert ratio_error(a, agent, rollout) < 1e-4


def test_the_ratio_error_sees_a_lost_initial_state():
    """The check itself must be able to fail: a cue in the first observation is still in the state two rollouts later."""
    a, agent, results = rollouts("Long-v0", 2, "--update-epochs", "1")
    rollout = results[1][0]
    assert rollout.valid.all() and rollout.initial_state.abs().sum() > 0
    lost = rollout._replace(initial_state=torch.zeros_like(rollout.initial_state))
    assert ratio_error(a, agent, rollout) < 1e-4 < 1e-2 < ratio_error(a, agent, lost)


def test_the_state_is_zero_at_episode_starts_and_nowhere_else():
    """Episodes of 3 steps: slots 0, 4, 8 of an environment start one, slots 3, 7 hold final observations. `state[t]` enters slot t."""
    a, agent, states = args("--env-id", "Three-v0"), None, []
    agent = make_agent(a)
    step = agent.step
    agent.step = lambda obs, state: (states.append(state.clone()), step(obs, state))[1]
    envs = ppo.make_envs("Three-v0", 2)
    rollout, carry, episodes = ppo.collect(envs, agent, ppo.first_carry(envs, agent, range(2)), 10)
    assert (~rollout.valid[:, 0]).nonzero()[0].tolist() == [3, 7]
    zero = [t for t, state in enumerate(states) if not state.any()]
    assert zero == [0, 4, 8] and [t for t, state in enumerate(states) if not state[..., 0, :].any()] == zero
    table = ppo.whole_sequences(rollout.valid)
    rebuilt = ppo.states_before(agent, rollout.obs.flatten(0, 1), rollout.initial_state, table)
    assert table.start.tolist() == [0, 4, 8] * 2 and not rebuilt.any()
    assert [length for _, _, length in episodes] == [3] * 4  # every logged length is 3, the ignored steps are not counted
    assert [episodic_return for _, episodic_return, _ in episodes] == [3.0] * 4
    # the next rollout goes on in the middle of an episode: only its first sequences use the stored state
    rollout, _, _ = ppo.collect(envs, agent, carry, 10)
    table = ppo.whole_sequences(rollout.valid)
    rebuilt = ppo.states_before(agent, rollout.obs.flatten(0, 1), rollout.initial_state, table)
    assert torch.equal(rebuilt[..., table.start == 0, :], carry.state) and carry.state.any()
    assert not rebuilt[..., table.start > 0, :].any()


def test_an_episode_that_ends_on_the_rollouts_last_step():
    """The next rollout's slot 0 is the ignored one, and the state is zero from slot 1."""
    _, agent, results = rollouts("Three-v0", 2, "--num-steps", "3")
    (first, carry, _), (second, _, _) = results
    assert first.valid.all() and carry.done.all()
    assert second.valid[:, 0].tolist() == [False, True, True]
    assert second.obs[0, :, 0].tolist() == [3, 3, 3] and second.obs[1, :, 0].tolist() == [0, 0, 0]
    table = ppo.whole_sequences(second.valid)
    assert (table.start == 1).all()
    assert not ppo.states_before(agent, second.obs.flatten(0, 1), second.initial_state, table).any()


def test_the_environments_reset_on_the_next_step_also_where_gymnasium_has_a_class_of_its_own():
    """`gym.make_vec("CartPole-v1")` takes another vector class unless told not to."""
    for env_id in ("CartPole-v1", "PendulumNoVel-v1"):
        assert ppo.make_envs(env_id, 2).metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("no_vel_id, base_id, hidden", [(k, *v) for k, v in ppo.NO_VEL.items()])
def test_no_vel_environments_hide_the_velocities_and_keep_the_time_limit(no_vel_id, base_id, hidden):
    if "LunarLander" in base_id:
        pytest.importorskip("Box2D")
    envs = [gym.make(no_vel_id), gym.make(base_id)]
    assert gym.spec(no_vel_id).max_episode_steps == gym.spec(base_id).max_episode_steps
    envs[1].action_space.seed(0)
    (ours, _), (theirs, _) = (env.reset(seed=3) for env in envs)
    for _ in range(20):
        visible = np.setdiff1d(np.arange(len(theirs)), hidden)
        assert not ours[hidden].any() and np.array_equal(ours[visible], theirs[visible])
        action = envs[1].action_space.sample()
        (ours, *rest, _), (theirs, *expected, _) = (env.step(action) for env in envs)
        assert rest == expected
    assert theirs[hidden].any()


def test_no_lstm_state_is_kept_per_step():
    """Of all that lies between acting and learning, 4 x the steps add only observations, actions and the like: 4 x the bytes of
    these, not one of the state; and no array but the initial state has a hidden-size axis."""
    sizes = {}
    for steps in (8, 32):
        _, agent, [(rollout, _, _)] = rollouts("Long-v0", 1, "--num-steps", str(steps), "--lstm-hidden-size", "77")
        assert all(77 not in x.shape for x in rollout[:-1])
        sizes[steps] = [x.nbytes for x in rollout]
    assert sizes[8][-1] == sizes[32][-1] == 2 * 2 * 1 * 3 * 77 * 4
    per_step = 3 * (2 * 4 + 4 + 4 + 4 + 8 + 3)  # obs, action, logprob, value, reward, three flags, of 3 environments
    assert sum(sizes[32]) - sum(sizes[8]) == 24 * per_step


def test_gae_by_hand():
    """A termination at 2, a truncation at 4, both flags at 6: the recursion is cut at all three, and only 4 bootstraps.
    Slots 3, 5, 7 are the ignored ones."""
    rewards = np.array([1.0, 2, 3, 0, 4, 0, 5, 0, 6])[:, None]
    values = np.array([10.0, 20, 30, 40, 50, 60, 70, 80, 90, 100])[:, None]
    terminations, truncations = np.zeros((2, 9, 1), bool)
    terminations[[2, 6]], truncations[[4, 6]] = True, True
    advantages = ppo.gae(rewards, values, terminations, truncations, gamma=0.5, gae_lambda=0.5)[:, 0]
    a2 = 3 - 30.0
    a1 = 2 + 0.5 * 30 - 20 + 0.25 * a2
    a0 = 1 + 0.5 * 20 - 10 + 0.25 * a1
    a4 = 4 + 0.5 * 60 - 50
    a6 = 5 - 70.0
    a8 = 6 + 0.5 * 100 - 90
    assert np.allclose(advantages[[0, 1, 2, 4, 6, 8]], [a0, a1, a2, a4, a6, a8])


def test_a_truncation_bootstraps_from_the_final_observation():
    """The critic's value is its observation, t. With lambda 0 a step's target is reward + gamma V(next observation), so 1 + 0.9 (t + 1);
    a truncated episode's last step bootstraps from the final observation 5, a terminated one's target is 1."""
    for env_id, last in (("Truncated5-v0", 1 + 0.9 * 5), ("Terminated5-v0", 1.0)):
        agent = make_agent(args("--env-id", env_id))
        step = agent.step
        agent.step = lambda obs, state, step=step: (step(obs, state)[0], obs[:, 0], step(obs, state)[2])
        _, _, results = rollouts(env_id, 2, "--num-steps", "8", agent=agent)
        for rollout, _, _ in results:
            values = rollout.values.numpy()
            targets = values[:-1] + ppo.gae(rollout.rewards, values, rollout.terminations, rollout.truncations, 0.9, 0.0)
            t = rollout.obs[..., 0].numpy()
            assert np.allclose(targets[rollout.valid], np.where(t == 4, last, 1 + 0.9 * (t + 1))[rollout.valid])


def test_the_value_of_a_final_observation_uses_the_state_carried_to_it():
    """The value in the slot behind a truncation is the one the critic has when it goes on from the episode's last step."""
    _, agent, [(rollout, carry, _)] = rollouts("Truncated5-v0", 1, "--num-steps", "5")
    state = rollout.initial_state
    for t in range(5):
        _, value, state = agent.step(rollout.obs[t], state)
    _, value, _ = agent.step(torch.as_tensor(carry.obs), state)
    assert rollout.truncations[4].all() and torch.allclose(rollout.values[5], value)
    _, from_zero, _ = agent.step(torch.as_tensor(carry.obs), torch.zeros_like(state))
    assert not torch.isclose(value, from_zero).any()


def test_values_stay_high_before_a_time_limit_and_fall_before_a_termination():
    """Reward 1 a step, gamma 0.9: the value that is its own target is 10 everywhere under truncation, even one step before it; under
    termination it is 1 there. Iterated to the fixed point on the observation t."""
    for end, before_last in (("truncates", 10.0), ("terminates", 1.0)):
        env = toy_envs.Toy(50, 50, end)
        flags = np.zeros((50, 1), bool)
        env.reset(seed=0)
        rows = [env.step(np.zeros(1, np.float32)) for _ in range(50)]
        terminations, truncations = flags.copy(), flags.copy()
        terminations[:, 0], truncations[:, 0] = [r[2] for r in rows], [r[3] for r in rows]
        values = np.zeros((51, 1))
        for _ in range(400):
            values[:-1] += ppo.gae(np.ones((50, 1)), values, terminations, truncations, 0.9, 0.95)
            values[50] = values[49]  # the critic sees the final observation as it sees the one before
        assert abs(values[49, 0] - before_last) < 1e-3 and abs(values[0, 0] - (10 if end == "truncates" else 10 * (1 - 0.9**50))) < 1e-3


def test_reward_scaling_clears_at_every_episode_end_and_skips_ignored_steps():
    """Time-limited and terminating episodes with the same rewards get the same scale, over two rollouts."""
    scales = []
    for env_id in ("Truncated5-v0", "Terminated5-v0"):
        _, agent, results = rollouts(env_id, 2)
        running = np.zeros(3)
        for rollout, _, _ in results:
            scaled, running = ppo.scaled_rewards(agent, rollout, running, 0.9)
        expected = [sum(0.9**k for k in range(t + 1)) for t in range(5)]  # the discounted return at the steps of an episode
        steps = [slot % 6 for slot in range(22) if slot % 6 < 5] * 3
        std = np.std([expected[t] for t in steps])
        assert np.allclose(agent.return_stats[2], std**2) and agent.return_stats[0] == len(steps)
        assert np.allclose(scaled[rollout.valid], np.minimum(1 / std, 10))
        scales.append(agent.return_stats)
    assert torch.equal(*scales)


def test_observation_statistics_are_those_of_valid_steps():
    """Three-v0's valid observations are 0, 1, 2; the final observation 3 sits in ignored slots. Training must not count it."""
    a = args("--env-id", "Three-v0", "--num-steps", "8", "--total-timesteps", "24", "--eval-episodes", "0")
    agent, _, _ = ppo.train(a)
    assert (
        agent.obs_stats[0, 0] == 18 and agent.obs_stats[1, 0] == 1.0 and torch.isclose(agent.obs_stats[2, 0], torch.tensor(2 / 3).double())
    )
