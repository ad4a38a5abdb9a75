"""ppo_lstm_seq_jax.py: against the PyTorch script, against Gymnasium, and what only it has."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import ppo_lstm_seq as ppo
import ppo_lstm_seq_jax as jppo
import reference
from reference import random_rollout, random_valid
from test_script import BAD, ROOT, events

SCRIPT = ROOT / "ppo_lstm_seq_jax.py"
SMALL = ("--env-id", "CartPoleNoVel-v1", "--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--eval-episodes", "5")


def args(*flags):
    base = "--env-id Ragged-v0 --num-envs 3 --num-steps 11 --num-minibatches 3 --norm-adv-scope rollout --ent-coef 0 --norm-obs"
    return jppo.parsed_args([*base.split(), *flags])


def run_script(*flags, **env):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env={**os.environ, **env}, timeout=180)


def summed_gradients(a):
    """An optimizer that leaves the weights alone and adds up the gradients, in place of the script's."""

    def add(gradients, total, params=None):
        return jax.tree.map(jnp.zeros_like, gradients), jax.tree.map(jnp.add, total, gradients)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), add)


def twins(a):
    """A PyTorch agent with random weights and the JAX learner with the same ones."""
    torch_agent = reference.make_agent(
        reference.args("--lstm-hidden-size", str(a.lstm_hidden_size), "--critic-lstm", a.critic_lstm, "--lstm-layers", str(a.lstm_layers))
    )
    envs = jppo.make_envs(replace(a, num_envs=1))
    agent = jppo.Agent(envs.single_observation_space, envs.single_action_space, a)
    learner = jppo.fresh_learner(agent, a, jax.random.PRNGKey(0))
    obs_stats = jnp.array(torch_agent.obs_stats, jnp.float32)
    return torch_agent, agent, learner._replace(params=in_jax(torch_agent, named(torch_agent)), obs_stats=obs_stats)


def named(torch_agent):
    return {name: p.detach() for name, p in torch_agent.named_parameters()}


def in_jax(torch_agent, values):
    """A dict of arrays by PyTorch's parameter names, weights or gradients, in the JAX agent's shape. PyTorch has two biases for each
    LSTM: for weights call this with their sum in mind, for gradients both are the same."""
    params, K = {}, len(torch_agent.lstms)
    for layer in range(torch_agent.lstms[0].num_layers):
        get = lambda name, k, layer=layer: np.asarray(values[f"lstms.{k}.{name}_l{layer}"])  # noqa: E731
        params[f"lstm{layer}_in"] = np.stack([get("weight_ih", k).T for k in range(K)])
        params[f"lstm{layer}_hidden"] = np.stack([get("weight_hh", k).T for k in range(K)])
        params[f"lstm{layer}_bias"] = np.stack([get("bias_ih", k) + get("bias_hh", k) for k in range(K)])
    dense = [f"{head}.{i}" for head in ("actor", "critic") for i in (0, 2)]
    for i, name in enumerate(dense):
        params[f"Dense_{i}"] = {"kernel": np.asarray(values[f"{name}.weight"]).T, "bias": np.asarray(values[f"{name}.bias"])}
    params["logstd"] = np.asarray(values["logstd"])[0]
    return {"params": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)}


def jax_rollout(rollout, agent):
    """A PyTorch rollout, with `agent`'s spaces."""
    valid = rollout.valid
    keep = np.concatenate([np.ones_like(valid[:1]), valid])
    arrays = {name: np.asarray(getattr(rollout, name)) for name in ("actions", "logprobs", "initial_state")}
    flags = {name: getattr(rollout, name) for name in ("terminations", "truncations")}
    obs = tuple(np.asarray(x) for x in rollout.obs)
    rewards = rollout.rewards.astype(np.float32)
    return jax.tree.map(jnp.asarray, jppo.Rollout(obs=obs, keep=keep, valid=valid, rewards=rewards, **arrays, **flags))


def relative_error(a, b):
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def jax_gradient(agent, learner, rollout, a):
    """The sum of all minibatches' gradients in `update`, and its metrics."""
    with mock.patch.object(jppo, "optimizer", summed_gradients):
        learner = learner._replace(opt_state=summed_gradients(a).init(learner.params))
        learner, metrics, finite = jax.jit(lambda learner, rollout: jppo.update(agent, learner, rollout, a, 1.0))(learner, rollout)
    return learner.opt_state, metrics, finite


# ------------------------------------------------------------------------------------------- against the PyTorch script
def test_both_scripts_take_the_same_flags():
    """--num-seeds and two more places for the environments are all that differs; each flag has a line of help."""
    ours, theirs = ({f.name: f for f in fields(x)} for x in (jppo.Args, ppo.Args))
    assert set(ours) - set(theirs) == {"num_seeds"} and not set(theirs) - set(ours)
    for name in theirs:
        if name not in ("exp_name", "vec_env"):
            assert (ours[name].default, ours[name].type) == (theirs[name].default, theirs[name].type), name
    helps = reference.help_words(SCRIPT)
    assert all(len(helps[name]) > 1 for name in ours)


@pytest.mark.parametrize("flags", [(), ("--critic-lstm", "shared", "--lstm-layers", "2"), ("--critic-lstm", "none")], ids=str)
def test_the_same_weights_give_pytorchs_outputs_states_and_gradients(flags):
    """On a rollout with terminations and truncations inside: policy, values and the state after it, and the sum of the gradients of
    `update`, GAE, truncation bootstrap, clipping and masks included, over two epochs. Seen to fail if a state is reset a step early
    or late, if a truncation does not bootstrap, or if an ignored step counts."""
    a = args("--update-epochs", "2", "--lstm-hidden-size", "5", "--clip-vloss", "--ent-coef", "0.1", "--no-norm-reward", *flags)
    torch_agent, agent, learner = twins(a)
    valid = random_valid(11, 3, np.random.default_rng(3))
    rollout = random_rollout(torch_agent, valid)
    cut = rollout.terminations & (np.random.default_rng(4).random(valid.shape) < 0.5)
    rollout = rollout._replace(terminations=rollout.terminations & ~cut, truncations=cut)
    assert cut.any() and rollout.terminations.any()
    theirs = jax_rollout(rollout, agent)

    values, state, policies = torch.zeros(12, 3), rollout.initial_state, []
    with torch.no_grad():
        for t in range(12):
            policy, values[t], state = torch_agent.step([x[t] for x in rollout.obs], state)
            policies.append(policy)
            if t < 11:
                state[..., torch.as_tensor(~valid[t]), :] = 0
    policy, value, states = agent.apply(learner.params, theirs.obs, learner.obs_stats, theirs.keep, theirs.initial_state)
    for x, y in ((policy, torch.stack(policies)), (value, values), (states[-1], state)):
        assert np.allclose(x, y, atol=1e-5)

    same = ("--update-epochs", "2", "--num-minibatches", "3", "--clip-vloss", "--ent-coef", "0.1", "--recompute-adv")
    torch_args = reference.args(*same, "--max-grad-norm", "1e9")
    rollout = rollout._replace(values=values)
    advantages = ppo.gae(rollout.rewards, values.numpy(), rollout.terminations, rollout.truncations, a.gamma, a.gae_lambda)
    recorder = reference.GradientRecorder(torch_agent)
    expected = ppo.update(torch_agent, recorder, rollout, advantages, torch_args, np.random.default_rng(0))
    total, split = sum(recorder.gradients), [p.numel() for p in torch_agent.parameters()]
    gradients = {n: g.view(p.shape) for (n, p), g in zip(torch_agent.named_parameters(), total.split(split), strict=True)}
    ours, metrics, _ = jax_gradient(agent, learner, theirs, a)
    expected_gradients = in_jax(torch_agent, gradients)
    for layer in range(a.lstm_layers):  # the sum of two equal gradients
        expected_gradients["params"][f"lstm{layer}_bias"] /= 2
    assert relative_error(ours, expected_gradients) < 1e-4
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "old_approx_kl", "clipfrac", "explained_variance"):
        assert float(metrics[f"losses/{name}"]) == pytest.approx(expected[f"losses/{name}"], rel=1e-3, abs=1e-5), name
    assert int(metrics["charts/valid_steps"]) == valid.sum()


def test_pieces_have_the_gradient_that_pytorchs_pieces_have():
    """Lanes of 12 steps cut to 4: truncated backpropagation from rebuilt states."""
    a = args("--num-steps", "12", "--max-seq-len", "4", "--update-epochs", "1", "--lstm-hidden-size", "5", "--no-norm-reward")
    torch_agent, agent, learner = twins(a)
    rollout = random_rollout(torch_agent, np.ones((12, 3), bool))
    theirs = jax_rollout(rollout, agent)
    ours, _, _ = jax_gradient(agent, learner, theirs, a)
    uncut, _, _ = jax_gradient(agent, learner, theirs, replace(a, max_seq_len=None))
    values = torch.as_tensor(np.array(agent.apply(learner.params, theirs.obs, learner.obs_stats, theirs.keep, theirs.initial_state)[1]))
    advantages = ppo.gae(rollout.rewards, values.numpy(), rollout.terminations, rollout.truncations, a.gamma, a.gae_lambda)
    recorder = reference.GradientRecorder(torch_agent)
    torch_args = reference.args("--update-epochs", "1", "--num-minibatches", "3", "--max-seq-len", "4", "--max-grad-norm", "1e9")
    ppo.update(torch_agent, recorder, rollout._replace(values=values), advantages, torch_args, np.random.default_rng(0))
    split = [p.numel() for p in torch_agent.parameters()]
    parts = zip(torch_agent.named_parameters(), sum(recorder.gradients).split(split), strict=True)
    expected = in_jax(torch_agent, {n: g.view(p.shape) for (n, p), g in parts})
    expected["params"]["lstm0_bias"] /= 2
    assert relative_error(ours, expected) < 1e-4 and relative_error(uncut, expected) > 1e-2


# ---------------------------------------------------------------------------------------------------------- recurrence
def test_the_recurrences_gradient_is_that_of_autodiff():
    """Against the cell written out with sigmoids, to 1e-5, resets included; a NaN in a lane stays behind the reset."""
    L, B, H = 17, 3, 5
    rng = np.random.default_rng(0)
    weights, inputs, h, c = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((H, 4 * H), (L, B, 4 * H), (B, H), (B, H)))
    keep = jnp.asarray(rng.random((L, B)) > 0.2)

    def naive(weights, inputs, h, c):
        outputs = []
        for t in range(L):
            h, c = (x * keep[t][:, None] for x in (h, c))
            i, f, g, o = jnp.split(inputs[t] + h @ weights, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            outputs.append(h)
        return jnp.stack(outputs)

    def loss(run):
        return lambda *x: (run(*x) ** 2 * jnp.arange(1.0, L + 1)[:, None, None]).sum()

    ours = jax.grad(loss(lambda w, x, h, c: jppo.recurrence(w, x, keep, h, c)[0]), (0, 1, 2, 3))(weights, inputs, h, c)
    expected = jax.grad(loss(naive), (0, 1, 2, 3))(weights, inputs, h, c)
    for x, y in zip(ours, expected, strict=True):
        assert float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) < 1e-5
    keep = keep.at[9].set(False)
    hs, _ = jppo.recurrence(weights, inputs.at[8].set(jnp.nan), keep, h, c)
    assert jnp.isnan(hs[8]).all() and jnp.isfinite(hs[9:]).all()


# --------------------------------------------------------------------------------------------------------- environments
@pytest.mark.parametrize(
    "env_id", ["Pendulum-v1", "CartPole-v1", "MountainCar-v0", "Acrobot-v1", "PendulumNoVel-v1", "CartPoleNoVel-v1", "MountainCarNoVel-v0"]
)
def test_environments_on_the_device_agree_with_gymnasiums(env_id):
    """Both are stepped from the same states with the same actions, for 1.2 x the time limit: observation, reward, termination and
    truncation agree, with the time limit's step and the ignored step behind it."""
    a = args("--env-id", env_id, "--vec-env", "jax", "--num-envs", "1", "--num-minibatches", "1")
    envs, theirs = jppo.make_envs(a), gym.make(env_id)
    key = jax.random.PRNGKey(3)
    state, inputs = envs.reset(key[None])
    step, rng = jax.jit(envs.step), np.random.default_rng(0)
    limit = gym.spec(env_id).max_episode_steps
    theirs.reset(seed=0)
    ended = 0
    names = {
        "Pendulum": ("theta", "theta_dot"),
        "CartPole": ("x", "x_dot", "theta", "theta_dot"),
        "MountainCar": ("position", "velocity"),
        "Acrobot": ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2"),
    }[env_id.split("-")[0].removesuffix("NoVel")]

    def numbers():
        return np.array([float(getattr(state[0], name)[0]) for name in names])

    theirs.unwrapped.state = numbers() if "CartPole" not in env_id else tuple(numbers())
    over = False
    for _ in range(int(1.2 * limit)):
        action = theirs.action_space.sample() if rng.random() < 0.5 or "CartPole" in env_id else theirs.action_space.sample() * 0
        state, inputs, reward, termination, truncation = step(key[None], state, jnp.asarray(action)[None])
        if over:  # the ignored step: the next episode's first observation
            assert reward[0] == 0 and not termination[0] and not truncation[0] and int(state[0].time[0]) == 0
            theirs.reset(seed=0)
            theirs.unwrapped.state = numbers() if "CartPole" not in env_id else tuple(numbers())
            over = False
            continue
        obs, their_reward, *flags, _ = theirs.step(action)
        assert np.allclose(inputs[0][0], obs, atol=2e-4) and float(reward[0]) == pytest.approx(their_reward, abs=1e-4)
        assert [bool(termination[0]), bool(truncation[0])] == flags
        over = any(flags)
        ended += over
        theirs.unwrapped.state = numbers() if "CartPole" not in env_id else tuple(numbers())  # float32 drifts from float64
    assert ended and (env_id[:8] != "Pendulum" or not inputs[0][0, 2] or "NoVel" not in env_id)


def test_the_agent_on_the_device_sees_its_last_action_and_reward():
    a = args("--env-id", "Pendulum-v1", "--vec-env", "jax", "--prev-action", "--prev-reward", "--num-steps", "210")
    envs = jppo.make_envs(a)
    agent = jppo.Agent(envs.single_observation_space, envs.single_action_space, a)
    learner = jppo.fresh_learner(agent, a, jax.random.PRNGKey(0))
    keys = jax.random.split(jax.random.PRNGKey(1), 3)
    rollout, *_ = jppo.device_rollout(envs, agent, learner, jppo.first_carry(agent, *envs.reset(keys)[::-1]), 210)
    _, action, reward, _ = rollout.obs
    sent = jax.vmap(lambda x: jppo.env_action(envs.single_action_space, x))(rollout.actions)
    first = ~rollout.keep[1:-1]
    assert np.allclose(action[1:-1], np.where(first[..., None], 0, sent[:-1])) and first.sum() == 3
    assert np.allclose(reward[1:-1, :, 0], np.where(first, 0, rollout.rewards[:-1])) and not action[0].any()


def test_ids_that_gymnax_lacks_or_has_wrong_stay_on_the_host(capfd):
    assert args("--env-id", "PendulumNoVel-v1").vec_env == "jax" and args("--env-id", "MemoryChain-bsuite").vec_env == "jax"
    assert args("--env-id", "MountainCarContinuousNoVel-v0").vec_env == "sync" and args("--env-id", "Ragged-v0").vec_env == "sync"
    assert args("--env-id", "Pendulum-v1", "--frame-stack", "2").vec_env == "sync"
    with pytest.raises(SystemExit):
        jppo.make_envs(args("--env-id", "MountainCarContinuous-v0", "--vec-env", "jax"))
    assert "take --vec-env sync" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------------------- invariants
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--batching", "fixed-size", "--num-minibatches", "5"),
        ("--batching", "env-split"),
        ("--max-seq-len", "4"),
        ("--no-recurrent",),
        ("--batching", "fixed-size", "--max-seq-len", "3"),
    ],
    ids=" ".join,
)
def test_every_step_is_in_exactly_one_minibatch_and_in_order(flags):
    """Numbers that say (environment, slot) go in; each comes out once with weight 1, a piece's slots in order; no minibatch is empty."""
    a = args("--num-envs", "6", *flags)
    c = jppo.num_pieces(a)
    begins, slots, is_step = jppo.piece_steps(11, c)
    planted = jnp.arange(11)[:, None] + 100 * jnp.arange(6)
    rows, weight = jppo.pieces(planted, slots), np.tile(is_step, 6)
    drawn = [jppo.drawn_minibatches(a, jax.random.PRNGKey(k)) for k in range(2)]
    for minibatches in drawn:
        sizes, seen = [], []
        for mb in np.asarray(minibatches):
            mb = mb[mb >= 0]
            seen += np.asarray(rows[:, mb])[weight[:, mb]].tolist()
            sizes.append(weight[:, mb].sum())
        assert sorted(seen) == sorted(np.ravel(planted).tolist()) and len(sizes) == a.num_minibatches and min(sizes) > 0
        assert a.batching != "fixed-size" or max(sizes) - min(sizes) <= len(mb)
    assert (np.diff(rows, axis=0)[weight[1:]] == 1).all() and not np.array_equal(*drawn)
    assert a.max_seq_len is None or len(slots) <= a.max_seq_len


def trained(*flags):
    """Train in-process: the agent, the learner, each iteration's (rollout or None, metrics), the returns, the folders."""
    calls, update = [], jppo.update

    def recording(agent, learner, rollout, *rest):
        result = update(agent, learner, rollout, *rest)
        jax.debug.callback(lambda r, m: calls.append((r, m)), rollout, result[1])
        return result

    with mock.patch.object(jppo, "update", recording):
        agent, learner, returns, run_dirs = jppo.train(args(*flags))
    jax.effects_barrier()
    return agent, learner, calls, returns, run_dirs


@pytest.mark.parametrize(
    "env_id, flags",
    [
        ("Ragged-v0", ()),
        ("Ragged-v0", ("--max-seq-len", "3", "--critic-lstm", "shared")),
        ("Long-v0", ()),
        ("Long-v0", ("--batching", "fixed-size", "--num-minibatches", "5")),
        ("CartPoleNoVel-v1", ("--batching", "env-split", "--lstm-layers", "2")),
    ],
)
def test_learning_rebuilds_the_log_probabilities_of_acting(env_id, flags):
    """Invariant 2, over four rollouts, on the host and on the device; episodes of Long-v0 span them. A zeroed initial state shows."""
    agent, learner, calls, _, _ = trained("--env-id", env_id, *flags, "--total-timesteps", "132", "--eval-episodes", "0")
    assert len(calls) == 4 and all(metrics["debug/ratio_error"] < 1e-4 for _, metrics in calls)
    rollout = jax.tree.map(jnp.asarray, calls[-1][0])
    assert not any(agent.args.lstm_hidden_size in x.shape for x in jax.tree.leaves(rollout._replace(initial_state=None)))
    if env_id == "Long-v0" and not flags:
        before = jax.tree.map(lambda x: x[0], learner)
        lost = rollout._replace(initial_state=jnp.zeros_like(rollout.initial_state))
        kept, gone = (jax_gradient(agent, before, r, agent.args)[1]["debug/ratio_error"] for r in (rollout, lost))
        assert abs(float(gone - kept)) > 1e-3


@pytest.mark.parametrize("flags", [(), ("--max-seq-len", "4"), ("--norm-adv-scope", "minibatch")], ids=" ".join)
def test_what_ignored_slots_hold_changes_nothing(flags):
    """Invariant 3: 0, 1e6 or NaN in the ignored slots' observations behind a termination, actions, old log-probabilities and rewards."""
    a = args("--update-epochs", "2", "--lstm-hidden-size", "5", *flags)
    torch_agent, agent, learner = twins(a)
    valid = random_valid(11, 3, np.random.default_rng(3))
    results = []
    for poison in (0.0, 1e6, np.nan):
        rollout = jax_rollout(random_rollout(torch_agent, valid), agent)
        fill = lambda x: jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, poison)  # noqa: B023, E731
        obs = (rollout.obs[0].at[:-1].set(fill(rollout.obs[0][:-1])), rollout.obs[1])
        rollout = rollout._replace(obs=obs, actions=fill(rollout.actions), logprobs=fill(rollout.logprobs))
        results.append(jax_gradient(agent, learner, rollout, a)[:2])
    for gradients, metrics in results[1:]:
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((gradients, metrics)))
        assert all(jnp.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, ((gradients, metrics), results[0])), strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        "--num-envs 1 --num-steps 1 --num-minibatches 1",
        "--env-id Single-v0",
        "--env-id Three-v0 --num-steps 4",
        "--num-steps 1 --env-id Single-v0",
        "--num-envs 5 --num-minibatches 3 --norm-adv-scope minibatch",
        "--env-id CartPole-v1 --num-steps 1",
    ],
)
def test_nothing_is_nan_at_the_edges(flags):
    agent, learner, calls, returns, _ = trained(*flags.split(), "--total-timesteps", "60", "--eval-episodes", "2")
    assert all(np.isfinite(list(metrics.values())).all() for _, metrics in calls) and np.isfinite(returns).all()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(learner.params))


@pytest.mark.parametrize("env_id", ["Ragged-v0", "CartPoleNoVel-v1"])
def test_the_update_is_compiled_once_and_the_same_seed_gives_the_same_bits(env_id):
    """Episodes of random lengths over eight rollouts, on the host and on the device."""
    made, over_seeds, weights = [], jppo.over_seeds, []
    with mock.patch.object(jppo, "over_seeds", lambda *x: made.append(over_seeds(*x)) or made[-1]):
        for _ in range(2):
            _, learner, _, run_dirs = jppo.train(args("--env-id", env_id, "--total-timesteps", "264", "--eval-episodes", "0"))
            weights.append(jax.tree.leaves(learner))
    assert [function._cache_size() for function in made] == [1, 1]
    assert all(jnp.array_equal(x, y) for x, y in zip(*weights, strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        "--env-id ObsNested-v0",
        "--env-id ObsChannelsFirst-v0",
        "--env-id ObsChannelsLast-v0 --frame-stack 2",
        "--env-id ActBox-v0 --prev-action --prev-reward",
        "--env-id ActMultiDiscrete-v0",
        "--env-id ActMultiBinary-v0",
        "--env-id ActWideBox-v0",
        "--env-id MethodMask-v0 --prev-action",
        "--env-id Everything-v0 --no-recurrent",
        "--env-id TextObs-v0 --obs-keys image direction",
        "--env-id Breakout-MinAtar",
    ],
)
def test_any_space_end_to_end(flags):
    """Two iterations and an evaluation; invariant 2. The environments refuse an action that is not in their space or not valid."""
    _, _, calls, returns, _ = trained(*flags.split(), "--total-timesteps", "66", "--eval-episodes", "3")
    assert len(calls) == 2 and np.isfinite(returns).all() and all(metrics["debug/ratio_error"] < 1e-4 for _, metrics in calls)


def test_observation_and_return_statistics_are_those_of_valid_steps():
    _, learner, calls, _, _ = trained("--env-id", "Ragged-v0", "--total-timesteps", "99", "--eval-episodes", "0")
    seen = np.concatenate([rollout.obs[0][:-1][rollout.valid] for rollout, _ in calls])
    assert np.allclose(learner.obs_stats[0], [[len(seen)] * 2, seen.mean(0), seen.var(0)], rtol=1e-4)
    running, returns = np.zeros(3), []
    for rollout, _ in calls:
        for t in range(11):
            running = (running * 0.95 + rollout.rewards[t]) * rollout.valid[t]
            returns += running[rollout.valid[t]].tolist()
    assert np.allclose(learner.return_stats[0], [len(returns), np.mean(returns), np.var(returns)], rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------- the runs
def test_a_run_from_the_command_line_without_torch():
    """The last line, the progress lines, and the tags of the PyTorch script, where torch can't be imported."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "class NoTorch:\n  def find_spec(self, name, *_):\n    if name == 'torch': raise ModuleNotFoundError('No module named torch')\n"
        "sys.meta_path.insert(0, NoTorch()); runpy.run_path(sys.argv[0], run_name='__main__'); assert 'torch' not in sys.modules"
    )
    flags = [*SMALL, "--total-timesteps", "300"]
    result = subprocess.run([sys.executable, "-c", code, SCRIPT, *flags], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    *lines, last = result.stdout.splitlines()
    found = re.fullmatch(r"eval_return=(\d+\.\d) \+- \d+\.\d over 5 episodes, run: (runs/CartPoleNoVel-v1__ppo_lstm_seq_jax__1__\d+)", last)
    assert found and re.match(r"step 256/256, return \d+\.\d \(last 100\), \d+ steps/s, 0 s left", lines[-1])
    log, (_, _, run_dir) = events(found[2]), ppo.train(ppo.parsed_args([*SMALL, "--total-timesteps", "300"]))
    assert log.Tags()["scalars"] and set(log.Tags()["scalars"]) == set(events(run_dir).Tags()["scalars"])
    assert [e.step for e in log.Scalars("losses/value_loss")] == [128, 256]
    assert "|num_envs|4|" in log.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()


def test_seeds_side_by_side_are_the_runs_they_would_be_alone():
    """Two seeds, two runs; each has the losses and episodes of a run of its own, but for rounding."""
    flags = ("--env-id", "CartPoleNoVel-v1", "--total-timesteps", "99", "--eval-episodes", "3")
    _, _, returns, run_dirs = jppo.train(args(*flags, "--seed", "5", "--num-seeds", "2"))
    assert returns.shape == (2, 3) and [run_dir.split("__")[2] for run_dir in run_dirs] == ["5", "6"]
    for seed, run_dir in zip((5, 6), run_dirs, strict=True):
        _, _, _, (alone,) = jppo.train(args(*flags, "--seed", str(seed), "--exp-name", "alone"))
        ours, theirs = ([e.value for e in events(x).Scalars("losses/value_loss")] for x in (run_dir, alone))
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert jppo.loaded(run_dir, jppo.MODEL)["iteration"] == 3 and jppo.saved_args(jppo.loaded(run_dir, jppo.MODEL)).seed == seed


def test_several_devices_compute_what_one_computes():
    """Two host devices, four environments: the first losses agree, and the carry's environments lie on both."""
    flags = [*SMALL, "--total-timesteps", "384", "--eval-episodes", "0"]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ppo_lstm_seq_jax as p, jax; a = p.parsed_args(sys.argv[2:]); seen = []\n"
        "sharded = p.sharded\np.sharded = lambda *x: seen.append(sharded(*x)) or seen[0]\n"
        "run = p.train(a)[3][0]\nprint(len(seen[0].next_done.sharding.device_set), len(seen[0].next_state.sharding.device_set), run)"
    )
    losses = []
    for n in (1, 2):
        env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"}
        command = [sys.executable, "-c", code, str(ROOT), *flags, "--exp-name", f"devices{n}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
        assert result.returncode == 0, result.stderr
        *_, devices, state_devices, run_dir = result.stdout.split()
        assert devices == state_devices == str(n)
        losses.append([e.value for e in events(run_dir).Scalars("losses/value_loss")])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4) and len(losses[1]) == 3


SHARED = [b for b in BAD if not (set(b[0]) & {"--num-minibatches", "--total-timesteps"})]
OWN = [
    (("--num-minibatches", "17"), "--num-minibatches is 17", "fixed-size"),
    (("--batching", "fixed-size", "--num-envs", "3", "--num-minibatches", "128", "--num-steps", "100"), "--num-minibatches", "lower it"),
    (("--num-seeds", "2", "--vec-env", "sync"), "--num-seeds", "--vec-env jax"),
    (("--vec-env", "jax", "--frame-stack", "2"), "--vec-env jax", "sync"),
    (("--total-timesteps", "2047"), "--total-timesteps is 2047", "raise it"),
]


@pytest.mark.parametrize("flags, names, mend", SHARED + OWN, ids=[" ".join(b[0]) for b in SHARED + OWN])
def test_bad_input_gets_one_line_that_names_the_flag_and_the_mend(flags, names, mend, capfd):
    full = ("--num-envs", "16", "--num-steps", "128", "--num-minibatches", "4", *flags)
    with pytest.raises(SystemExit) as stop:
        jppo.train(jppo.parsed_args(list(full)))
    captured = capfd.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and names in captured.err and mend in captured.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("env_id", ["CartPoleNoVel-v1", "Ragged-v0"])
def test_a_run_goes_on_where_its_checkpoint_was(env_id, capfd):
    """Weights, optimiser and statistics; its log has each step once; flags that contradict it are refused; a broken file is one line."""
    flags = ("--env-id", env_id, "--eval-episodes", "0")
    _, learner, _, (run_dir,) = jppo.train(args(*flags, "--total-timesteps", "66"))
    saved = jppo.parsed_args(["--resume", run_dir, "--total-timesteps", "132"])
    restored = jppo.restored(jppo.Agent(*spaces(saved), saved), saved, jppo.loaded(run_dir, jppo.CHECKPOINT))
    assert all(np.array_equal(x[0], y) for x, y in zip(jax.tree.leaves(learner), jax.tree.leaves(restored), strict=True))
    time.sleep(1.1)  # TensorBoard sorts files by the second
    jppo.train(saved)
    assert [e.step for e in events(run_dir).Scalars("losses/value_loss")] == [33, 66, 99, 132]
    capfd.readouterr()
    for given, words in (
        (("--resume", run_dir, "--gamma", "0.5"), "--gamma is 0.5"),
        (("--resume", "none"), "none holds no"),
    ):
        with pytest.raises(SystemExit):
            jppo.parsed_args(list(given))
        assert words in capfd.readouterr().err
    Path(run_dir, jppo.CHECKPOINT).write_bytes(b"\x80\x04nonsense")
    with pytest.raises(SystemExit):
        jppo.parsed_args(["--resume", run_dir])
    assert "is not a checkpoint" in capfd.readouterr().err


def spaces(a):
    envs = jppo.make_envs(replace(a, num_envs=1))
    return envs.single_observation_space, envs.single_action_space


@pytest.mark.parametrize("signum, env_id", [(signal.SIGINT, "CartPoleNoVel-v1"), (signal.SIGTERM, "MountainCarContinuousNoVel-v0")])
def test_a_signal_keeps_the_last_iteration_and_says_how_to_go_on(signum, env_id):
    flags = [*SMALL, "--env-id", env_id, "--total-timesteps", "10000000", "--checkpoint-interval", "0"]
    run = subprocess.Popen([sys.executable, SCRIPT, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not run.stdout.readline().startswith("step"):
        pass
    run.send_signal(signum)
    _, err = run.communicate(timeout=30)
    found = re.fullmatch(r"stopped behind iteration (\d+); go on with --resume (runs/.*)\n", err)
    assert run.returncode == 128 + signum and found, err
    assert jppo.loaded(found[2], jppo.CHECKPOINT)["iteration"] == int(found[1])
    assert max(e.step for e in events(found[2]).Scalars("charts/SPS")) // 128 == int(found[1])


@pytest.mark.parametrize(
    "env_id, words",
    [
        ("NanReward-v0", "the reward of environment 0 is nan"),
        ("Failing-v0", "ZeroDivisionError"),
        ("NanLoss", "a gradient that is not finite"),
        ("NanOnDevice", "a reward that is not finite"),
    ],
)
def test_a_run_that_goes_wrong_keeps_the_state_before(env_id, words, capfd):
    losses, step, patches = jppo.ppo_losses, jppo.DeviceEnvs.step, []
    if env_id == "NanLoss":
        patches.append(mock.patch.object(jppo, "ppo_losses", lambda *x: losses(*x) * jnp.nan))
    if env_id == "NanOnDevice":

        def nan_later(self, keys, state, action):
            state, inputs, reward, *flags = step(self, keys, state, action)
            return state, inputs, jnp.where(state[0].time == 30, jnp.nan, reward), *flags

        patches.append(mock.patch.object(jppo.DeviceEnvs, "step", nan_later))
    real_id = {"NanLoss": "Long-v0", "NanOnDevice": "Pendulum-v1"}.get(env_id, env_id)
    a = args("--env-id", real_id, "--num-steps", "14", "--total-timesteps", "420")
    with pytest.raises(SystemExit) as stopped:
        for patch in patches:
            patch.start()
        try:
            jppo.train(a)
        finally:
            mock.patch.stopall()
    err = capfd.readouterr().err
    assert stopped.value.code == 1 and words in err and "go on with --resume" in err
    (run_dir,) = Path("runs").iterdir()
    state = jppo.loaded(run_dir, jppo.CHECKPOINT)
    assert state["iteration"] == (0 if env_id == "NanLoss" else 2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state["learner"]))


def test_evaluating_and_acting_from_python_are_the_evaluation_of_the_run():
    """--evaluate prints the deterministic returns of training's end; `load_agent` acts them out; a forgotten state is an error."""
    flags = ("--env-id", "Everything-v0", "--prev-action", "--prev-reward", "--total-timesteps", "132", "--eval-episodes", "4")
    _, _, returns, (run_dir,) = jppo.train(args(*flags))
    agent, acted = jppo.load_agent(run_dir), []
    for i in range(4):
        env = gym.make("Everything-v0")
        obs, info = env.reset(seed=jppo.FIRST_EVAL_SEED + i)
        state, episode_start, reward, total, over = None, True, 0.0, 0.0, False
        while not over:
            action, state = agent.act(obs, state, episode_start, deterministic=True, reward=reward, info=info)
            obs, reward, termination, truncation, info = env.step(action)
            total, episode_start, over = total + reward, False, termination or truncation
        acted.append(total)
    assert np.allclose(acted, returns[0])
    with pytest.raises(ValueError, match="state"):
        agent.act(obs, None, False)
    _, _, returns, (run_dir,) = jppo.train(jppo.parsed_args([*SMALL, "--total-timesteps", "1280"]))
    first, second = run_script("--evaluate", run_dir, "--eval-episodes", "5").stdout.splitlines()
    assert first == f"deterministic: eval_return={returns.mean():.1f} +- {returns.std():.1f} over 5 episodes"
    assert second.startswith("stochastic: eval_return=")


@pytest.mark.parametrize("env_id, gym_id", [("Recall-v0", None), ("MemoryChain-bsuite", None)])
def test_a_recall_task_is_learnt_and_needs_memory(env_id, gym_id):
    """On the host and on the device; a plain PPO stays at chance."""
    flags = f"--env-id {env_id} --num-envs 16 --num-steps 32 --num-minibatches 8 --gamma 0.99 --eval-episodes 50".split()
    _, _, returns, _ = jppo.train(args(*flags, "--total-timesteps", "20000"))
    best = 1.0
    assert returns.mean() >= 0.95 * best
    if env_id == "Recall-v0":
        _, _, returns, _ = jppo.train(args(*flags, "--total-timesteps", "8000", "--no-recurrent"))
        assert returns.mean() <= 0.7


def test_the_script_stands_alone_and_names_its_packages():
    source = SCRIPT.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    } - {*sys.stdlib_module_names, "envpool"}
    header = re.search(r"# /// script\n(.*?)# ///", source, re.S)[1]
    listed = {re.match(r"[\w-]+", x)[0] for x in json.loads(re.search(r"dependencies = (\[.*\])", header)[1])}
    assert imported <= listed <= imported | {"six"} and "torch" not in imported  # six: gymnax wants it and does not say so
    required = {re.match(r"[\w-]+", x)[0] for x in (ROOT / "requirements.txt").read_text().splitlines() if x and x[0] != "#"}
    assert listed <= required
