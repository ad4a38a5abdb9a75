"""The naive reference: one environment, one step at a time, the LSTM written out gate by gate, states reset by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

import ppo_lstm_seq as ppo
import toy_envs  # noqa: F401


def args(*flags):
    """Small, and independent of the tuned defaults. The last of a repeated flag wins."""
    base = "--env-id Ragged-v0 --num-envs 3 --num-steps 11 --num-minibatches 4 --norm-adv-scope rollout --ent-coef 0 --norm-obs"
    return ppo.parsed_args([*base.split(), "--no-recompute-adv", *flags])


def help_words(script):
    """{flag: words} of what a script's --help says behind the flag and before its default."""
    env = {**os.environ, "COLUMNS": "400"}
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, env=env, timeout=60)
    assert result.returncode == 0
    words = {}
    for entry in result.stdout.split("\u2502 --")[1:]:
        flag, *rest = entry.split("(default:")[0].split()
        words[flag.strip(",").replace("-", "_")] = [word for word in rest if word[0].islower()]
    return words


def make_envs(env_id, num_envs, *flags):
    return ppo.make_envs(replace(args("--env-id", env_id, *flags), num_envs=num_envs))


def make_agent(args, dtype=torch.float32):
    """An agent whose every parameter is random, so that no output is zero by initialisation, and whose statistics are not the
    identity."""
    envs = ppo.make_envs(replace(args, num_envs=1))
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args).to(dtype)
    for param in agent.parameters():
        param.data.normal_(0, 0.5)
    agent.obs_stats[1], agent.obs_stats[2] = 0.5, 4.0
    return agent


def naive_lstm_step(lstm, x, h, c):
    """One step of a stack of LSTM layers: x (features,), h and c lists of (H,), one per layer."""
    h, c = list(h), list(c)
    for layer in range(lstm.num_layers):
        w_ih, w_hh, b_ih, b_hh = (getattr(lstm, f"{n}_l{layer}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        i, f, g, o = (w_ih @ x + b_ih + w_hh @ h[layer] + b_hh).split(lstm.hidden_size)
        c[layer] = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
        h[layer] = o.sigmoid() * c[layer].tanh()
        x = h[layer]
    return x, h, c


def naive_outputs(agent, obs, valid, initial_state, detach_every=None):
    """{(t, n): (policy, value, state after)} at the valid slots of a rollout. The state starts from `initial_state`, is zero
    behind a slot that is not valid, and is detached every `detach_every` steps of a sequence."""
    outputs = {}
    for n in range(valid.shape[1]):
        states = [(list(s[0, :, n]), list(s[1, :, n])) for s in initial_state]
        age = 0
        for t in range(len(valid)):
            if not valid[t, n]:
                states = [([x * 0 for x in h], [x * 0 for x in c]) for h, c in states]
                age = 0
                continue
            if detach_every and age and age % detach_every == 0:
                states = [([x.detach() for x in h], [x.detach() for x in c]) for h, c in states]
            age += 1
            now = [leaf[t, n][None] for leaf in obs]
            features = agent.features(now)
            memories, after = [], []
            for lstm, (h, c) in zip(agent.lstms, states, strict=True):
                out, h, c = naive_lstm_step(lstm, features[0], h, c)
                memories.append(out[None])
                after.append((h, c))
            states = after
            policy, value = agent.heads(features, memories, now[-1])
            state = torch.stack([torch.stack([torch.stack(h), torch.stack(c)]) for h, c in states])  # (K, 2, layers, H)
            outputs[t, n] = policy[0], value[0], state
    return outputs


def random_valid(T, N, rng, chance=0.25):
    """Slots (T, N) that are valid, as episode ends at random would leave them: never two invalid ones in a row."""
    valid = np.ones((T, N), bool)
    for t in range(T):
        valid[t] = (rng.random(N) > chance) | (~valid[t - 1] if t else False)
    return valid


def random_rollout(agent, valid, seed=0):
    """A rollout of random numbers on the given valid slots (T, N), its initial state random where slot 0 is valid."""
    torch.manual_seed(seed)
    T, N = valid.shape
    dtype = agent.lstms[0].weight_hh_l0.dtype
    state = 0.5 * torch.randn_like(agent.initial_state(N))
    ended = np.zeros((T, N), bool)
    ended[:-1] = ~valid[1:]
    return ppo.Rollout(
        obs=(torch.randn(T + 1, N, *agent.obs_stats.shape[1:], dtype=dtype), torch.ones(T + 1, N, 1, 2, dtype=torch.bool)),
        actions=torch.randn(T, N, 1, dtype=dtype),
        logprobs=torch.randn(T, N, dtype=dtype) - 2,
        values=torch.randn(T + 1, N, dtype=dtype),
        rewards=np.random.default_rng(seed).normal(size=(T, N)),
        terminations=ended,
        truncations=np.zeros((T, N), bool),
        valid=valid,
        initial_state=state,
    )


class GradientRecorder:
    """Stands in for an optimizer: keeps each minibatch's gradient and leaves the weights alone."""

    def __init__(self, agent):
        self.agent, self.gradients = agent, []

    def zero_grad(self):
        self.agent.zero_grad()

    def step(self):
        self.gradients.append(gradient(self.agent))


def gradient(agent):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone() for p in agent.parameters()])


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


def recorded_train(args):
    """Train: the agent, for each call of `update` its (metrics, rollout as collected, advantages), the evaluation's returns, the
    run's folder."""
    calls, collected, collect, update = [], [], ppo.collect, ppo.update

    def collecting(*given):
        collected.append(collect(*given))
        return collected[-1]

    def recorder(agent, optimizer, rollout, advantages, *rest):
        kept = advantages.copy()
        metrics = update(agent, optimizer, rollout, advantages, *rest)
        calls.append((dict(metrics), collected[-1][0], kept))
        return metrics

    with mock.patch.object(ppo, "collect", collecting), mock.patch.object(ppo, "update", recorder):
        agent, eval_returns, run_dir = ppo.train(args)
    return agent, calls, eval_returns, run_dir
