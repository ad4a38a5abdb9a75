"""Acting: what a rollout keeps, episode ends, and that learning rebuilds what acting computed (invariants 2 and 6)."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
from reference import GradientRecorder, args, make_agent, make_envs, recorded_train


def rollouts(env_id, count, *flags, agent=None):
    """The first `count` rollouts of an agent that does not learn, with their carries and episodes."""
    a = args("--env-id", env_id, *flags)
    envs = ppo.make_envs(a)
    agent = agent or make_agent(a)
    carry, results = (envs.reset(seed=range(a.num_envs))[0], agent.initial_state(a.num_envs)), []
    for _ in range(count):
        rollout, carry, episodes = ppo.collect(envs, agent, carry, a.num_steps)
        results.append((rollout, (*carry, envs.done), episodes))
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
    """Invariant 2, over four rollouts of 3 x 11 slots, with episodes that span rollouts. Seen to fail if the stored state is zeroed, is
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
    envs = make_envs("Three-v0", 2)
    rollout, carry, episodes = ppo.collect(envs, agent, (envs.reset(seed=[0, 1])[0], agent.initial_state(2)), 10)
    assert (~rollout.valid[:, 0]).nonzero()[0].tolist() == [3, 7]
    zero = [t for t, state in enumerate(states) if not state.any()]
    assert zero == [0, 4, 8] and [t for t, state in enumerate(states) if not state[..., 0, :].any()] == zero
    table = ppo.whole_sequences(rollout.valid)
    rebuilt = ppo.states_before(agent, [x.flatten(0, 1) for x in rollout.obs], rollout.initial_state, table)
    assert table.start.tolist() == [0, 4, 8] * 2 and not rebuilt.any()
    assert [length for _, _, length in episodes] == [3] * 4  # every logged length is 3, the ignored steps are not counted
    assert [episodic_return for _, episodic_return, _ in episodes] == [3.0] * 4
    # the next rollout goes on in the middle of an episode: only its first sequences use the stored state
    rollout, _, _ = ppo.collect(envs, agent, carry, 10)
    table = ppo.whole_sequences(rollout.valid)
    rebuilt = ppo.states_before(agent, [x.flatten(0, 1) for x in rollout.obs], rollout.initial_state, table)
    assert torch.equal(rebuilt[..., table.start == 0, :], carry[1]) and carry[1].any()
    assert not rebuilt[..., table.start > 0, :].any()


def test_an_episode_that_ends_on_the_rollouts_last_step():
    """The next rollout's slot 0 is the ignored one, and the state is zero from slot 1."""
    _, agent, results = rollouts("Three-v0", 2, "--num-steps", "3")
    (first, carry, _), (second, _, _) = results
    assert first.valid.all() and carry[2].all()
    assert second.valid[:, 0].tolist() == [False, True, True]
    assert second.obs[0][0, :, 0].tolist() == [3, 3, 3] and second.obs[0][1, :, 0].tolist() == [0, 0, 0]
    table = ppo.whole_sequences(second.valid)
    assert (table.start == 1).all()
    assert not ppo.states_before(agent, [x.flatten(0, 1) for x in second.obs], second.initial_state, table).any()


def test_the_environments_reset_on_the_next_step_also_where_gymnasium_has_a_class_of_its_own():
    """`gym.make_vec("CartPole-v1")` takes another vector class unless told not to."""
    for env_id in ("CartPole-v1", "PendulumNoVel-v1"):
        assert make_envs(env_id, 2).metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP


@pytest.mark.parametrize(
    "no_vel_id, base_id, hidden",
    [
        ("PendulumNoVel-v1", "Pendulum-v1", [2]),
        ("CartPoleNoVel-v1", "CartPole-v1", [1, 3]),
        ("MountainCarNoVel-v0", "MountainCar-v0", [1]),
        ("MountainCarContinuousNoVel-v0", "MountainCarContinuous-v0", [1]),
        ("LunarLanderNoVel-v3", "LunarLander-v3", [2, 3, 5]),
        ("LunarLanderContinuousNoVel-v3", "LunarLanderContinuous-v3", [2, 3, 5]),
    ],
)
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
        assert all(77 not in x.shape for x in (*rollout.obs, *rollout[1:-1]))
        sizes[steps] = [x.nbytes for x in (*rollout.obs, *rollout[1:])]
    assert sizes[8][-1] == sizes[32][-1] == 2 * 2 * 1 * 3 * 77 * 4
    per_step = 3 * (2 * 4 + 2 + 4 + 4 + 4 + 8 + 3)  # obs, mask, action, logprob, value, reward, three flags, of 3 environments
    assert sum(sizes[32]) - sum(sizes[8]) == 24 * per_step


def test_gae_by_hand():
    """A termination at 2, a truncation at 4, both flags at 6: the recursion is cut at all three, and only 4 bootstraps.
    Slots 3, 5, 7 are the ignored ones; a terminal observation may be NaN, and so its value."""
    rewards = np.array([1.0, 2, 3, 0, 4, 0, 5, 0, 6])[:, None]
    values = np.array([10.0, 20, 30, np.nan, 50, 60, 70, np.nan, 90, 100])[:, None]
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
        agent.step = lambda obs, state, step=step: (step(obs, state)[0], torch.as_tensor(obs[0][:, 0]), step(obs, state)[2])
        _, _, results = rollouts(env_id, 2, "--num-steps", "8", agent=agent)
        for rollout, _, _ in results:
            values = rollout.values.numpy()
            targets = values[:-1] + ppo.gae(rollout.rewards, values, rollout.terminations, rollout.truncations, 0.9, 0.0)
            t = rollout.obs[0][:-1, :, 0].numpy()
            assert np.allclose(targets[rollout.valid], np.where(t == 4, last, 1 + 0.9 * (t + 1))[rollout.valid])


def test_the_value_of_a_final_observation_uses_the_state_carried_to_it():
    """The value in the slot behind a truncation is the one the critic has when it goes on from the episode's last step."""
    _, agent, [(rollout, carry, _)] = rollouts("Truncated5-v0", 1, "--num-steps", "5")
    state = rollout.initial_state
    for t in range(5):
        _, value, state = agent.step([x[t] for x in rollout.obs], state)
    _, value, _ = agent.step(carry[0], state)
    assert rollout.truncations[4].all() and torch.allclose(rollout.values[5], value)
    _, from_zero, _ = agent.step(carry[0], torch.zeros_like(state))
    assert not torch.isclose(value, from_zero).any()


def test_a_value_of_ten_holds_up_to_a_time_limit_but_not_to_a_termination():
    """Reward 1 a step, gamma 0.9: a critic that says 10 is right everywhere under truncation at 50, one step before it too; under
    termination it is 9 too high at the last step."""
    for env_id, last in (("Truncated50-v0", 0.0), ("Terminated50-v0", -9.0)):
        agent = make_agent(args("--env-id", env_id))
        step = agent.step
        agent.step = lambda obs, state, step=step: (step(obs, state)[0], torch.full((len(obs[0]),), 10.0), step(obs, state)[2])
        _, _, [(rollout, _, _)] = rollouts(env_id, 1, "--num-steps", "60", agent=agent)
        advantages = ppo.gae(rollout.rewards, rollout.values.numpy(), rollout.terminations, rollout.truncations, 0.9, 0.0)
        assert np.allclose(advantages[:49], 0) and np.allclose(advantages[49], last) and np.allclose(advantages[51:], 0)


@pytest.mark.parametrize("env_id", ["Truncated5-v0", "Terminated5-v0"])
@pytest.mark.parametrize("norm_reward", ["--norm-reward", "--no-norm-reward"])
def test_training_computes_advantages_from_the_scaled_rewards_the_flags_and_the_runs_gamma(env_id, norm_reward):
    """Three rollouts of `train`: a loop over each environment recomputes what `update` was given, the scale's running statistics and
    the discounted return across rollouts included. Also: observation statistics stand still between acting and learning, or the
    ratio error would show it, as they start far from this task's."""
    flags = ("--gamma", "0.8", "--gae-lambda", "0.7", "--num-steps", "8", "--total-timesteps", "72", "--eval-episodes", "0", norm_reward)
    _, calls, _, _ = recorded_train(args("--env-id", env_id, *flags))
    running, seen = np.zeros(3), []
    for metrics, rollout, advantages in calls:
        for t, n in np.argwhere(rollout.valid):
            fresh = t > 0 and not rollout.valid[t - 1, n] or t == 0 and rollout.obs[0][0, n, 0] == 0
            running[n] = rollout.rewards[t, n] + (0 if fresh else 0.8 * running[n])
            seen.append(running[n])
        scale = np.std(seen) if norm_reward == "--norm-reward" else 1.0
        values = rollout.values.double().numpy()
        for n in range(3):
            advantage = 0.0
            for t in reversed(range(8)):
                bootstrap = 0.0 if rollout.terminations[t, n] else 0.8 * values[t + 1, n]
                ended = rollout.terminations[t, n] or rollout.truncations[t, n]
                delta = min(rollout.rewards[t, n] / scale, 10) + bootstrap - values[t, n]
                advantage = delta + (0 if ended else 0.8 * 0.7 * advantage)
                if rollout.valid[t, n]:
                    assert advantages[t, n] == pytest.approx(advantage, rel=1e-4, abs=1e-5)
        assert metrics["debug/ratio_error"] < 1e-4


def test_reward_scaling_clears_at_every_episode_end_and_skips_ignored_steps():
    """Time-limited and terminating episodes with the same rewards get the same scale, over two rollouts; scaled rewards are clipped."""
    scales = []
    for env_id in ("Truncated5-v0", "Terminated5-v0"):
        _, agent, results = rollouts(env_id, 2)
        running = np.zeros(3)
        for rollout, _, _ in results:
            scaled, running = ppo.with_scaled_rewards(agent, rollout, running, 0.9)
        expected = [sum(0.9**k for k in range(t + 1)) for t in range(5)]  # the discounted return at the steps of an episode
        steps = [slot % 6 for slot in range(22) if slot % 6 < 5] * 3
        std = np.std([expected[t] for t in steps])
        assert np.allclose(agent.return_stats[2], std**2) and agent.return_stats[0] == len(steps)
        assert np.allclose(scaled.rewards[rollout.valid], np.minimum(1 / std, 10))
        scales.append(agent.return_stats)
    assert torch.equal(*scales)
    rollout.rewards[3], agent.return_stats[0] = -1e6, 1e12
    assert ppo.with_scaled_rewards(agent, rollout, running, 0.9)[0].rewards[3].tolist() == [-10.0] * 3


def test_observation_statistics_are_those_of_valid_steps():
    """Three-v0's valid observations are 0, 1, 2; the final observation 3 sits in ignored slots. Training must not count it."""
    a = args("--env-id", "Three-v0", "--num-steps", "8", "--total-timesteps", "24", "--eval-episodes", "0")
    agent, _, _ = ppo.train(a)
    assert (
        agent.obs_stats[0, 0] == 18 and agent.obs_stats[1, 0] == 1.0 and torch.isclose(agent.obs_stats[2, 0], torch.tensor(2 / 3).double())
    )
