"""Speed of the JAX script: `python benchmarks/speed_jax.py {recurrence,cartpole,hosts,pendulum}`. Compare ratios, not seconds: the
contestants take turns in one process, and each figure is a median without compile time. `pendulum` needs `pip install sb3-contrib`."""

import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))  # its own folder is there already
from speed import PEERS, contrib_model, contrib_rollout_seconds, rollout_seconds

import ppo_lstm_seq as ppo
import ppo_lstm_seq_jax as jppo

ROUNDS = 5


def recurrence():
    """Forward and backward by the written-out backward pass against autodiff of the same scan."""
    for L, B, H in ((128, 16, 64), (200, 32, 64), (128, 1, 128), (128, 4, 128)):
        keys = jax.random.split(jax.random.PRNGKey(0), 4)
        weights = jax.random.normal(keys[0], (H, 4 * H)) / H**0.5
        inputs = jax.random.normal(keys[1], (L, B, 4 * H))
        keep, state = jax.random.bernoulli(keys[2], 0.98, (L, B)), jnp.zeros((B, H))
        towards = jax.random.normal(keys[3], (L, B, H))

        def loss(function, weights, inputs, keep=keep, state=state, towards=towards):
            return (function(weights, inputs, keep, state, state)[0] * towards).sum()

        contestants = [jax.jit(jax.grad(functools.partial(loss, function), (0, 1))) for function in (jppo.recurrence, jppo.cell_steps)]
        ours, theirs = (contestant(weights, inputs) for contestant in contestants)
        error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(ours, theirs, strict=True))
        seconds = [[], []]
        for _ in range(200):
            for i, contestant in enumerate(contestants):
                start = time.perf_counter()
                jax.block_until_ready(contestant(weights, inputs))
                seconds[i].append(time.perf_counter() - start)
        ours, theirs = (1000 * statistics.median(x) for x in seconds)
        print(f"T={L}, B={B}, H={H}: {ours:.2f} ms, autodiff {theirs:.2f} ms: {theirs / ours:.2f} x, gradients differ by {error:.0e}")


class GRUAgent(nn.Module):
    """PureJaxRL's `ppo_rnn` network: an embedding, a GRU that is set to zero at an episode's start, and a head each."""

    num_actions: int
    hidden_size: int = 128

    @nn.compact
    def __call__(self, state, obs, first):
        def dense(size, scale, x):
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x)

        class Step(nn.Module):
            @nn.compact
            def __call__(self, state, now):
                x, first = now
                return nn.GRUCell(x.shape[-1])(jnp.where(first[:, None], 0.0, state), x)

        x = nn.relu(dense(self.hidden_size, 2**0.5, obs))
        state, x = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False})()(state, (x, first))
        logits = dense(self.num_actions, 0.01, nn.relu(dense(self.hidden_size, 2.0, x)))
        return state, jax.nn.log_softmax(logits), dense(1, 1.0, nn.relu(dense(self.hidden_size, 2.0, x)))[..., 0]


class Slot(NamedTuple):
    """A step of a rollout, each leaf (T, N, ...)."""

    obs: jax.Array
    first: jax.Array
    action: jax.Array
    logprob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def gru_loop(num_envs=4, num_steps=128, epochs=4, minibatches=4, gamma=0.99, gae_lambda=0.95):
    """The recipe of PureJaxRL's `ppo_rnn`: a GRU(128) by autodiff of its scan, environments that reset within a step, all in one
    jitted function of any number of iterations. The first state of training, and that function."""
    env, params = gymnax.make("CartPole-v1")
    agent = GRUAgent(env.action_space(params).n)
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))

    def start(key):
        reset_key, init_key, key = jax.random.split(key, 3)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(reset_key, num_envs), params)
        state, first = jnp.zeros((num_envs, agent.hidden_size)), jnp.ones(num_envs, bool)
        weights = agent.init(init_key, state, obs[None], first[None])
        return weights, adam.init(weights), env_state, obs, first, state, key

    def slot(weights, carry, _):
        env_state, obs, first, state, key = carry
        key, act_key, step_key = jax.random.split(key, 3)
        next_state, logits, value = agent.apply(weights, state, obs[None], first[None])
        action = jax.random.categorical(act_key, logits[0])
        logprob = jnp.take_along_axis(logits[0], action[:, None], 1)[:, 0]
        keys = jax.random.split(step_key, num_envs)
        next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(keys, env_state, action, params)
        done = terminated | truncated
        return (env_state, next_obs, done, next_state, key), Slot(obs, first, action, logprob, value[0], reward, done)

    def loss(weights, state, slots, advantages, returns):
        _, logits, value = agent.apply(weights, state, slots.obs, slots.first)
        logprob = jnp.take_along_axis(logits, slots.action[..., None], 2)[..., 0]
        ratio, advantages = jnp.exp(logprob - slots.logprob), (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = jnp.maximum(-ratio * advantages, -ratio.clip(0.8, 1.2) * advantages).mean()
        clipped = slots.value + (value - slots.value).clip(-0.2, 0.2)
        v_loss = 0.5 * jnp.maximum((value - returns) ** 2, (clipped - returns) ** 2).mean()
        return pg_loss + 0.5 * v_loss + 0.01 * (jnp.exp(logits) * logits).sum(-1).mean()

    def iteration(_, train):
        weights, opt_state, *acting = train
        initial_state = acting[3]
        acting, slots = jax.lax.scan(functools.partial(slot, weights), tuple(acting), None, num_steps)
        env_state, obs, first, state, key = acting
        last_value = agent.apply(weights, state, obs[None], first[None])[2][0]

        def back(carry, now):
            advantage, next_value = carry
            delta = now.reward + gamma * next_value * ~now.done - now.value
            advantage = delta + gamma * gae_lambda * advantage * ~now.done
            return (advantage, now.value), advantage

        _, advantages = jax.lax.scan(back, (jnp.zeros(num_envs), last_value), slots, reverse=True)
        batch = slots, advantages, advantages + slots.value

        def epoch(carry, key):
            order = jax.random.permutation(key, num_envs).reshape(minibatches, -1)

            def minibatch(carry, lanes):
                weights, opt_state = carry
                mine = jax.tree.map(lambda x: x[:, lanes], batch)
                gradient = jax.grad(loss)(weights, initial_state[lanes], *mine)
                updates, opt_state = adam.update(gradient, opt_state)
                return (optax.apply_updates(weights, updates), opt_state), None

            return jax.lax.scan(minibatch, carry, order)[0], None

        key, *epoch_keys = jax.random.split(key, epochs + 1)
        (weights, opt_state), _ = jax.lax.scan(epoch, (weights, opt_state), jnp.stack(epoch_keys))
        return weights, opt_state, env_state, obs, first, state, key

    return jax.jit(start)(jax.random.PRNGKey(0)), jax.jit(lambda train, n: jax.lax.fori_loop(0, n, iteration, train))


CARTPOLE = "--env-id CartPole-v1 --num-envs 4 --num-steps 128 --lstm-hidden-size 128 --update-epochs 4 --num-minibatches 4 --gamma 0.99"
CARTPOLE += " --gae-lambda 0.95 --learning-rate 2.5e-4 --ent-coef 0.01 --max-grad-norm 0.5 --clip-vloss --no-norm-reward --no-recompute-adv"


def cartpole():
    """CartPole-v1 at the settings of PureJaxRL's `ppo_rnn` against its recipe."""
    train, iterations = gru_loop()
    train = jax.block_until_ready(iterations(train, 1))
    theirs, ours = [], {"shared": [], "separate": []}
    for _ in range(ROUNDS):
        for critic in ours:
            ours[critic] += rollout_seconds(jppo, [*CARTPOLE.split(), "--critic-lstm", critic], 30)
        start = time.perf_counter()
        train = jax.block_until_ready(iterations(train, 30))
        theirs.append((time.perf_counter() - start) / 30)
    base = statistics.median(theirs)
    print(f"CartPole-v1, 4 x 128: the GRU(128) loop {512 / base:.0f} steps/s")
    for critic, seconds in ours.items():
        own = statistics.median(seconds)
        print(f"    {critic} LSTM(128): {512 / own:.0f} steps/s, {base / own:.2f} x")


def hosts():
    """Gymnasium's environments on the host: both scripts at their defaults."""
    for env_id in ("PendulumNoVel-v1", "CartPoleNoVel-v1"):
        seconds = [[], []]
        for _ in range(3):
            for i, script in enumerate((jppo, ppo)):
                seconds[i] += rollout_seconds(script, ["--env-id", env_id, "--vec-env", "sync"], 12)[1:]
        ours, theirs = map(statistics.median, seconds)
        print(f"{env_id}, 16 x 125: JAX {2000 / ours:.0f} steps/s, PyTorch {2000 / theirs:.0f}: {theirs / ours:.2f} x")


def pendulum():
    """PendulumNoVel-v1 on the device, 16 x 128, against RecurrentPPO at RL Zoo's settings."""
    model, theirs, seconds = contrib_model(4, 1024, 128), [], {4: [], 8: [], 16: []}
    for _ in range(3):
        for num_minibatches in seconds:
            flags = [*PEERS, "--num-envs", "16", "--num-steps", "128", "--num-minibatches", str(num_minibatches)]
            seconds[num_minibatches] += rollout_seconds(jppo, flags, 12)
        theirs.append(contrib_rollout_seconds(model))
    base = 4096 / statistics.median(theirs)
    print(f"RecurrentPPO, 4 x 1024, batches of 128: {base:.0f} steps/s")
    for num_minibatches, values in seconds.items():
        own = 2048 / statistics.median(values)
        print(f"    16 x 128, {num_minibatches} minibatches: {own:.0f} steps/s, {own / base:.1f} x")


if __name__ == "__main__":
    contestants = {"recurrence": recurrence, "cartpole": cartpole, "hosts": hosts, "pendulum": pendulum}
    print(f"jax {jax.__version__}, {os.cpu_count()} cores", flush=True)
    os.chdir(tempfile.mkdtemp())
    contestants[sys.argv[1]]()
