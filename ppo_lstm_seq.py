# Recurrent PPO that learns on whole sequences, in one file.
#
#     python ppo_lstm_seq.py --env-id PendulumNoVel-v1 --batching whole-seq
#
# PPO is Schulman et al. 2017 (https://arxiv.org/abs/1707.06347); layout, names and tags follow CleanRL (https://docs.cleanrl.dev), as
# does keeping only the LSTM state at the start of the rollout. Learning on whole sequences was proposed for Stable-Baselines3-contrib.
#
# Letters in the shape comments: T steps of a rollout, N environments, S sequences, L length of the longest of them, n valid steps,
# D observation size, F features, A entries of an action, P policy outputs for each, H hidden size, K LSTMs (2 if the critic has its own).
#
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.4", "numpy", "gymnasium>=1.1", "tyro", "tensorboard", "tqdm", "wandb"]
# ///
import copy
import difflib
import functools
import heapq
import importlib.util
import itertools
import math
import multiprocessing
import operator
import os
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------------- arguments
@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # the name of this experiment, a part of the run's name
    seed: int = 1  # seed of the environments, the weights and every random choice
    torch_deterministic: bool = True  # ask cuDNN for deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "ppo-lstm-seq"  # the Weights & Biases project
    wandb_entity: str | None = None  # the Weights & Biases team or user
    capture_video: bool = False  # record the first environment, and the evaluation of --evaluate, into runs/NAME/videos
    resume: str | None = None  # go on with a run, given by its folder runs/NAME; its arguments hold, and --total-timesteps may be raised
    evaluate: str | None = None  # train nothing: evaluate the agent of a run, given by its folder runs/NAME
    checkpoint_interval: int = 10  # iterations between checkpoints, from which --resume goes on (0: only when the run ends or is stopped)
    save_model: bool = True  # write the trained agent to runs/NAME/model.pt
    eval_episodes: int = 100  # episodes of the deterministic evaluation at the end, on seeds new to it (0: none, for tasks that never end)
    # Algorithm specific arguments
    env_id: str = "PendulumNoVel-v1"  # any Gymnasium id; module:Id-v0 imports the module first
    vec_env: Literal["sync", "async", "envpool"] = "sync"  # environments in this process, in one process each, or in EnvPool's threads
    obs_keys: tuple[str, ...] = ()  # of Dict observations, the keys to use (all if none is given)
    frame_stack: int = 1  # observe the last so many observations together
    prev_action: bool = False  # observe the last action too, as the environment received it
    prev_reward: bool = False  # observe the last reward too
    total_timesteps: int = 100_000  # environment steps to train for; only whole rollouts are taken, the remainder is dropped
    learning_rate: float = 3e-3  # Adam's learning rate
    num_envs: int = 16  # environments stepped side by side
    num_steps: int = 125  # steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: float = 0.95  # discount; tuned on short-horizon control, raise it to 0.99 or more where rewards come late
    gae_lambda: float = 0.9  # lambda of generalised advantage estimation
    batching: Literal["whole-seq", "fixed-size", "env-split"] = "whole-seq"
    """a minibatch: whole sequences, of nearly equal step count; equal step counts, cutting sequences; the sequences of some environments"""
    num_minibatches: int = 8  # minibatches, and so gradient steps, per epoch
    max_seq_len: int | None = None  # cut longer sequences to so many steps (truncated BPTT; the states are rebuilt); slow if small
    update_epochs: int = 10  # passes over each rollout
    recompute_adv: bool = True  # compute advantages and returns anew before each epoch, from the values that the weights of then give
    norm_adv: bool = True  # normalise advantages to mean 0, std 1
    norm_adv_scope: Literal["rollout", "minibatch"] = "minibatch"  # the set of valid steps over which advantages are normalised
    loss_norm: Literal["nominal", "minibatch"] = "nominal"  # what a minibatch's summed loss is divided by: the nominal size, or its own
    clip_coef: float = 0.2  # clipping range of the probability ratio
    clip_vloss: bool = False  # clip the value loss too
    ent_coef: float = 0.02  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 5.0  # largest norm of the gradient
    target_kl: float | None = None  # end the epochs early once an epoch's mean approximate KL exceeds this
    recurrent: bool = True  # --no-recurrent makes it plain PPO: tanh layers for LSTMs, minibatches of shuffled steps; try --frame-stack 4
    lstm_hidden_size: int = 64  # units of each LSTM layer
    lstm_layers: int = 1  # layers of each LSTM
    critic_lstm: Literal["separate", "shared", "none"] = "separate"  # the critic's memory: an LSTM, the actor's, which both train, or none
    norm_obs: bool = False  # normalise observations by their running mean and std, clipped to +-10; for scales far from 1
    norm_reward: bool = True  # divide rewards by the running std of the discounted return, clipped to +-10


def fail(message, code=2):
    """Print one line to stderr and exit: with code 2 for bad input, 1 for a run that went wrong."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def parsed_args(argv):
    """The checked arguments of a command line. A bad value ends the program with one line that names the flag."""
    for flag, following in itertools.pairwise([*argv, ""]):
        name, _, value = flag.removeprefix("--").removeprefix("no-").replace("_", "-").partition("=")
        given = (value or following).lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")
        if given and isinstance(getattr(Args, name.replace("-", "_"), None), bool):
            fail(f"--{name} takes no value: write --{name} or --no-{name}")
    args = tyro.cli(Args, args=argv)
    if args.resume or args.evaluate:
        saved = Args(**loaded(args.resume or args.evaluate, "checkpoint.pt", "model.pt")["args"])
        args = tyro.cli(Args, args=argv, default=replace(saved, resume=args.resume, evaluate=args.evaluate))
        free = "resume evaluate total_timesteps checkpoint_interval save_model eval_episodes capture_video cuda track"
        for name, value in vars(saved).items():
            if getattr(args, name) != value and name not in free.split():
                fail(f"--{name.replace('_', '-')} is {getattr(args, name)}, but the run has {value}: leave it out")
    for words, holds, names in [
        ("at least 1", lambda x: x >= 1, "num_envs num_steps num_minibatches update_epochs max_seq_len frame_stack"),
        ("at least 1", lambda x: x >= 1, "lstm_hidden_size lstm_layers"),
        ("0 to 4294967295", lambda x: 0 <= x < 2**32, "seed"),
        ("0 or more", lambda x: 0 <= x < math.inf, "eval_episodes checkpoint_interval learning_rate ent_coef vf_coef"),
        ("greater than 0", lambda x: x > 0, "clip_coef max_grad_norm target_kl"),
        ("between 0 and 1", lambda x: 0 <= x <= 1, "gamma gae_lambda"),
    ]:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not holds(value):
                fail(f"--{name.replace('_', '-')} is {value}: it must be {words}")
    batch_size, world_size = args.num_envs * args.num_steps, int(os.environ.get("WORLD_SIZE", 1))
    rollout = f"a rollout's --num-envs x --num-steps = {batch_size} steps"
    if args.total_timesteps < batch_size:
        fail(f"--total-timesteps is {args.total_timesteps}, less than {rollout}: raise it, or lower one of these")
    if args.num_minibatches > batch_size:
        fail(f"--num-minibatches is {args.num_minibatches}, more than {rollout}: lower it")
    if args.batching == "env-split" and args.num_envs % args.num_minibatches:
        fail(f"--batching env-split: --num-envs {args.num_envs} must be a multiple of --num-minibatches {args.num_minibatches}")
    if args.vec_env == "envpool" and (args.frame_stack > 1 or args.obs_keys):
        fail("--vec-env envpool has neither --frame-stack nor --obs-keys: take --vec-env sync or async")
    if args.capture_video and args.vec_env != "sync":
        fail(f"--capture-video can't see into --vec-env {args.vec_env}: take --vec-env sync")
    if args.num_envs % world_size:
        fail(f"--num-envs is {args.num_envs}, but torchrun started {world_size} processes: make it a multiple")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    if not args.recurrent:  # a sequence is a step, and `fixed-size` deals shuffled sequences
        args.batching, args.max_seq_len = "fixed-size", None
    return args


# ------------------------------------------------------------------------------------------------------ environments
# The RL Zoo's velocity-masked tasks, and what they multiply each entry of the observation by. Without "NoVel" an id is the task itself.
NO_VEL = {
    "PendulumNoVel-v1": [1, 1, 0],
    "CartPoleNoVel-v1": [1, 0, 1, 0],
    "MountainCarNoVel-v0": [1, 0],
    "MountainCarContinuousNoVel-v0": [1, 0],
    "LunarLanderNoVel-v3": [1, 1, 0, 0, 1, 0, 1, 1],
    "LunarLanderContinuousNoVel-v3": [1, 1, 0, 0, 1, 0, 1, 1],
}
for no_vel_id, mask in NO_VEL.items():
    how = {"func": functools.partial(np.multiply, np.array(mask, np.float32)), "observation_space": None}
    wrapper = gym.envs.registration.WrapperSpec("NoVel", "gymnasium.wrappers:TransformObservation", how)
    spec = gym.spec(no_vel_id.replace("NoVel", ""))
    same = {name: getattr(spec, name) for name in ("entry_point", "kwargs", "max_episode_steps", "reward_threshold")}
    if no_vel_id not in gym.registry:
        gym.register(no_vel_id, additional_wrappers=(wrapper,), **same)
FIRST_EVAL_SEED = 2**30  # training seeds lie below this number, evaluation seeds at and above it


def leaves(space, path=()):
    """The leaves of a space of nested Dicts and Tuples, and the keys that lead to each: {(key, ...): leaf}."""
    if not isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return {path: space}
    inner = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
    return {leaf_path: leaf for key, child in inner for leaf_path, leaf in leaves(child, (*path, key)).items()}


def choices(space):
    """Of the A entries of a discrete space: the smallest value of each (A,), and which of M choices it has (A, M), M being the
    most that any has. A Box has no choices but P = 2 numbers for each entry."""
    if isinstance(space, gym.spaces.Box):
        return np.zeros(math.prod(space.shape), int), np.ones((math.prod(space.shape), 2), bool)
    if isinstance(space, gym.spaces.MultiBinary):
        space = gym.spaces.MultiDiscrete(np.full(space.shape, 2))
    counts = np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
    return np.ravel(space.start), np.arange(counts.max()) < counts[:, None]


class AgentInputs(gym.vector.VectorWrapper):
    """Environments that observe all that the agent sees, as a tuple of arrays: each leaf of their own observation; the last action
    and the last reward where asked for, zero at an episode's start; and the mask of valid actions (N, A, P). They also keep each
    episode's return and length so far (N,), and whether it has ended."""

    def __init__(self, envs, args):
        super().__init__(envs)
        self.env_id, self.prev_action, self.prev_reward = args.env_id, args.prev_action, args.prev_reward
        self.paths, self.single_action_space = leaves(envs.single_observation_space), envs.single_action_space
        self.is_box = isinstance(self.single_action_space, gym.spaces.Box)
        self.call_masks = args.vec_env != "envpool" and all(envs.call("has_wrapper_attr", "action_masks"))  # sb3-contrib's convention
        self.start, self.exists = choices(self.single_action_space)
        spaces = list(self.paths.values())
        if args.prev_action:
            numbers = gym.spaces.Box(-np.inf, np.inf, self.start.shape, np.float32)
            spaces.append(numbers if self.is_box else gym.spaces.MultiBinary(int(self.exists.sum())))
        if args.prev_reward:
            spaces.append(gym.spaces.Box(-np.inf, np.inf, (1,), np.float32))
        self.single_observation_space = gym.spaces.Tuple([*spaces, gym.spaces.MultiBinary(self.exists.shape)])

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.done, (self.episode_return, self.episode_length) = np.ones(self.num_envs, bool), np.zeros((2, self.num_envs))
        inputs = self.inputs(self.leaves_of(obs), self.masks(info), np.zeros((self.num_envs, len(self.start))), np.zeros(self.num_envs))
        self.done = ~self.done
        return inputs, info

    def step(self, action):
        try:
            obs, reward, termination, truncation, info = self.env.step(action)
            info = self.masks(info)
        except Exception as error:  # Gymnasium's vector environments keep the failing one's number in `i` or `index`
            frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
            numbers = [x.get("index", x.get("i")) for x in frames if isinstance(x.get("self"), gym.vector.VectorEnv)]
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            fail(f"environment {numbers[-1]} failed: {type(error).__name__}: {error} ({file}:{line})", 1)
        reward = np.asarray(reward, np.float64)
        inputs = self.inputs(self.leaves_of(obs), info, action, reward)
        self.episode_return = np.where(self.done, 0, self.episode_return + reward)
        self.episode_length = np.where(self.done, 0, self.episode_length + 1)
        self.done = termination | truncation
        for what, x in [("reward", reward), *(("observation", leaf) for leaf in inputs if leaf.dtype.kind == "f")]:
            finite = np.isfinite(x).reshape(self.num_envs, -1).all(1) | termination  # nothing learns from a terminal observation
            if not finite.all():
                i = np.argmin(finite)
                fail(f"the {what} of environment {i} is {x[i]}: mend the environment, or clip its {what}s in a wrapper", 1)
        return inputs, reward, termination, truncation, info

    def masks(self, info):
        """`info` with the masks of valid actions, which the environments put there or have as `action_masks()`."""
        return info | ({"action_mask": self.env.call("action_masks"), "_action_mask": [True] * self.num_envs} if self.call_masks else {})

    def leaves_of(self, obs):
        """The arrays of an observation."""
        return [functools.reduce(operator.getitem, path, obs) for path in self.paths]

    def inputs(self, leaves, info, action, reward):
        """The tuple of what is seen behind a step; `self.done` (N,) still says which episodes had ended before it."""
        seen = [*leaves]
        if self.prev_action:
            action = np.reshape(action, (self.num_envs, -1))  # (N, A)
            if not self.is_box:
                action = ((action - self.start)[..., None] == np.arange(self.exists.shape[1]))[:, self.exists]  # one-hot
            seen.append(np.where(self.done[:, None], 0, action).astype(np.float32 if self.is_box else np.int8))
        if self.prev_reward:
            seen.append(np.where(self.done, 0, reward).astype(np.float32)[:, None])
        mask = np.repeat(self.exists[None], self.num_envs, 0)  # (N, A, P)
        for i in np.flatnonzero(info.get("_action_mask", ())):
            given = np.hstack([np.ravel(x) for x in info["action_mask"][i]]).astype(bool)  # one array, or one for each entry
            if len(given) != self.exists.sum():
                fail(f"--env-id {self.env_id}: its action_mask has {len(given)} entries, but its actions have {self.exists.sum()} choices")
            mask[i, self.exists] = given
        return (*seen, mask | self.exists & ~mask.any(-1, keepdims=True))  # none valid, as behind an episode's end: all are


def envpool_envs(args, seeds):
    """EnvPool's version of the environments, seeded here, since its `reset` takes no seeds."""
    if importlib.util.find_spec("envpool") is None:
        fail("--vec-env envpool needs EnvPool: pip install envpool")
    import envpool

    base_id, mask = args.env_id.replace("NoVel", ""), NO_VEL.get(args.env_id)
    if base_id not in envpool.list_all_envs():
        fail(f"--env-id {args.env_id}: EnvPool has no {base_id}: take --vec-env sync or async")
    warnings.filterwarnings("ignore", ".*precision lowered by casting")  # said each time EnvPool's spaces are read
    envs = envpool.make(base_id, env_type="gymnasium", num_envs=args.num_envs, seed=seeds or args.seed)
    reset = envs.reset
    envs.reset = lambda **_: reset()
    return gym.wrappers.vector.TransformObservation(envs, lambda obs: obs * np.float32(mask)) if mask else envs


def make_envs(args, seeds=None, video_dir=None):
    """`args.num_envs` environments side by side, seen as `AgentInputs` says, in next-step autoreset: the step after an episode's
    last one ignores its action, pays nothing and returns the next episode's first observation. An id that can't be made and a
    space that can't be handled end the program. The first environment's episodes are recorded into `video_dir`."""
    package = args.env_id.split("-")[0].lower()
    env_id = f"{package}:{args.env_id}" if package in ("popgym", "minigrid") else args.env_id  # these register their ids when imported
    wrappers = []
    if args.obs_keys:
        wrappers.append(functools.partial(gym.wrappers.FilterObservation, filter_keys=args.obs_keys))
    if video_dir:
        numbers = itertools.count()
        wrappers.append(lambda env: env if next(numbers) else gym.wrappers.RecordVideo(env, video_dir))
    if args.frame_stack > 1:
        wrappers.append(functools.partial(gym.wrappers.FrameStackObservation, stack_size=args.frame_stack))
    try:
        if args.vec_env == "envpool":
            envs = envpool_envs(args, seeds)
        else:
            warnings.simplefilter("ignore", DeprecationWarning)  # an outdated id that can't be made is said below
            render = {"render_mode": "rgb_array"} if video_dir else {}
            envs = gym.make_vec(env_id, args.num_envs, args.vec_env, wrappers=wrappers, disable_env_checker=True, **render)
    except (gym.error.Error, ImportError, ValueError, TypeError) as error:
        close = ", ".join(difflib.get_close_matches(env_id, [] if env_id in gym.registry else gym.registry))
        mend = f" Close matches: {close}." if close else f" Try: pip install {error.name}" if getattr(error, "name", "") else ""
        fail(f"--env-id {args.env_id!r}: {error}{mend}")
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP
    supported = gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary
    observed = leaves(envs.single_observation_space, ("observations",))
    for path, leaf in [*observed.items(), (("actions",), envs.single_action_space)]:
        if not isinstance(leaf, supported):
            what = f"{' '.join(map(str, path))} of type {type(leaf).__name__}"
            keys = " ".join(dict.fromkeys(str(other[1]) for other in observed if path[1:] and other[1] != path[1]))
            mend = f"try --obs-keys {keys}" if keys else "wrap the environment"
            fail(f"--env-id {args.env_id} has {what}, but only Box, Discrete, MultiDiscrete and MultiBinary are supported: {mend}")
    return AgentInputs(envs, args)


# ------------------------------------------------------------------------------------------------------------- agent
# The encoder is two functions of a leaf of the observation space. The action distribution is three functions of the action space and of
# `policy` (n, A, P): for each entry of an action the logits of its P choices, or for a Box mean and log std.
def prepared(space, obs):
    """A leaf's observations (n, *shape) as a network takes them: images (n, C, H, W), which are uint8 of shape (H, W), (H, W, C) or
    (C, H, W), or a stack of K such frames in front, and other bytes scaled to 0 ... 1; the discrete ones one-hot (n, F); others flat."""
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        start, exists = (torch.as_tensor(x, device=obs.device) for x in choices(space))
        one_hot = (obs.reshape(len(obs), -1) - start)[..., None] == torch.arange(exists.shape[1], device=obs.device)  # (n, entries, M)
        return one_hot[:, exists]
    if isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2:
        obs = obs.reshape(len(obs), *(1, 1, *space.shape)[-4:])  # (n, K, H, W, C) or (n, K, C, H, W): the colours are fewer
        obs = obs.movedim(-1, 2) if obs.shape[-1] < obs.shape[2] else obs
        return obs.flatten(1, 2) / 255  # (n, K * C, H, W)
    return obs.flatten(1) / 255 if space.dtype == np.uint8 and space.high.max() == 255 else obs.flatten(1)


def encoder(space):
    """The network from a leaf's `prepared` observations to features (n, F), and F: for images, 3 x 3 convolutions that halve the
    sides until they are 7 or less, then a linear layer; nothing for the others."""
    shape = prepared(space, torch.as_tensor(np.zeros((1, *space.shape), space.dtype))).shape[1:]
    if len(shape) == 1:
        return nn.Identity(), shape[0]
    layers, (channels, *sides) = [], shape
    while not layers or max(sides) > 7:
        layers += [layer_init(nn.Conv2d(channels, 32, 3, stride=2, padding=1), 2**0.5), nn.ReLU()]
        channels, sides = 32, [(side + 1) // 2 for side in sides]
    return nn.Sequential(*layers, nn.Flatten(), layer_init(nn.Linear(32 * math.prod(sides), 128), 2**0.5), nn.ReLU()), 128


def sampled_action(space, policy, deterministic=False):
    """An action (n, A) for each row of `policy` (n, A, P), the likeliest if `deterministic`; choices are counted from 0."""
    if not isinstance(space, gym.spaces.Box):
        gumbel = 0 if deterministic else -torch.empty_like(policy).exponential_().clamp_min(1e-30).log()
        return (policy + gumbel).argmax(-1)
    mean, logstd = policy.unbind(-1)
    return mean if deterministic else mean + logstd.exp() * torch.randn_like(mean)


def logprob_and_entropy(space, policy, action):
    """The log-probability of each action (n, A) and the entropy of each row's distribution, both (n,), summed over the entries. In
    closed form, since `torch.distributions` costs 150 us a call (measured), a third of an acting step."""
    if not isinstance(space, gym.spaces.Box):
        logprobs = policy.log_softmax(-1)
        return logprobs.gather(-1, action[..., None])[..., 0].sum(-1), -(logprobs.exp() * logprobs).sum((-2, -1))
    mean, logstd = policy.unbind(-1)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - 0.5 * math.log(2 * math.pi)
    return logprob.sum(-1), (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def env_action(space, action):
    """The sampled actions as numpy, as the environments take them. Of a bounded Box, -1 and 1 mean the bounds, so that the
    initial std of 1 explores a wide Box too; actions are clipped to the bounds here only."""
    action = action.cpu().numpy()
    if not isinstance(space, gym.spaces.Box):
        return (action + choices(space)[0]).reshape(-1, *space.shape).astype(space.dtype)
    bounded = (space.low > -1e30) & (space.high < 1e30)  # float32's largest number is a bound in name only
    low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
    action = ((high + low) / 2 + (high - low) / 2 * action.reshape(-1, *space.shape)).clip(space.low, space.high)
    return (np.rint(action) if space.dtype.kind in "iu" else action).astype(space.dtype)


def layer_init(layer, std):
    """`layer` with orthogonal weights scaled by `std` and zero biases."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(sizes, std):
    """Linear layers from each size to the next with tanh between them; the last one's weights have scale `std`."""
    hidden = [(layer_init(nn.Linear(*pair), 2**0.5), nn.Tanh()) for pair in itertools.pairwise(sizes[:-1])]
    return nn.Sequential(*itertools.chain(*hidden), layer_init(nn.Linear(*sizes[-2:]), std))


def lstm_init(lstm):
    """`lstm` with orthogonal weights, zero biases, but 1 for the forget gates: by far the largest single gain (Jozefowicz et al. 2015)."""
    for name, param in lstm.named_parameters():
        nn.init.orthogonal_(param) if "weight" in name else nn.init.zeros_(param)
        if "bias_ih" in name:  # (4H,): the input, forget, cell and output gates
            nn.init.ones_(param.data[lstm.hidden_size : 2 * lstm.hidden_size])
    return lstm


class Agent(nn.Module):
    """Encoders, LSTM(s), heads, and the running statistics by which observations and rewards are normalised. Observations are what
    `AgentInputs` gives, as tensors: the leaves (n, *shape) and the action mask (n, A, P). A state is one tensor (K, 2, layers, N, H): for
    each LSTM, h and c of each layer. `step` runs one time step (acting), `run_sequences` whole sequences (learning); from the same state
    they compute the same. K is 0 without recurrence: the features are the memory."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.action_space, self.norm_obs, self.critic_lstm = action_space, args.norm_obs, args.critic_lstm
        self.leaves = obs_space.spaces[:-1]
        self.floats = [space.dtype.kind == "f" for space in self.leaves]
        self.state_size = (
            ((2 if args.critic_lstm == "separate" else 1) if args.recurrent else 0),
            2,
            args.lstm_layers,
            args.lstm_hidden_size,
        )
        encoders, sizes = zip(*map(encoder, self.leaves), strict=True)
        self.encoders, feature_size = nn.ModuleList(encoders), sum(sizes)
        num_lstms, _, num_layers, hidden_size = self.state_size
        self.lstms = nn.ModuleList(lstm_init(nn.LSTM(feature_size, hidden_size, num_layers)) for _ in range(num_lstms))
        actor_sizes = [hidden_size, 64] if args.recurrent else [feature_size, hidden_size, 64]
        critic_sizes = [feature_size, 64] if args.recurrent and args.critic_lstm == "none" else actor_sizes
        action_size, num_choices = choices(action_space)[1].shape  # A, P
        continuous = isinstance(action_space, gym.spaces.Box)
        self.actor = mlp([*actor_sizes, action_size if continuous else action_size * num_choices], 0.1)
        self.critic = mlp([*critic_sizes, 1], 1.0)
        self.logstd = nn.Parameter(torch.zeros(1, action_size)) if continuous else None
        # count, mean and variance of the discounted return, and of every float entry of the observations (float64)
        self.register_buffer("return_stats", torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
        self.register_buffer("obs_stats", self.return_stats[:, None].repeat(1, np.dot(sizes, self.floats)))

    def initial_state(self, num_envs):
        """The state at the start of an episode: zeros (K, 2, layers, N, H)."""
        return next(self.parameters()).new_zeros(*self.state_size[:-1], num_envs, self.state_size[-1])

    def float_obs(self, obs):
        """The float leaves of observations, flat and side by side: (n, D)."""
        leaves = [leaf.flatten(1) for leaf, is_float in zip(obs, self.floats, strict=False) if is_float]
        return torch.cat(leaves, -1) if leaves else obs[0].new_zeros(len(obs[0]), 0)

    def features(self, obs):
        """Observations, normalised and encoded: (n, F), the float leaves first."""
        x, dtype = self.float_obs(obs), next(self.parameters()).dtype
        if self.norm_obs:
            _, mean, var = self.obs_stats
            x = ((x - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
        encoded = [x.to(dtype)]
        for space, net, leaf, is_float in zip(self.leaves, self.encoders, obs, self.floats, strict=False):  # obs has the mask behind them
            encoded += [] if is_float else [net(prepared(space, leaf).to(dtype))]
        return torch.cat(encoded, -1)

    def heads(self, features, memories, mask):
        """Policy outputs (n, A, P), of probability 0 where `mask` is False, and values (n,), from features (n, F) and K memories (n, H)."""
        memories = memories or [features]
        policy = self.actor(memories[0])
        if self.logstd is not None:
            policy = torch.stack([policy, self.logstd.expand_as(policy)], -1)
        else:
            policy = policy.view(mask.shape).masked_fill(~mask, -1e9)
        return policy, self.critic(features if self.critic_lstm == "none" else memories[-1])[:, 0]

    def step(self, obs, state):
        """One time step of N environments: observations, as arrays too, state (K, 2, layers, N, H) -> policy (N, A, P), value (N,), next
        state. `torch.lstm_cell` on the LSTM's own weights takes half the time of `nn.LSTM` on one step (measured)."""
        obs = [torch.as_tensor(leaf, device=state.device) for leaf in obs]
        features = self.features(obs)
        memories, next_state = [], torch.empty_like(state)
        for k, lstm in enumerate(self.lstms):
            x = features
            for layer, weights in enumerate(lstm.all_weights):
                x, c = torch.lstm_cell(x, (state[k, 0, layer], state[k, 1, layer]), *weights)
                next_state[k, 0, layer], next_state[k, 1, layer] = x, c
            memories.append(x)
        return *self.heads(features, memories, obs[-1]), next_state

    @torch.no_grad()
    def act(self, obs, state, episode_start, deterministic=False, reward=0.0, info=None):
        """An action for one environment, and the state to hand back with its next observation (for agents of `load_agent`). obs and the
        action are the environment's own. `state` is what the call before returned, None at first. `episode_start` says whether obs is an
        episode's first: the memory starts empty then. `reward` is the last one, for agents with --prev-reward; `info` may hold an action
        mask. Raises ValueError if an episode goes on and its state is missing."""
        if state is None and not episode_start:
            raise ValueError("an episode goes on, so `state` must be what the last call of `act` returned")
        memory, last_action = (self.initial_state(1), np.zeros(self.envs.start.shape)) if episode_start else state
        leaves = [np.asarray(leaf)[None] for leaf in self.envs.leaves_of(obs)]
        masks = {"action_mask": [info["action_mask"]], "_action_mask": [True]} if info and "action_mask" in info else {}
        self.envs.done = np.array([episode_start])
        policy, _, memory = self.step(self.envs.inputs(leaves, masks, last_action[None], np.array([reward])), memory)
        action = env_action(self.action_space, sampled_action(self.action_space, policy, deterministic))[0]
        return action, (memory, action)

    def run_sequences(self, obs, state, lengths, packed=None, pad=0.0):
        """Whole sequences at once: policy (n, A, P), value (n,) for each of their steps, and, if `packed`, the state after each sequence.
        obs holds the n steps of S sequences, time-major: step 0 of each, then step 1 of each, ...; `lengths` (S,) descends, so a step's
        sequences are always the first ones and this order is PackedSequence's own. state (K, 2, layers, S, H) is the one before each
        sequence. Only real steps enter the encoder, leave the LSTMs and reach the heads; what the padding holds (`pad`) changes nothing.
        CUDA packs (one cuDNN call) and the CPU pads, since its packed loop is 2-7 x slower on mixed lengths (measured)."""
        features = self.features(obs)  # (n, F)
        packed = features.is_cuda if packed is None else packed
        steps = torch.arange(int(lengths[0]))[:, None] < torch.as_tensor(lengths)  # (L, S), True where a sequence has a step
        if packed:
            x = nn.utils.rnn.PackedSequence(features, steps.sum(1))
        else:
            index = steps.flatten().nonzero()[:, 0].to(features.device)  # (n,), the real steps among the L * S
            x = (
                features.new_full((steps.numel(), features.shape[1]), pad).index_copy(0, index, features).view(*steps.shape, -1)
            )  # (L, S, F)
        memories, next_state = [], torch.empty_like(state) if packed else None
        for k, (lstm, (h, c)) in enumerate(zip(self.lstms, state, strict=True)):  # h, c: (layers, S, H)
            memory, last = lstm(x, (h, c))
            memories.append(memory.data if packed else memory.flatten(0, 1).index_select(0, index))  # (n, H)
            if packed:
                next_state[k] = torch.stack(last).detach()
        return *self.heads(features, memories, obs[-1]), next_state


# ------------------------------------------------------------------------- several processes, and running statistics
def summed(x, op=dist.ReduceOp.SUM):
    """A tensor summed over all processes (or its least value with MIN), in place; itself if there is but one."""
    if dist.is_initialized():
        dist.all_reduce(x, op)
    return x


def update_statistics(stats, batch):
    """Merge the rows of `batch` (n, *shape), of all processes, into the running count, mean and variance (3, *shape) (Chan et al. 1979)."""
    count, mean, var = stats.clone()
    n, batch = summed(torch.tensor(len(batch), device=stats.device)), batch.double()
    if n and stats.numel():
        batch_mean = summed(batch.sum(0)) / n
        batch_var = summed(((batch - batch_mean) ** 2).sum(0)) / n
        delta, total = batch_mean - mean, count + n
        stats[0], stats[1] = total, mean + delta * n / total
        stats[2] = (var * count + batch_var * n + delta**2 * count * n / total) / total


# ----------------------------------------------------------------------------------------------------------- rollout
class Rollout(NamedTuple):
    """What is kept between acting and learning. No LSTM state but `initial_state` is in it. Slot t of an environment is not valid if an
    episode ended at t-1: it holds that episode's final observation, its action is ignored, and the next episode starts at t+1 with a
    zero state. Its value is what a truncation at t-1 bootstraps from."""

    obs: tuple  # of each leaf (T + 1, N, *shape) in the environment's dtype, the action mask (T + 1, N, A, P) last
    actions: torch.Tensor  # (T, N, A)
    logprobs: torch.Tensor  # (T, N)
    values: torch.Tensor  # (T + 1, N); the last row here and in obs is for the observation after the rollout
    rewards: np.ndarray  # (T, N), as paid by the environment
    terminations: np.ndarray  # (T, N), the episode ended here
    truncations: np.ndarray  # (T, N), the episode was cut here by a time limit
    valid: np.ndarray  # (T, N)
    initial_state: torch.Tensor  # (K, 2, layers, N, H), before slot 0


@torch.no_grad()
def collect(envs, agent, carry, num_steps):
    """Act for `num_steps`. `carry` is what acting hands from one rollout to the next: the observations, of each leaf (N, *shape) and the
    action mask (N, A, P) last, and the state before them, zero at an episode's start; `envs.done` (N,) says which are final ones.
    Returns the rollout, the carry after it, and the ended episodes as (slot, return, length)."""
    action_space, (next_obs, next_state) = envs.single_action_space, carry
    rows, episodes = [], []
    for t in range(num_steps):
        obs, next_done = next_obs, envs.done
        policy, value, next_state = agent.step(obs, next_state)
        if next_done.any():  # this slot's observation is a final one, so the next slot starts an episode
            next_state[..., torch.as_tensor(next_done), :] = 0
        action = sampled_action(action_space, policy)
        next_obs, reward, termination, truncation, _ = envs.step(env_action(action_space, action))
        rows.append((obs, action, policy, value, reward, termination, truncation, ~next_done))
        episodes += [(t, envs.episode_return[i], envs.episode_length[i]) for i in np.flatnonzero(envs.done)]
    _, last_value, _ = agent.step(next_obs, next_state)
    obs, actions, policies, values, *flags = zip(*rows, strict=True)
    logprobs, _ = logprob_and_entropy(action_space, torch.cat(policies), torch.cat(actions))  # (T * N,), one call for all steps
    obs = tuple(torch.as_tensor(np.stack(leaf), device=next_state.device) for leaf in zip(*obs, next_obs, strict=True))
    tensors = obs, torch.stack(actions), logprobs.view(num_steps, -1), torch.stack([*values, last_value])
    rollout = Rollout(*tensors, *map(np.stack, flags), initial_state=carry[1])
    return rollout, (next_obs, next_state), episodes


def with_scaled_rewards(agent, rollout, discounted_return, gamma):
    """The rollout with rewards divided by the running std of the discounted return and clipped to +-10, and the discounted return (N,) of
    each running episode, at first that of the rollout before; the slot behind an episode's end, which is not valid, clears it, after a
    truncation too. The statistics are updated first: they do not touch the policy."""
    returns = np.zeros_like(rollout.rewards)
    for t in range(len(returns)):
        returns[t] = discounted_return = (discounted_return * gamma + rollout.rewards[t]) * rollout.valid[t]
    update_statistics(agent.return_stats, torch.as_tensor(returns[rollout.valid]).to(agent.return_stats.device))
    scaled = np.clip(rollout.rewards / (agent.return_stats[2].item() + 1e-8) ** 0.5, -10, 10)
    return rollout._replace(rewards=scaled), discounted_return


def gae(rewards, values, terminations, truncations, gamma, gae_lambda):
    """Advantages (T, N) by generalised advantage estimation (Schulman et al. 2016), from rewards and flags (T, N) and values (T + 1, N).
    The value in the slot after an episode's last step is the final observation's, under the state carried to it: a truncation bootstraps
    from it, a termination does not, and neither passes advantage back from the next episode. Slots that are not valid mean nothing."""
    deltas = rewards + gamma * np.where(terminations, 0.0, values[1:]) - values[:-1]
    advantages, advantage = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):  # where, not 0 x: a final observation's value may be NaN
        advantages[t] = advantage = deltas[t] + gamma * gae_lambda * np.where(terminations[t] | truncations[t], 0.0, advantage)
    return advantages


# --------------------------------------------------------------------------------------------------------- sequences
class Sequences(NamedTuple):
    """A table of sequences, or of pieces of them: row i is slots start[i] ... start[i] + length[i] - 1 of environment env[i]."""

    env: np.ndarray  # (S,)
    start: np.ndarray  # (S,)
    length: np.ndarray  # (S,)
    piece: np.ndarray  # (S,), 0 for a whole sequence or its first piece; row i continues row i - 1 if piece[i] > 0


def whole_sequences(valid, recurrent=True):
    """The whole sequences of a rollout: the longest runs of valid slots (T, N) of each environment, or each valid slot without recurrence.
    A sequence starts at slot 0 or at an episode's start and ends at the last slot or with its episode: no state is reset inside one."""
    if not recurrent:
        start, env = np.nonzero(valid)
        return Sequences(env, start, np.ones_like(env), np.zeros_like(env))
    edges = np.diff(np.pad(valid.T.astype(np.int8), ((0, 0), (1, 1))))  # (N, T + 1), 1 where a run starts, -1 behind its end
    (env, start), (_, end) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return Sequences(env, start, end - start, np.zeros_like(env))


def balanced_groups(lengths, num_groups, rng, draws=8):
    """`num_groups` random groups of sequences, as a group number per sequence, whose step counts are nearly equal. Each draw deals the
    sequences, the longer ones earlier but with noise in that order, each to the group with the fewest steps. Of the draws, the most
    even one wins (to a hundredth of a minibatch), then the one with the least padding."""
    candidates = []
    for _ in range(draws):
        group = np.zeros(len(lengths), int)
        steps, rows, longest = [(0, g) for g in range(num_groups)], [0] * num_groups, [0] * num_groups
        for i in np.argsort(-lengths * rng.uniform(0.7, 1.0, len(lengths))):
            count, g = steps[0]
            heapq.heapreplace(steps, (count + lengths[i], g))
            group[i], rows[g], longest[g] = g, rows[g] + 1, max(longest[g], lengths[i])
        uneven = (max(steps)[0] - steps[0][0]) * num_groups / lengths.sum()
        candidates.append((round(uneven * 100), np.dot(rows, longest), group))
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def drawn_minibatches(sequences, batching, num_minibatches, max_seq_len, rng):
    """One epoch's minibatches, drawn at random: the table of (pieces of) sequences, and a list of arrays of its rows.
    Every valid step is in exactly one minibatch; none is empty. There may be fewer than `num_minibatches`: as many as there are
    rows (whole-seq), steps (fixed-size), or groups of environments with a valid step (env-split)."""
    order = rng.permutation(len(sequences.env))
    env, start, length, _ = (column[order] for column in sequences)
    offsets, total = np.cumsum(length) - length, length.sum()  # (S,), where each sequence begins when all are laid end to end
    num_minibatches = min(num_minibatches, total)
    edges = np.arange(num_minibatches if batching == "fixed-size" else 0) * total // num_minibatches  # counts differ by at most one step
    begins = [np.arange(offset, offset + n, max_seq_len or n) for offset, n in zip(offsets, length, strict=True)]
    begin = np.union1d(np.concatenate(begins), edges)  # where each piece begins
    row = np.searchsorted(offsets, begin, side="right") - 1  # the sequence that it belongs to
    piece = np.arange(len(begin)) - np.searchsorted(row, row)
    pieces = Sequences(env[row], start[row] + begin - offsets[row], np.diff(begin, append=total), piece)
    if batching == "whole-seq":
        group = balanced_groups(pieces.length, min(num_minibatches, len(begin)), rng)
    elif batching == "fixed-size":
        group = np.searchsorted(edges, begin, side="right") - 1
    else:
        group = rng.permutation(env.max() + 1)[pieces.env] % num_minibatches
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
    """The LSTM state before each piece (K, 2, layers, S, H): the rollout's initial state at slot 0, zero at an episode's start; behind
    a cut, what the current weights make of the piece before, without gradient: all first pieces at once, then all second ones, ..."""
    state = agent.initial_state(len(pieces.env))
    begins = np.flatnonzero(pieces.start == 0)
    state[..., begins, :] = initial_state[..., pieces.env[begins], :]
    for k in range(1, pieces.piece.max() + 1):
        before, lengths, index = time_major(pieces, np.flatnonzero(pieces.piece == k) - 1, initial_state.shape[-2])
        _, _, state[..., before + 1, :] = agent.run_sequences([leaf[index] for leaf in b_obs], state[..., before, :], lengths, packed=True)
    return state


@torch.no_grad()
def current_values(agent, b_obs, rollout):
    """What the current weights make of the values (T + 1, N) wherever `gae` looks: at each step of the whole sequences, and in the
    slot behind each, which holds the observation that its last step led to."""
    sequences, values = whole_sequences(rollout.valid), torch.zeros_like(rollout.values)
    state = states_before(agent, b_obs, rollout.initial_state, sequences)
    longer = sequences._replace(length=sequences.length + 1)
    rows, lengths, index = time_major(longer, np.arange(len(longer.env)), rollout.valid.shape[1])
    _, values.view(-1)[index], _ = agent.run_sequences([leaf[index] for leaf in b_obs], state[..., rows, :], lengths)
    return values


# ------------------------------------------------------------------------------------------------------------ update
def normalised(advantages):
    """`advantages` (n,) with mean 0 and std 1 over those of all processes; a single one becomes 0."""
    total, n = summed(torch.stack([advantages.sum(), advantages.new_tensor(len(advantages))]))
    centred = advantages - total / n
    return centred / ((summed((centred**2).sum()) / n).sqrt() + 1e-8)


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
    logratio, ratio = logratio.detach(), ratio.detach()
    old_approx_kl, approx_kl, clipped = (-logratio).sum(), (ratio - 1 - logratio).sum(), ((ratio - 1).abs() > args.clip_coef).sum()
    return pg_loss, 0.5 * v_loss.sum(), entropy.sum(), old_approx_kl, approx_kl, clipped


def update(agent, optimizer, rollout, advantages, args, rng):
    """All epochs over one rollout, whose rewards are scaled already. Returns the metrics to log; losses are means over all steps
    learnt from. With --recompute-adv, `advantages` (T, N) are those of the first epoch (Andrychowicz et al. 2021, section 3.5)."""
    N, device = rollout.valid.shape[1], rollout.values.device
    b_obs, b_actions, b_logprobs = tuple(x.flatten(0, 1) for x in rollout.obs), rollout.actions.flatten(0, 1), rollout.logprobs.flatten()
    b_values = rollout.values[:-1].flatten()
    b_valid = torch.as_tensor(rollout.valid.flatten(), device=device)
    num_valid, least_valid = summed(b_valid.sum()).item(), summed(b_valid.sum(), dist.ReduceOp.MIN).item()
    if least_valid == 0:  # in this process or another; possible with one step a rollout
        return {"charts/valid_steps": 0}
    sequences = whole_sequences(rollout.valid, args.recurrent)

    def relearnt(rows):  # what the current weights make of some rows of the table; the indices of their steps first
        rows, lengths, mb_inds = time_major(pieces, rows, N)
        policy, newvalue, _ = agent.run_sequences([leaf[mb_inds] for leaf in b_obs], state[..., rows, :], lengths)
        newlogprob, entropy = logprob_and_entropy(agent.action_space, policy, b_actions[mb_inds])
        return mb_inds, newlogprob, entropy, newvalue

    sums, mb_sizes, padded_sizes, values = torch.zeros(6, device=device), [], [], rollout.values
    for epoch in range(args.update_epochs):
        if epoch and args.recompute_adv:
            values = current_values(agent, b_obs, rollout)
            advantages = gae(rollout.rewards, values.cpu().numpy(), rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda)
        b_advantages = torch.as_tensor(advantages.flatten(), dtype=values.dtype, device=device)
        b_returns = b_advantages + values[:-1].flatten()
        if epoch == 0:
            returns_var = b_returns[b_valid].var(correction=0).item()
            explained = 1 - b_advantages[b_valid].var(correction=0).item() / returns_var if returns_var > 0 else 0.0
        if args.norm_adv and args.norm_adv_scope == "rollout":
            b_advantages[b_valid] = normalised(b_advantages[b_valid])
        pieces, minibatches = drawn_minibatches(sequences, args.batching, args.num_minibatches, args.max_seq_len, rng)
        M = summed(torch.tensor(len(minibatches), device=device), dist.ReduceOp.MIN).item()  # as many in every process
        minibatches = [*minibatches[: M - 1], np.concatenate(minibatches[M - 1 :])]
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
            size = num_valid / M if args.loss_norm == "nominal" else summed(torch.tensor(len(mb_inds), device=device))
            loss = (pg_loss - args.ent_coef * entropy_sum + args.vf_coef * v_loss) / size
            optimizer.zero_grad()
            loss.backward()
            if dist.is_initialized():  # each process divided by the size of all
                gradients = [param.grad for param in agent.parameters()]
                nn.utils.vector_to_parameters(summed(nn.utils.parameters_to_vector(gradients)), gradients)
            if not nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm).isfinite():
                bad = [name for name, x in zip(("policy loss", "value loss", "entropy"), losses, strict=False) if not x.isfinite()]
                what = f"the {bad[0] if bad else 'gradient'} in epoch {epoch} is not finite"
                fail(f"{what}: the weights are as they were before; lower --learning-rate or --max-grad-norm", 1)
            optimizer.step()
            sums += torch.stack([x.detach().to(sums.dtype) for x in losses])
            epoch_kl += approx_kl.detach()
            mb_sizes.append(len(mb_inds))
            padded_sizes.append(len(rows) * pieces.length[rows].max())
        if args.target_kl is not None and summed(epoch_kl) / num_valid > args.target_kl:
            break
    padding = 0.0 if device.type == "cuda" else 1 - sum(mb_sizes) / sum(padded_sizes)
    sums, mb_sizes = summed(sums), summed(torch.tensor(mb_sizes, device=device)).tolist()
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    metrics = {f"losses/{name}": value / sum(mb_sizes) for name, value in zip(names, sums.tolist(), strict=True)}
    metrics |= {"losses/explained_variance": explained, "debug/ratio_error": ratio_error, "charts/padding_fraction": padding}
    metrics |= {"charts/minibatch_steps_min": min(mb_sizes), "charts/minibatch_steps_max": max(mb_sizes)}
    return metrics | {"charts/valid_steps": num_valid, "charts/minibatches": len(minibatches)}


# -------------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(agent, args, deterministic=True, video_dir=None):
    """Undiscounted returns (--eval-episodes,) of whole episodes, of the seeds FIRST_EVAL_SEED, FIRST_EVAL_SEED + 1, ... The state is
    carried through an episode and is zero at its start."""
    episodes, returns = args.eval_episodes, np.zeros(args.eval_episodes)
    num_envs = min(args.num_envs, episodes) if args.vec_env != "envpool" else episodes  # its seeds are given but once
    envs = make_envs(replace(args, num_envs=num_envs), [FIRST_EVAL_SEED + i for i in range(num_envs)], video_dir)
    for first in range(0, episodes, envs.num_envs):
        numbers = first + np.arange(envs.num_envs)  # in the last round, numbers beyond `episodes` are run and not counted
        obs, _ = envs.reset(seed=[FIRST_EVAL_SEED + int(i) for i in numbers])
        state, running = agent.initial_state(envs.num_envs), numbers < episodes
        while running.any():
            policy, _, state = agent.step(obs, state)
            action = sampled_action(envs.single_action_space, policy, deterministic)
            obs, reward, *_ = envs.step(env_action(envs.single_action_space, action))
            returns[numbers[running]] += reward[running]
            running &= ~envs.done
    envs.close()
    return returns


# ------------------------------------------------------------------------------------------------------- checkpoints
def write_state(path, state):
    """Write a checkpoint so that at every moment `path` is the old file or the whole new one."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def loaded(run_dir, *names):
    """The newest of a run's files of these names. `weights_only`: a hostile file runs no code."""
    paths = [path for name in names if os.path.exists(path := os.path.join(run_dir, name))]
    if not paths:
        fail(f"{run_dir} holds no {' or '.join(names)}: give the folder of a run, runs/NAME")
    path = max(paths, key=os.path.getmtime)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fail(f"{path} is not a checkpoint of this script: {str(error).splitlines()[0]}")


def load_agent(run_dir):
    """The agent of a run, on the CPU, to `act` in one environment of the same spaces or to `evaluate`."""
    state = loaded(run_dir, "model.pt", "checkpoint.pt")
    args = replace(Args(**state["args"]), num_envs=1)
    envs = make_envs(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    agent.load_state_dict(state["agent"])
    agent.envs = envs
    return agent


def stop(signum, _):
    """End the program on SIGINT or SIGTERM: `train` keeps the state of the last iteration on the way out. A second signal kills."""
    signal.signal(signum, signal.SIG_DFL)
    if multiprocessing.parent_process() is None:  # not in a worker of --vec-env async, which the main process closes
        sys.exit(128 + signum)
    elif signum == signal.SIGTERM:
        os._exit(128 + signum)


# -------------------------------------------------------------------------------------------------------------- main
def train(args):
    """Train an agent and evaluate it: the agent, the returns of the evaluation, and the run's folder. Under torchrun each process
    steps its share of the environments, and the first one logs, writes and evaluates."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() and args.cuda else torch.device("cpu")
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    state = loaded(args.resume, "checkpoint.pt") if args.resume else {"iteration": 0, "wandb": None}
    first_iteration, wandb_id = state["iteration"], state["wandb"]
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)  # the same weights in every process
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng([args.seed, rank, first_iteration])

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_").replace(":", "_")
    run_dir = os.path.normpath(args.resume) if args.resume else f"runs/{run_name}"
    share, video_dir = replace(args, num_envs=args.num_envs // world_size), f"{run_dir}/videos" if args.capture_video and not rank else None
    seeds = np.random.SeedSequence([args.seed, first_iteration]).generate_state(args.num_envs) % FIRST_EVAL_SEED  # others on --resume
    seeds = seeds[rank * share.num_envs :][: share.num_envs].tolist()
    envs = make_envs(share, seeds, video_dir)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    if args.resume:
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        rng.bit_generator.state = state["numpy_rng"] if rank == 0 else rng.bit_generator.state
        torch.set_rng_state(state["torch_rng"])
    if rank:
        torch.manual_seed(int(rng.integers(2**31)))  # other actions in every process
    carry = envs.reset(seed=seeds)[0], agent.initial_state(share.num_envs)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    last_returns, discounted_return, warned, writer, eval_returns = [], np.zeros(share.num_envs), False, None, np.zeros(0)
    first_step, last_step = first_iteration * batch_size, num_iterations * batch_size
    bar = tqdm(total=last_step, initial=first_step, unit=" steps", disable=rank or not sys.stderr.isatty())

    def boundary(iteration):  # all that a run needs to go on behind `iteration` iterations: plain types and tensors only
        plain = {"iteration": iteration, "args": vars(replace(args, resume=None)), "wandb": wandb_id}
        rngs = {"torch_rng": torch.get_rng_state(), "numpy_rng": rng.bit_generator.state}
        return copy.deepcopy({**plain, **rngs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()})

    last_state = boundary(first_iteration)
    try:
        if rank == 0:
            os.makedirs(run_dir, exist_ok=True)
            if args.track:
                import wandb

                where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": os.path.basename(run_dir)}
                wandb_id = wandb.init(**where, id=wandb_id, resume="allow", config=vars(args), sync_tensorboard=True, save_code=True).id
            writer = SummaryWriter(run_dir, purge_step=first_step + 1 if args.resume else None)
            table = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
            writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", first_step)
        start_time = last_print = time.time()
        for iteration in range(first_iteration, num_iterations):
            if rank == 0 and args.checkpoint_interval and iteration % args.checkpoint_interval == 0:
                write_state(f"{run_dir}/checkpoint.pt", last_state)
            global_step = iteration * batch_size
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = (1 - iteration / num_iterations) * args.learning_rate
            collect_start = time.time()
            rollout, carry, episodes = collect(envs, agent, carry, args.num_steps)
            update_start = time.time()
            if args.norm_reward:
                rollout, discounted_return = with_scaled_rewards(agent, rollout, discounted_return, args.gamma)
            values = rollout.values.cpu().numpy()
            advantages = gae(rollout.rewards, values, rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda)
            metrics = update(agent, optimizer, rollout, advantages, args, rng)
            if args.norm_obs:  # between iterations only: inside one, the policy that learns must be the policy that acted
                update_statistics(agent.obs_stats, agent.float_obs([x[:-1][torch.as_tensor(rollout.valid)] for x in rollout.obs]))
            update_end = time.time()
            last_state = boundary(iteration + 1)
            if rank:
                continue
            for t, episodic_return, episodic_length in episodes:
                writer.add_scalar("charts/episodic_return", episodic_return, global_step + (t + 1) * args.num_envs)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step + (t + 1) * args.num_envs)
                last_returns = [*last_returns, episodic_return][-100:]
            global_step += batch_size
            sps = int((global_step - first_step) / (update_end - start_time))
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
                left = (last_step - global_step) / max(sps, 1)
                print(f"step {global_step}/{last_step}, return {mean_return} (last 100), {sps} steps/s, {left:.0f} s left", flush=True)
                last_print = update_end
        envs.close()
        if rank == 0:
            write_state(f"{run_dir}/checkpoint.pt", last_state)
            if args.save_model:
                write_state(f"{run_dir}/model.pt", {key: last_state[key] for key in ("args", "agent")})
            if args.eval_episodes:
                eval_returns = evaluate(agent, args)
                writer.add_scalar("charts/eval_return", eval_returns.mean(), last_step)
    except SystemExit as stopped:  # a signal, numbers that are not finite, an environment that failed
        if rank == 0:
            write_state(f"{run_dir}/checkpoint.pt", last_state)
            print(f"stopped behind iteration {last_state['iteration']}; go on with --resume {run_dir}", file=sys.stderr)
        raise stopped
    except OSError as error:
        fail(f"the folder of the run can't be written, {error}: make room or give rights, then --resume {run_dir}", 1)
    finally:
        bar.close()
        envs.close(**({"terminate": True} if args.vec_env == "async" else {}))
        if writer:
            writer.close()
        if args.track and not rank:
            wandb.finish()
        if world_size > 1:
            dist.destroy_process_group()
    return agent, eval_returns, run_dir


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    args = parsed_args(sys.argv[1:])
    if args.evaluate:
        agent = load_agent(args.evaluate)
        for how in ("deterministic", "stochastic"):
            video_dir = f"{args.evaluate}/videos/{how}" if args.capture_video else None
            returns = evaluate(agent, args, how == "deterministic", video_dir)
            print(f"{how}: eval_return={returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes", flush=True)
    else:
        _, returns, run_dir = train(args)
        result = f"eval_return={returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes, " if len(returns) else ""
        print(f"{result}run: {run_dir}")
