# Recurrent PPO that learns on whole sequences, in one file.
#
#     python ppo_lstm_seq.py --env-id PendulumNoVel-v1 --batching whole-seq
#
# PPO is Schulman et al. 2017 (https://arxiv.org/abs/1707.06347); file layout, names and TensorBoard tags follow
# CleanRL (https://docs.cleanrl.dev). Learning on whole sequences was proposed for Stable-Baselines3-contrib; keeping
# only the LSTM state at the start of the rollout is what CleanRL's ppo_atari_lstm.py does.
#
# Letters in the shape comments: T steps of a rollout, N environments, S sequences, L length of the longest of them,
# n valid steps, D observation size, F features, A action size, P policy outputs, H hidden size, K LSTMs (2 if the critic has its own).
#
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.4", "numpy", "gymnasium>=1.1", "tyro", "tensorboard", "tqdm", "wandb"]
# ///
import difflib
import heapq
import importlib.util
import math
import os
import random
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.envs.registration import WrapperSpec
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------------- arguments
@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment, a part of the run's name"""
    seed: int = 1
    """seed of the environments, the weights and every random choice"""
    torch_deterministic: bool = True
    """ask cuDNN for deterministic kernels"""
    cuda: bool = True
    """use a GPU if there is one"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works)"""
    wandb_project_name: str = "ppo-lstm-seq"
    """the Weights & Biases project"""
    wandb_entity: str | None = None
    """the Weights & Biases team or user"""
    eval_episodes: int = 100
    """episodes of the deterministic evaluation at the end, on seeds that training never uses (0: none, for tasks that never end)"""

    # Algorithm specific arguments
    env_id: str = "PendulumNoVel-v1"
    """any Gymnasium id; module:Id-v0 imports the module first"""
    total_timesteps: int = 100_000
    """environment steps to train for; only whole rollouts are taken, the remainder is dropped"""
    learning_rate: float = 3e-3
    """Adam's learning rate"""
    num_envs: int = 16
    """environments stepped side by side"""
    num_steps: int = 125
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.95
    """discount; tuned on short-horizon control, raise it to 0.99 or more where rewards come late"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    batching: Literal["whole-seq", "fixed-size", "env-split"] = "whole-seq"
    """what a minibatch is: whole sequences with nearly equal step counts; equal step counts that may cut a sequence; all
    sequences of some environments"""
    num_minibatches: int = 8
    """minibatches, and so gradient steps, per epoch"""
    max_seq_len: int | None = None
    """cut longer sequences to this many steps (truncated backpropagation; the state at the cut is rebuilt); slow far below --num-steps"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise advantages to mean 0, std 1"""
    norm_adv_scope: Literal["rollout", "minibatch"] = "minibatch"
    """the set of valid steps over which advantages are normalised"""
    loss_norm: Literal["nominal", "minibatch"] = "nominal"
    """divide a minibatch's summed loss by the nominal minibatch size, so that every step weighs the same, or by its own"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    clip_vloss: bool = False
    """clip the value loss too"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 5.0
    """largest norm of the gradient"""
    target_kl: float | None = None
    """end the epochs early once an epoch's mean approximate KL exceeds this"""
    lstm_hidden_size: int = 64
    """units of each LSTM layer"""
    lstm_layers: int = 1
    """layers of each LSTM"""
    critic_lstm: Literal["separate", "shared", "none"] = "separate"
    """the critic's memory: its own LSTM, the actor's (both losses train it), or none"""
    norm_obs: bool = False
    """normalise observations by their running mean and std, clipped to +-10; for scales far from 1"""
    norm_reward: bool = True
    """divide rewards by the running std of the discounted return, clipped to +-10"""


def fail(message):
    """Print one line to stderr and exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def parsed_args(argv=None):
    """The checked arguments of a command line. A bad value ends the program with one line that names the flag."""
    argv = sys.argv[1:] if argv is None else argv
    for flag, following in pairwise([*argv, ""]):
        name, _, value = flag.removeprefix("--").removeprefix("no-").replace("_", "-").partition("=")
        given = (value or following).lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")
        if given and isinstance(getattr(Args, name.replace("-", "_"), None), bool):
            fail(f"--{name} takes no value: write --{name} or --no-{name}")
    args = tyro.cli(Args, args=argv)
    rules = [
        ("at least 1", lambda x: x >= 1, "num_envs num_steps num_minibatches update_epochs max_seq_len lstm_hidden_size lstm_layers"),
        ("0 to 4294967295", lambda x: 0 <= x < 2**32, "seed"),
        ("0 or more", lambda x: 0 <= x < math.inf, "eval_episodes learning_rate ent_coef vf_coef"),
        ("greater than 0", lambda x: x > 0, "clip_coef max_grad_norm target_kl"),
        ("between 0 and 1", lambda x: 0 <= x <= 1, "gamma gae_lambda"),
    ]
    for words, holds, names in rules:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not holds(value):
                fail(f"--{name.replace('_', '-')} is {value}: it must be {words}")
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps < batch_size:
        rollout = f"one rollout of --num-envs x --num-steps = {batch_size}"
        fail(f"--total-timesteps is {args.total_timesteps}, less than {rollout}: raise it, or lower one of the two")
    if args.num_minibatches > batch_size:
        fail(f"--num-minibatches is {args.num_minibatches}, but a rollout has only {batch_size} steps: lower it")
    if args.batching == "env-split" and args.num_envs % args.num_minibatches:
        deal = f"--batching env-split deals {args.num_envs} environments to {args.num_minibatches} minibatches"
        fail(f"{deal}: make --num-envs a multiple of --num-minibatches")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    return args


# ------------------------------------------------------------------------------------------------------ environments
# The RL Zoo's velocity-masked tasks: id -> (the task itself, the entries of the observation set to zero)
NO_VEL = {
    "PendulumNoVel-v1": ("Pendulum-v1", [2]),
    "CartPoleNoVel-v1": ("CartPole-v1", [1, 3]),
    "MountainCarNoVel-v0": ("MountainCar-v0", [1]),
    "MountainCarContinuousNoVel-v0": ("MountainCarContinuous-v0", [1]),
    "LunarLanderNoVel-v3": ("LunarLander-v3", [2, 3, 5]),
    "LunarLanderContinuousNoVel-v3": ("LunarLanderContinuous-v3", [2, 3, 5]),
}
# Training seeds lie below this number, evaluation seeds at and above it.
FIRST_EVAL_SEED = 2**30


def register_no_vel():
    """Register the tasks of NO_VEL: the task itself, behind a wrapper that zeroes the entries."""
    for no_vel_id, (base_id, entries) in NO_VEL.items():
        base, mask = gym.spec(base_id), {"func": partial(masked, entries=entries), "observation_space": None}
        wrapper = WrapperSpec("NoVel", "gymnasium.wrappers:TransformObservation", mask)
        same = {name: getattr(base, name) for name in ("entry_point", "kwargs", "max_episode_steps", "reward_threshold")}
        if no_vel_id not in gym.registry:
            gym.register(no_vel_id, additional_wrappers=(wrapper,), **same)


def masked(obs, entries):
    """A copy of one observation with some entries set to zero."""
    obs = obs.copy()
    obs[entries] = 0
    return obs


register_no_vel()


def make_envs(env_id, num_envs):
    """`num_envs` environments side by side, in next-step autoreset: the step after an episode's last one ignores its
    action, pays nothing and returns the next episode's first observation. An id that can't be made ends the program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # an outdated id that can't be made is said below
            envs = gym.make_vec(env_id, num_envs, vectorization_mode="sync", disable_env_checker=True)
    except gym.error.DependencyNotInstalled as error:
        fail(f"--env-id {env_id} needs a package that is missing: {' '.join(str(error).split())}")
    except (gym.error.Error, ImportError, ValueError) as error:
        close = [] if env_id in gym.registry else difflib.get_close_matches(env_id, gym.registry, n=3)
        fail(f"--env-id {env_id!r}: {' '.join(str(error).split())}" + (f" Close matches: {', '.join(close)}." if close else ""))
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        fail(f"--env-id {env_id} has observations of type {type(envs.single_observation_space).__name__}: only Box is supported")
    if not isinstance(envs.single_action_space, (gym.spaces.Box, gym.spaces.Discrete)):
        fail(f"--env-id {env_id} has actions of type {type(envs.single_action_space).__name__}: only Box and Discrete are supported")
    return envs


# ------------------------------------------------------------------------------------------------------------- agent
# The action distribution is three functions of an action space and of `policy`, the policy's outputs:
# the logits (n, P) of a Discrete space; mean and log std, (n, P) with P = 2A, of a Box with A entries.
def sampled_action(space, policy, deterministic=False):
    """One action for each row of `policy` (n, P), the likeliest if `deterministic`: (n,) for Discrete, (n, A) for Box."""
    if isinstance(space, gym.spaces.Discrete):
        gumbel = 0 if deterministic else -torch.empty_like(policy).exponential_().log()
        return (policy + gumbel).argmax(-1)
    mean, logstd = policy.chunk(2, -1)
    return mean if deterministic else mean + logstd.exp() * torch.randn_like(mean)


def logprob_and_entropy(space, policy, action):
    """The log-probability of each action and the entropy of each row's distribution, both (n,). In closed form, since
    `torch.distributions` costs 150 us a call (measured), a third of an acting step."""
    if isinstance(space, gym.spaces.Discrete):
        logprobs = policy.log_softmax(-1)
        return logprobs.gather(-1, action[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    mean, logstd = policy.chunk(2, -1)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - 0.5 * math.log(2 * math.pi)
    return logprob.sum(-1), (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def env_action(space, action):
    """The sampled actions as numpy, as the environments take them. Of a bounded Box, -1 and 1 mean the bounds, so that the
    initial std of 1 explores a wide Box too; actions are clipped to the bounds here only."""
    action = action.cpu().numpy()
    if isinstance(space, gym.spaces.Discrete):
        return action + space.start
    bounded = (space.low > -1e30) & (space.high < 1e30)  # float32's largest number is a bound in name only
    low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
    action = (high + low) / 2 + (high - low) / 2 * action.reshape(-1, *space.shape)
    action = np.clip(action, space.low, space.high)
    return (np.rint(action) if space.dtype.kind in "iu" else action).astype(space.dtype)


def layer_init(layer, std):
    """`layer` with orthogonal weights scaled by `std` and zero biases."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def lstm_init(lstm):
    """`lstm` with orthogonal weights, zero biases, and a forget-gate bias of 1, so that it remembers from the start.
    That bias is the largest single gain on PendulumNoVel (Gers et al. 2000; Jozefowicz et al. 2015)."""
    for name, param in lstm.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(param)
        else:
            nn.init.zeros_(param)
        if "bias_ih" in name:  # (4H,): the input, forget, cell and output gates
            nn.init.ones_(param.data[lstm.hidden_size : 2 * lstm.hidden_size])
    return lstm


class Agent(nn.Module):
    """Encoder, LSTM(s), heads, and the running statistics by which observations and rewards are normalised.

    A state is one tensor (K, 2, layers, N, H): for each LSTM, h and c of each layer. `step` runs one time step (acting),
    `run_sequences` whole sequences (learning); from the same state they compute the same.
    """

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.action_space, self.norm_obs, self.critic_lstm = action_space, args.norm_obs, args.critic_lstm
        hidden_size = args.lstm_hidden_size
        continuous = isinstance(action_space, gym.spaces.Box)
        action_size = math.prod(action_space.shape) if continuous else int(action_space.n)

        self.encoder, feature_size = nn.Identity(), math.prod(obs_space.shape)  # (n, D) -> (n, F), here the same
        num_lstms = 2 if args.critic_lstm == "separate" else 1
        self.lstms = nn.ModuleList(lstm_init(nn.LSTM(feature_size, hidden_size, args.lstm_layers)) for _ in range(num_lstms))
        critic_size = feature_size if args.critic_lstm == "none" else hidden_size
        self.actor = nn.Sequential(layer_init(nn.Linear(hidden_size, 64), 2**0.5), nn.Tanh(), layer_init(nn.Linear(64, action_size), 0.1))
        self.critic = nn.Sequential(layer_init(nn.Linear(critic_size, 64), 2**0.5), nn.Tanh(), layer_init(nn.Linear(64, 1), 1.0))
        self.logstd = nn.Parameter(torch.zeros(1, action_size)) if continuous else None
        # count, mean and variance of every observation entry, and of the discounted return (float64)
        self.register_buffer("obs_stats", torch.stack([torch.full(obs_space.shape, x).double() for x in (0.0, 0.0, 1.0)]))
        self.register_buffer("return_stats", torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))

    def initial_state(self, num_envs):
        """The state at the start of an episode: zeros (K, 2, layers, N, H)."""
        lstm = self.lstms[0]
        return lstm.weight_hh_l0.new_zeros(len(self.lstms), 2, lstm.num_layers, num_envs, lstm.hidden_size)

    def features(self, obs):
        """Observations (n, *shape) of any dtype, normalised and encoded: (n, F)."""
        if self.norm_obs:
            _, mean, var = self.obs_stats
            obs = ((obs - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
        return self.encoder(obs.reshape(len(obs), -1).to(self.lstms[0].weight_hh_l0.dtype))

    def heads(self, features, memories):
        """Policy outputs (n, P) and values (n,) from the features (n, F) and each LSTM's output, K x (n, H)."""
        policy = self.actor(memories[0])
        if self.logstd is not None:
            policy = torch.cat([policy, self.logstd.expand_as(policy)], -1)
        return policy, self.critic(features if self.critic_lstm == "none" else memories[-1])[:, 0]

    def step(self, obs, state):
        """One time step of N environments: obs (N, *shape), state (K, 2, layers, N, H) -> policy (N, P), value (N,), the
        next state. `torch.lstm_cell` on the LSTM's own weights takes half the time of `nn.LSTM` on one step (measured)."""
        features = self.features(obs)
        memories, next_state = [], torch.empty_like(state)
        for k, lstm in enumerate(self.lstms):
            x = features
            for layer, weights in enumerate(lstm.all_weights):
                x, c = torch.lstm_cell(x, (state[k, 0, layer], state[k, 1, layer]), *weights)
                next_state[k, 0, layer], next_state[k, 1, layer] = x, c
            memories.append(x)
        return *self.heads(features, memories), next_state

    def run_sequences(self, obs, state, lengths, packed=None, pad=0.0):
        """Whole sequences at once: policy (n, P), value (n,) for each of their steps, and the state after the last ones.

        obs (n, *shape) holds the steps of S sequences, time-major: step 0 of each, then step 1 of each, ...; `lengths`
        (S,) descends, so a step's sequences are always the first ones and this order is PackedSequence's own.
        state (K, 2, layers, S, H) is the state before each sequence. Only real steps enter the encoder, leave the LSTMs and
        reach the heads; what the padding holds (`pad`) changes nothing. Only `packed` knows the state after the sequences.
        CUDA packs (one cuDNN call) and the CPU pads, since its packed loop is 2-7 x slower on mixed lengths (measured).
        """
        features = self.features(obs)  # (n, F)
        packed = features.is_cuda if packed is None else packed
        steps = torch.arange(int(lengths[0]))[:, None] < torch.as_tensor(lengths)  # (L, S), True where a sequence has a step
        if not packed:
            index = steps.flatten().nonzero()[:, 0].to(features.device)  # (n,), the real steps among the L * S
            padded = features.new_full((steps.numel(), features.shape[1]), pad).index_copy(0, index, features)
            padded = padded.view(*steps.shape, -1)  # (L, S, F)
        memories, next_state = [], []
        for lstm, (h, c) in zip(self.lstms, state, strict=True):  # h, c: (layers, S, H)
            if packed:
                memory, last = lstm(PackedSequence(features, steps.sum(1)), (h, c))
                memories.append(memory.data)  # (n, H)
                next_state.append(torch.stack(last))
            else:
                memory, _ = lstm(padded, (h, c))  # (L, S, H)
                memories.append(memory.flatten(0, 1).index_select(0, index))  # (n, H)
        return *self.heads(features, memories), torch.stack(next_state) if packed else None


# ----------------------------------------------------------------------------------------------- running statistics
def update_statistics(stats, batch):
    """Merge the rows of `batch` (n, *shape) into `stats`, the running count, mean and variance (3, *shape), in place
    (Chan et al. 1979)."""
    count, mean, var = stats.clone()
    n, batch = len(batch), batch.double()
    if n:
        delta = batch.mean(0) - mean
        stats[0] = count + n
        stats[1] = mean + delta * n / (count + n)
        stats[2] = (var * count + batch.var(0, correction=0) * n + delta**2 * count * n / (count + n)) / (count + n)


# ----------------------------------------------------------------------------------------------------------- rollout
class Rollout(NamedTuple):
    """What is kept between acting and learning. No LSTM state but `initial_state` is in it.

    Slot t of an environment is not valid if an episode ended at t-1: it holds that episode's final observation, its action
    is ignored, and the next episode starts at t+1 with a zero state. Its value is what a truncation at t-1 bootstraps from.
    """

    obs: torch.Tensor  # (T, N, *shape), in the environment's dtype
    actions: torch.Tensor  # (T, N) or (T, N, A)
    logprobs: torch.Tensor  # (T, N)
    values: torch.Tensor  # (T + 1, N), the last row for the observation after the rollout
    rewards: np.ndarray  # (T, N), as paid by the environment
    terminations: np.ndarray  # (T, N), the episode ended here
    truncations: np.ndarray  # (T, N), the episode was cut here by a time limit
    valid: np.ndarray  # (T, N)
    initial_state: torch.Tensor  # (K, 2, layers, N, H), before slot 0


class Carry(NamedTuple):
    """What acting hands from one rollout to the next, for each of the N environments."""

    next_obs: np.ndarray
    next_done: np.ndarray  # the episode has ended: this observation is its final one
    next_state: torch.Tensor  # (K, 2, layers, N, H) before this observation, zero at an episode's start
    episode_return: np.ndarray
    episode_length: np.ndarray


def first_carry(envs, agent, seeds):
    """The carry before the first step, after a reset with one seed per environment."""
    n = envs.num_envs
    obs, _ = envs.reset(seed=[int(s) for s in seeds])
    return Carry(obs, np.zeros(n, bool), agent.initial_state(n), np.zeros(n), np.zeros(n, int))


@torch.no_grad()
def collect(envs, agent, carry, num_steps):
    """Act for `num_steps`: the rollout, the carry after it, and the ended episodes as (slot, return, length)."""
    action_space, device = envs.single_action_space, carry.next_state.device
    next_obs, next_done, next_state, episode_return, episode_length = carry
    episode_return, episode_length = episode_return.copy(), episode_length.copy()
    rows, episodes = [], []
    for t in range(num_steps):
        obs, valid = torch.as_tensor(next_obs).to(device), ~next_done
        policy, value, next_state = agent.step(obs, next_state)
        if next_done.any():  # this slot's observation is a final one, so the next slot starts an episode
            next_state[..., torch.as_tensor(next_done), :] = 0
        action = sampled_action(action_space, policy)
        next_obs, reward, termination, truncation, _ = envs.step(env_action(action_space, action))
        next_done = termination | truncation
        rows.append((obs, action, policy, value, reward, termination, truncation, valid))
        episode_return += reward
        episode_length += valid
        for i in np.flatnonzero(next_done):
            episodes.append((t, episode_return[i], episode_length[i]))
            episode_return[i], episode_length[i] = 0, 0
    _, last_value, _ = agent.step(torch.as_tensor(next_obs).to(device), next_state)

    obs, actions, policies, values, *flags = zip(*rows, strict=True)
    logprobs, _ = logprob_and_entropy(action_space, torch.cat(policies), torch.cat(actions))  # (T * N,), one call for all steps
    tensors = torch.stack(obs), torch.stack(actions), logprobs.view(num_steps, -1), torch.stack([*values, last_value])
    rollout = Rollout(*tensors, *map(np.stack, flags), initial_state=carry.next_state)
    return rollout, Carry(next_obs, next_done, next_state, episode_return, episode_length), episodes


def scaled_rewards(agent, rollout, discounted_return, gamma):
    """The rewards (T, N) divided by the running std of the discounted return, clipped to +-10, and the discounted return (N,)
    of each running episode. `discounted_return` (N,) comes from the rollout before; the slot behind an episode's end, which is
    not valid, clears it, after a truncation too. The statistics are updated first: they do not touch the policy."""
    returns = np.zeros_like(rollout.rewards)
    for t in range(len(returns)):
        returns[t] = discounted_return = (discounted_return * gamma + rollout.rewards[t]) * rollout.valid[t]
    update_statistics(agent.return_stats, torch.as_tensor(returns[rollout.valid]).to(agent.return_stats.device))
    return np.clip(rollout.rewards / (agent.return_stats[2].item() + 1e-8) ** 0.5, -10, 10), discounted_return


def gae(rewards, values, terminations, truncations, gamma, gae_lambda):
    """Advantages (T, N) by generalised advantage estimation (Schulman et al. 2016), from rewards and flags (T, N) and
    values (T + 1, N).

    The value in the slot after an episode's last step is the final observation's, under the state carried to it: a
    truncation bootstraps from it, a termination does not, and neither passes advantage back from the next episode. In slots
    that are not valid the result means nothing.
    """
    ended = terminations | truncations
    deltas = rewards + gamma * np.where(terminations, 0.0, values[1:]) - values[:-1]
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):  # where, not 0 x: a final observation's value may be NaN
        advantages[t] = advantage = deltas[t] + gamma * gae_lambda * np.where(ended[t], 0.0, advantage)
    return advantages


# --------------------------------------------------------------------------------------------------------- sequences
class Sequences(NamedTuple):
    """A table of sequences, or of pieces of them: row i is slots start[i] ... start[i] + length[i] - 1 of environment env[i]."""

    env: np.ndarray  # (S,)
    start: np.ndarray  # (S,)
    length: np.ndarray  # (S,)
    piece: np.ndarray  # (S,), 0 for a whole sequence or its first piece; row i continues row i - 1 if piece[i] > 0


def whole_sequences(valid):
    """The whole sequences of a rollout: the longest runs of valid slots (T, N) in each environment. Each starts at slot 0
    or at an episode's start and ends at the last slot or with its episode, so no state is ever reset inside one."""
    edges = np.diff(np.pad(valid.T.astype(np.int8), ((0, 0), (1, 1))))  # (N, T + 1), 1 where a run starts, -1 behind its end
    env, start = np.nonzero(edges == 1)
    end = np.nonzero(edges == -1)[1]
    return Sequences(env, start, end - start, np.zeros_like(env))


def cut_sequences(sequences, cuts):
    """The pieces left when the whole sequences, laid end to end in their order, are cut at the positions `cuts`."""
    offsets = np.cumsum(sequences.length) - sequences.length  # (S,), where each sequence begins on that line
    begin = np.union1d(offsets, cuts)
    row = np.searchsorted(offsets, begin, side="right") - 1  # the sequence each piece belongs to
    piece = np.arange(len(begin)) - np.searchsorted(row, row)
    return Sequences(sequences.env[row], sequences.start[row] + begin - offsets[row], np.diff(begin, append=sequences.length.sum()), piece)


def balanced_groups(lengths, num_groups, rng, draws=8):
    """`num_groups` random groups of sequences, as a group number per sequence, whose step counts are nearly equal.

    Each draw deals the sequences, the longer ones earlier but with noise in that order, each to the group with the fewest
    steps. Of the draws, the most even one wins (to a hundredth of a minibatch), then the one with the least padding.
    """
    best, best_score = None, None
    for _ in range(draws):
        group = np.zeros(len(lengths), int)
        steps = [(0, g) for g in range(num_groups)]
        rows, longest = [0] * num_groups, [0] * num_groups
        for i in np.argsort(-lengths * rng.uniform(0.7, 1.0, len(lengths))):
            count, g = steps[0]
            heapq.heapreplace(steps, (count + lengths[i], g))
            group[i], rows[g], longest[g] = g, rows[g] + 1, max(longest[g], lengths[i])
        uneven = (max(steps)[0] - steps[0][0]) * num_groups / lengths.sum()
        score = (round(uneven * 100), np.dot(rows, longest))
        if best is None or score < best_score:
            best, best_score = group, score
    return best


def drawn_minibatches(sequences, batching, num_minibatches, max_seq_len, rng):
    """One epoch's minibatches, drawn at random: the table of (pieces of) sequences, and a list of arrays of its rows.
    Every valid step is in exactly one minibatch; none is empty. There may be fewer than `num_minibatches`: as many as there are
    rows (whole-seq), steps (fixed-size), or groups of environments with a valid step (env-split)."""
    total = sequences.length.sum()
    order = rng.permutation(len(sequences.env))
    sequences = Sequences(*(column[order] for column in sequences))
    offsets = np.cumsum(sequences.length) - sequences.length
    cuts = [np.zeros(0, int)]
    if max_seq_len is not None:
        cuts += [np.arange(o + max_seq_len, o + n, max_seq_len) for o, n in zip(offsets, sequences.length, strict=True)]
    edges = np.zeros(0, int)
    if batching == "fixed-size":
        num_minibatches = min(num_minibatches, total)
        edges = np.arange(num_minibatches) * total // num_minibatches  # counts differ by at most one step
    pieces = cut_sequences(sequences, np.concatenate([*cuts, edges]))
    if batching == "whole-seq":
        num_minibatches = min(num_minibatches, len(pieces.env))
        group = balanced_groups(pieces.length, num_minibatches, rng)
    elif batching == "fixed-size":
        group = np.searchsorted(edges, np.cumsum(pieces.length) - pieces.length, side="right") - 1
    else:
        group = rng.permutation(pieces.env.max() + 1)[pieces.env] % num_minibatches
    rows = [np.flatnonzero(group == g) for g in range(num_minibatches)]
    return pieces, [r for r in rows if len(r)]


def time_major(pieces, rows, num_envs):
    """Where the steps of some rows of the table lie in a flattened rollout (T * N): `rows` sorted by descending length,
    their lengths (S,), and the indices (n,) in the order that `Agent.run_sequences` takes."""
    rows = rows[np.argsort(-pieces.length[rows], kind="stable")]
    lengths = pieces.length[rows]
    t = np.arange(lengths[0])[:, None]  # (L, 1)
    index = (pieces.start[rows] + t) * num_envs + pieces.env[rows]  # (L, S)
    return rows, lengths, torch.as_tensor(index[t < lengths])


@torch.no_grad()
def states_before(agent, b_obs, initial_state, pieces):
    """The LSTM state before each piece (K, 2, layers, S, H): the rollout's initial state at slot 0, zero at an episode's start;
    behind a cut, what the current weights make of the piece before, run without gradient: all first pieces at once, then all
    second ones, ..."""
    state = agent.initial_state(len(pieces.env))
    begins = np.flatnonzero(pieces.start == 0)
    state[..., begins, :] = initial_state[..., pieces.env[begins], :]
    for k in range(1, pieces.piece.max() + 1):
        before, lengths, index = time_major(pieces, np.flatnonzero(pieces.piece == k) - 1, initial_state.shape[-2])
        _, _, state[..., before + 1, :] = agent.run_sequences(b_obs[index], state[..., before, :], lengths, packed=True)
    return state


# ------------------------------------------------------------------------------------------------------------ update
def normalised(advantages):
    """`advantages` with mean 0 and std 1; a single one becomes 0."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def ppo_losses(args, newlogprob, entropy, newvalue, oldlogprob, oldvalue, advantages, returns):
    """Sums over a minibatch's valid steps (n,): policy loss, value loss, entropy; and without gradient: both estimates of the
    KL divergence (http://joschu.net/blog/kl-approx.html) and the number of clipped ratios."""
    logratio = newlogprob - oldlogprob
    ratio = logratio.exp()
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).sum()
    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = oldvalue + (newvalue - oldvalue).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    with torch.no_grad():
        old_approx_kl = (-logratio).sum()
        approx_kl = (ratio - 1 - logratio).sum()
        clipped = ((ratio - 1).abs() > args.clip_coef).sum()
    return pg_loss, 0.5 * v_loss.sum(), entropy.sum(), old_approx_kl, approx_kl, clipped


def update(agent, optimizer, rollout, advantages, args, rng):
    """All epochs over one rollout. Returns the metrics to log; losses are means over all steps learnt from."""
    T, N = rollout.valid.shape
    device = rollout.obs.device
    b_obs, b_actions, b_logprobs = (x.flatten(0, 1) for x in (rollout.obs, rollout.actions, rollout.logprobs))
    b_values = rollout.values[:-1].flatten()
    b_advantages = torch.as_tensor(advantages.flatten(), dtype=b_values.dtype, device=device)
    b_returns = b_advantages + b_values
    b_valid = torch.as_tensor(rollout.valid.flatten(), device=device)
    num_valid = int(rollout.valid.sum())
    if num_valid == 0:  # possible with one step a rollout
        return {"charts/valid_steps": 0}
    returns_var = b_returns[b_valid].var(correction=0).item()
    explained = 1 - b_advantages[b_valid].var(correction=0).item() / returns_var if returns_var > 0 else 0.0
    if args.norm_adv and args.norm_adv_scope == "rollout":
        b_advantages[b_valid] = normalised(b_advantages[b_valid])
    sequences = whole_sequences(rollout.valid)

    def relearnt(rows):  # what the current weights make of some rows of the table; the indices of their steps first
        rows, lengths, mb_inds = time_major(pieces, rows, N)
        policy, newvalue, _ = agent.run_sequences(b_obs[mb_inds], state[..., rows, :], lengths)
        newlogprob, entropy = logprob_and_entropy(agent.action_space, policy, b_actions[mb_inds])
        return mb_inds, newlogprob, entropy, newvalue

    sums, mb_sizes, padded_sizes = torch.zeros(6, device=device), [], []
    for epoch in range(args.update_epochs):
        pieces, minibatches = drawn_minibatches(sequences, args.batching, args.num_minibatches, args.max_seq_len, rng)
        state = states_before(agent, b_obs, rollout.initial_state, pieces)
        if epoch == 0:  # no gradient step yet: the log-probabilities must be the ones that acting stored, at every valid step
            with torch.no_grad():
                mb_inds, newlogprob, _, _ = relearnt(np.arange(len(pieces.env)))
            ratio_error = ((newlogprob - b_logprobs[mb_inds]).exp() - 1).abs().max().item()
        epoch_kl = 0
        for rows in minibatches:
            mb_inds, newlogprob, entropy, newvalue = relearnt(rows)
            mb_advantages = b_advantages[mb_inds]
            if args.norm_adv and args.norm_adv_scope == "minibatch":
                mb_advantages = normalised(mb_advantages)
            old = b_logprobs[mb_inds], b_values[mb_inds]
            losses = ppo_losses(args, newlogprob, entropy, newvalue, *old, mb_advantages, b_returns[mb_inds])
            pg_loss, v_loss, entropy_sum, _, approx_kl, _ = losses
            # A step weighs the same in a small minibatch as in a large one: the sum is divided by the nominal size.
            size = num_valid / len(minibatches) if args.loss_norm == "nominal" else len(mb_inds)
            loss = (pg_loss - args.ent_coef * entropy_sum + args.vf_coef * v_loss) / size
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            sums += torch.stack([x.detach().to(sums.dtype) for x in losses])
            epoch_kl += approx_kl
            mb_sizes.append(len(mb_inds))
            padded_sizes.append(len(rows) * pieces.length[rows].max())
        if args.target_kl is not None and epoch_kl / num_valid > args.target_kl:
            break

    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    metrics = {f"losses/{name}": value / sum(mb_sizes) for name, value in zip(names, sums.tolist(), strict=True)}
    return metrics | {
        "losses/explained_variance": explained,
        "charts/valid_steps": num_valid,
        "charts/minibatches": len(minibatches),
        "charts/minibatch_steps_min": min(mb_sizes),
        "charts/minibatch_steps_max": max(mb_sizes),
        "charts/padding_fraction": 0.0 if device.type == "cuda" else 1 - sum(mb_sizes) / sum(padded_sizes),
        "debug/ratio_error": ratio_error,
    }


# -------------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(agent, env_id, episodes, num_envs):
    """Undiscounted returns (episodes,) of whole episodes, one for each of the seeds FIRST_EVAL_SEED, FIRST_EVAL_SEED + 1, ...
    The state is carried through an episode and is zero at its start."""
    returns = np.zeros(episodes)
    envs = make_envs(env_id, min(num_envs, max(episodes, 1)))
    for first in range(0, episodes, envs.num_envs):
        numbers = first + np.arange(envs.num_envs)  # in the last round, numbers beyond `episodes` are run and not counted
        obs, _ = envs.reset(seed=[FIRST_EVAL_SEED + int(i) for i in numbers])
        state = agent.initial_state(envs.num_envs)
        running = numbers < episodes
        while running.any():
            policy, _, state = agent.step(torch.as_tensor(obs).to(state.device), state)
            action = sampled_action(envs.single_action_space, policy, deterministic=True)
            obs, reward, termination, truncation, _ = envs.step(env_action(envs.single_action_space, action))
            returns[numbers[running]] += reward[running]
            running &= ~(termination | truncation)
    envs.close()
    return returns


# -------------------------------------------------------------------------------------------------------------- main
def train(args):
    """Train an agent and evaluate it: the agent, the returns of the evaluation, and the run's folder."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
    if args.track:
        import wandb

        where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_name}
        wandb.init(**where, config=vars(args), sync_tensorboard=True, save_code=True)
    writer = SummaryWriter(f"runs/{run_name}")
    table = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")

    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    last_returns, discounted_return, warned = deque(maxlen=100), np.zeros(args.num_envs), False
    start_time = last_print = time.time()
    bar = tqdm(total=num_iterations * batch_size, unit=" steps", disable=not sys.stderr.isatty())
    carry = first_carry(envs, agent, np.random.SeedSequence(args.seed).generate_state(args.num_envs) % FIRST_EVAL_SEED)
    for iteration in range(num_iterations):
        global_step = iteration * batch_size
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - iteration / num_iterations) * args.learning_rate

        collect_start = time.time()
        rollout, carry, episodes = collect(envs, agent, carry, args.num_steps)
        for t, episodic_return, episodic_length in episodes:
            writer.add_scalar("charts/episodic_return", episodic_return, global_step + (t + 1) * args.num_envs)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step + (t + 1) * args.num_envs)
            last_returns.append(episodic_return)

        update_start = time.time()
        rewards = rollout.rewards
        if args.norm_reward:
            rewards, discounted_return = scaled_rewards(agent, rollout, discounted_return, args.gamma)
        values = rollout.values.cpu().numpy()
        advantages = gae(rewards, values, rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda)
        metrics = update(agent, optimizer, rollout, advantages, args, rng)
        if args.norm_obs:  # between iterations only: inside one, the policy that learns must be the policy that acted
            update_statistics(agent.obs_stats, rollout.obs[torch.as_tensor(rollout.valid)])
        update_end = time.time()

        global_step += batch_size
        sps = int(global_step / (update_end - start_time))
        metrics |= {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/SPS": sps}
        metrics |= {"time/collect": update_start - collect_start, "time/update": update_end - update_start}
        if metrics.get("charts/minibatches", args.num_minibatches) < args.num_minibatches and not warned:
            tqdm.write(f"note: this rollout makes only {metrics['charts/minibatches']} of {args.num_minibatches} minibatches an epoch")
            warned = True
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, global_step)
        mean_return = f"{np.mean(last_returns):.1f}" if last_returns else "-"
        bar.set_postfix_str(f"return {mean_return}")
        bar.update(batch_size)
        if bar.disable and (update_end - last_print > 5 or iteration + 1 == num_iterations):
            left = (bar.total - global_step) / max(sps, 1)
            print(f"step {global_step}/{bar.total}, return {mean_return} (last 100), {sps} steps/s, {left:.0f} s left", flush=True)
            last_print = update_end
    bar.close()
    envs.close()

    eval_returns = evaluate(agent, args.env_id, args.eval_episodes, args.num_envs)
    if args.eval_episodes:
        writer.add_scalar("charts/eval_return", eval_returns.mean(), global_step)
    writer.close()
    if args.track:
        wandb.finish()
    return agent, eval_returns, f"runs/{run_name}"


if __name__ == "__main__":
    _, returns, run_dir = train(parsed_args())
    result = f"eval_return={returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes, " if len(returns) else ""
    print(f"{result}run: {run_dir}")
