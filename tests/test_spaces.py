"""Any space: every kind of observation and action end to end, action masks, what the agent remembers of itself, EnvPool."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
import toy_envs
from reference import GradientRecorder, args, make_agent, make_envs, recorded_train

SMALL = ("--num-envs", "3", "--num-steps", "11", "--total-timesteps", "66", "--update-epochs", "2", "--eval-episodes", "3")
IDS = [f"Obs{name}-v0" for name in toy_envs.OBSERVATIONS] + [f"Act{name}-v0" for name in toy_envs.ACTIONS]


@pytest.mark.parametrize(
    "flags",
    [("--env-id", env_id) for env_id in IDS]
    + [
        ("--env-id", "ObsNested-v0", "--vec-env", "async"),
        ("--env-id", "ObsNested-v0", "--frame-stack", "3"),
        ("--env-id", "ObsChannelsLast-v0", "--frame-stack", "3", "--no-recurrent"),
        ("--env-id", "Everything-v0", "--prev-action", "--prev-reward", "--critic-lstm", "none"),
        ("--env-id", "TextObs-v0", "--obs-keys", "image", "direction"),
        ("--env-id", "InfoMask-v0"),
        ("--env-id", "InfoMaskMulti-v0", "--vec-env", "async"),
        ("--env-id", "MethodMask-v0"),
        ("--env-id", "MethodMask-v0", "--vec-env", "async", "--no-recurrent"),
    ],
    ids=" ".join,
)
def test_any_space_end_to_end(flags):
    """Two iterations and an evaluation. Invariant 2: learning rebuilds the log-probabilities of acting. Invariant 3: other numbers in
    the ignored slots change no gradient. Each leaf is stored in its own dtype and shape. The environments refuse an action that is
    not in their space or not valid."""
    a = args(*SMALL, *flags)
    agent, calls, returns, _ = recorded_train(a)
    assert len(calls) == 2 and np.isfinite(returns).all() and all(np.isfinite(list(m.values())).all() for m, _, _ in calls)
    assert all(metrics["debug/ratio_error"] < 1e-4 for metrics, _, _ in calls)
    _, rollout, advantages = calls[-1]
    gradients = []
    for fill in (0, 1):
        obs = tuple(leaf.clone() for leaf in rollout.obs)
        for leaf in obs[:-1]:
            leaf.numpy()[:-1][~rollout.valid] = fill if leaf.dtype != torch.int64 else 2 - fill  # a Discrete may start at 2
        recorder = GradientRecorder(agent)
        ppo.update(agent, recorder, rollout._replace(obs=obs), advantages.copy(), a, np.random.default_rng(0))
        gradients.append(torch.stack(recorder.gradients))
    assert not rollout.valid.all() and gradients[0].isfinite().all() and gradients[0].any() and torch.equal(*gradients)
    if len(flags) == 2 and flags[1][:3] == "Obs":
        spaces = ppo.leaves(toy_envs.OBSERVATIONS[flags[1][3:-3]]).values()
        stored = [(str(leaf.numpy().dtype), leaf.shape[2:]) for leaf in rollout.obs[:-1]]
        assert stored == [(str(space.dtype), space.shape) for space in spaces]


def test_leaves_are_encoded_as_their_kind_wants():
    """One-hot from a Discrete's start; floats normalised and first; bytes scaled; a state 15 of 16 is never a raw 15."""
    agent = make_agent(args("--env-id", "ObsNested-v0"))
    agent.norm_obs, agent.obs_stats[1], agent.obs_stats[2] = True, 1.0, 4.0
    image, discrete, vector, bits, multi = torch.zeros(1, 9, 8, 3, dtype=torch.uint8), [3], [[5.0, 1.0]], [[1, 0, 1]], [[1, 2]]
    features = agent.features((image, *map(torch.tensor, (discrete, vector, bits, multi)), None))[0]
    assert features[:2].tolist() == [2.0, 0.0] and features[2 + 128 :].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1]
    assert ppo.prepared(gym.spaces.Discrete(16), torch.tensor([15])).nonzero().tolist() == [[0, 15]]
    assert ppo.prepared(gym.spaces.Box(0, 255, (3,), np.uint8), torch.tensor([[0, 51, 255]], dtype=torch.uint8)).tolist() == [
        pytest.approx([0, 0.2, 1])
    ]


@pytest.mark.parametrize("shape", [(20, 18), (20, 18, 3), (3, 20, 18), (4, 20, 18, 3), (4, 3, 20, 18)], ids=str)
def test_images_are_scaled_once_and_their_channels_come_first(shape):
    """Pixel (5, 7) of channel 2 of frame 1, wherever the axes are, is at [1 * C + 2, 5, 7]."""
    where = {20: 5, 18: 7, 3: 2, 4: 1}
    image = np.zeros(shape, np.uint8)
    image[tuple(where[n] for n in shape)] = 255
    out = ppo.prepared(gym.spaces.Box(0, 255, shape, np.uint8), torch.as_tensor(image)[None])
    channel = (3 if 4 in shape else 0) + (2 if 3 in shape else 0)
    assert out.shape[2:] == (20, 18) and out.nonzero().tolist() == [[0, channel, 5, 7]] and out.max() == 1


@pytest.mark.parametrize("env_id", ["EchoBox-v0", "EchoDiscrete-v0", "EchoMulti-v0"])
def test_the_agent_sees_the_last_action_as_sent_and_the_last_reward(env_id):
    """The environment observes the same itself, zeros at an episode's start; so do final observations and the rollout after."""
    a = args("--env-id", env_id, "--prev-action", "--prev-reward")
    envs, agent = ppo.make_envs(a), make_agent(a)
    carry = envs.reset(seed=[0, 1, 2])[0], agent.initial_state(3)
    for _ in range(2):
        rollout, carry, _ = ppo.collect(envs, agent, carry, 11)
        own, prev_action, prev_reward, _ = rollout.obs
        assert torch.equal(own, torch.cat([prev_action, prev_reward], -1)) and not rollout.valid.all()
        assert own[:-1][rollout.valid].any() and own[:-1][~rollout.valid].any()


def test_envpool_gives_the_same_task():
    """The velocity is masked, a truncation is followed by the ignored slot, and learning rebuilds what acting computed."""
    pytest.importorskip("envpool")
    flags = ("--env-id", "PendulumNoVel-v1", "--vec-env", "envpool", "--num-steps", "205", "--prev-action", "--prev-reward")
    _, calls, returns, _ = recorded_train(args(*flags, "--total-timesteps", "1230", "--eval-episodes", "2"))
    for metrics, rollout, _ in calls:
        assert metrics["debug/ratio_error"] < 1e-4 and not rollout.obs[0][..., 2].any() and rollout.obs[0][..., :2].all()
    _, rollout, _ = calls[0]
    assert (np.argwhere(~rollout.valid)[:, 0] == 200).all() and rollout.truncations[199].all() and not rollout.rewards[200].any()
    assert make_envs("PendulumNoVel-v1", 2, "--vec-env", "envpool").single_action_space.high == 2
    with pytest.raises(SystemExit):
        make_envs("Ragged-v0", 2, "--vec-env", "envpool")


def test_frame_stack_shows_the_last_observations_and_starts_over_with_an_episode():
    envs = make_envs("Three-v0", 1, "--frame-stack", "3")
    obs, _ = envs.reset(seed=[0])
    seen = [obs[0][0, :, 0].tolist()] + [envs.step(np.zeros((1, 1), np.float32))[0][0][0, :, 0].tolist() for _ in range(5)]
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0], [0, 0, 1]]


def test_without_recurrence_minibatches_are_shuffled_steps_and_there_is_no_state():
    a = args("--no-recurrent", "--num-minibatches", "4", "--batching", "whole-seq")
    agent = make_agent(a)
    assert not [name for name, _ in agent.named_parameters() if "lstm" in name] and agent.initial_state(3).numel() == 0
    valid = np.ones((11, 3), bool)
    valid[4, 1] = False
    pieces, minibatches = ppo.drawn_minibatches(ppo.whole_sequences(valid, False), a.batching, 4, a.max_seq_len, np.random.default_rng(0))
    assert (pieces.length == 1).all() and [len(rows) for rows in minibatches] == [8, 8, 8, 8]
    slots = [set(zip(pieces.start[rows], pieces.env[rows], strict=True)) for rows in minibatches]
    assert set.union(*slots) == set(map(tuple, np.argwhere(valid))) and all(len({t for t, _ in s}) > 3 for s in slots)


def test_without_recurrence_a_memory_task_stays_at_chance():
    """The recurrent agent solves it: test_a_recall_task_is_learnt_and_needs_the_state_passed_on."""
    flags = ("--num-envs", "16", "--num-steps", "32", "--total-timesteps", "16000", "--gamma", "0.99", "--eval-episodes", "100")
    _, returns, _ = ppo.train(args("--env-id", "Recall-v0", "--no-recurrent", *flags))
    assert returns.mean() <= 0.6
