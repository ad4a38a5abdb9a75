# Recurrent PPO on whole sequences in JAX, in one file: the same algorithm and the same flags as ppo_lstm_seq.py.
#
#     python ppo_lstm_seq_jax.py --env-id PendulumNoVel-v1
#
# Where gymnax has the environment, one jitted function steps it, acts, computes advantages and runs all epochs on the device;
# other environments are stepped on the host by Gymnasium or EnvPool. A lane of the rollout, one environment's steps, is whole
# sequences laid end to end: the LSTM sets its state to zero where an episode starts, inside the recurrence, so shapes never change
# and nothing is padded. PureJaxRL's ppo_rnn.py (https://github.com/luchris429/purejaxrl) was the first to train so.
#
# Letters in the shape comments: T steps of a rollout, N environments, c pieces of a lane, R rows (pieces of all lanes), L length of
# the longest of them, B rows of a minibatch, D observation size, F features, A entries of an action, P policy outputs for each, H
# hidden size, K LSTMs (2 if the critic has its own).
#
# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.6", "flax", "optax", "numpy", "gymnasium>=1.1", "gymnax>=1.0", "six", "tyro", "tensorboardX", "tqdm", "wandb"]
# ///
import difflib
import functools
import importlib.util
import itertools
import json
import math
import operator
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization
from gymnasium.envs.registration import WrapperSpec
from gymnasium.vector import AutoresetMode
from jax.nn.initializers import orthogonal, zeros
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tensorboardX import SummaryWriter
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------------- arguments
@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # the name of this experiment, a part of the run's name
    seed: int = 1  # seed of the environments, the weights and every random choice
    num_seeds: int = 1  # train with this seed and the following ones side by side on the device, each as a run of its own (--vec-env jax)
    torch_deterministic: bool = True  # no meaning here: the same seed gives the same bits on one machine's CPU; the other script has it
    cuda: bool = True  # use a GPU if there is one
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "ppo-lstm-seq"  # the Weights & Biases project
    wandb_entity: str | None = None  # the Weights & Biases team or user
    capture_video: bool = False  # record the first environment, and --evaluate's, in runs/NAME/videos (with --vec-env sync)
    resume: str | None = None  # go on with a run, given by its folder runs/NAME; its arguments hold, and --total-timesteps may be raised
    evaluate: str | None = None  # train nothing: evaluate the agent of a run, given by its folder runs/NAME
    checkpoint_interval: int = 10  # iterations between checkpoints, from which --resume goes on (0: only when the run ends or is stopped)
    save_model: bool = True  # write the trained agent to runs/NAME/model.msgpack
    eval_episodes: int = 100  # episodes of the deterministic evaluation at the end, on seeds new to it (0: none, for tasks that never end)

    # Algorithm specific arguments
    env_id: str = "PendulumNoVel-v1"  # any Gymnasium id; module:Id-v0 imports the module first
    vec_env: Literal["auto", "jax", "sync", "async", "envpool"] = "auto"
    """where the environments run: on the device (what gymnax has), in this process, in one process each (for slow ones), in EnvPool's
    threads (what it has); auto takes the device where it can, else this process"""
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
    """a minibatch: the lanes, whole sequences end to end, of environments drawn anew each epoch (at least one each); pieces of lanes of
    equal length; the lanes of the same environments each epoch"""
    num_minibatches: int = 8  # minibatches, and so gradient steps, per epoch
    max_seq_len: int | None = None  # cut longer sequences to so many steps (truncated BPTT; the states are rebuilt); slow if small
    update_epochs: int = 10  # passes over each rollout
    recompute_adv: bool = True  # compute advantages and returns anew before each epoch, from the values that the weights of then give
    norm_adv: bool = True  # normalise advantages to mean 0, std 1
    norm_adv_scope: Literal["rollout", "minibatch"] = "minibatch"  # the set of valid steps over which advantages are normalised
    loss_norm: Literal["nominal", "minibatch"] = "nominal"
    """divide a minibatch's summed loss by the nominal minibatch size, so that every step weighs the same, or by its own"""
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


# Of a run's arguments, those that may change when it goes on or is evaluated.
FREE = {"resume", "evaluate", "total_timesteps", "checkpoint_interval", "save_model", "eval_episodes", "capture_video", "cuda", "track"}


def fail(message, code=2):
    """Print one line to stderr and exit: with code 2 for bad input, 1 for a run that went wrong."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def parsed_args(argv=None):
    """The checked arguments of a command line. A bad value ends the program with one line that names the flag."""
    argv = sys.argv[1:] if argv is None else argv
    for flag, following in pairwise([*argv, ""]):
        name, _, value = flag.removeprefix("--").removeprefix("no-").replace("_", "-").partition("=")
        given = (value or following).lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")
        if given and isinstance(getattr(Args, name.replace("-", "_"), None), bool):
            fail(f"--{name} takes no value: write --{name} or --no-{name}")
    args = tyro.cli(Args, args=argv)
    if args.resume or args.evaluate:
        state = loaded(args.resume, CHECKPOINT) if args.resume else loaded(args.evaluate, CHECKPOINT, MODEL)
        saved = saved_args(state)
        args = tyro.cli(Args, args=argv, default=replace(saved, resume=args.resume, evaluate=args.evaluate))
        for name in vars(saved):
            if getattr(args, name) != getattr(saved, name) and name not in FREE:
                fail(f"--{name.replace('_', '-')} is {getattr(args, name)}, but the run has {getattr(saved, name)}: leave it out")
    rules = [
        (
            "at least 1",
            lambda x: x >= 1,
            "num_seeds num_envs num_steps num_minibatches update_epochs max_seq_len lstm_hidden_size lstm_layers frame_stack",
        ),
        ("0 to 4294967295", lambda x: 0 <= x < 2**32, "seed"),
        ("0 or more", lambda x: 0 <= x < math.inf, "eval_episodes checkpoint_interval learning_rate ent_coef vf_coef"),
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
    if args.batching == "env-split" and args.num_envs % args.num_minibatches:
        deal = f"--batching env-split deals {args.num_envs} environments to {args.num_minibatches} minibatches"
        fail(f"{deal}: make --num-envs a multiple of --num-minibatches")
    on_host = args.frame_stack > 1 or args.obs_keys or args.capture_video
    if args.vec_env == "auto":
        args.vec_env = "jax" if not on_host and gymnax_base(args.env_id) else "sync"
    if args.vec_env in ("jax", "envpool") and (args.frame_stack > 1 or args.obs_keys):
        fail(f"--vec-env {args.vec_env} has neither --frame-stack nor --obs-keys: take --vec-env sync or async")
    if args.capture_video and args.vec_env != "sync":
        fail(f"--capture-video can't see into --vec-env {args.vec_env}: take --vec-env sync")
    if args.num_seeds > 1 and (args.vec_env != "jax" or args.track):
        fail("--num-seeds needs --vec-env jax, and no --track (upload the runs afterwards: wandb sync runs/NAME)")
    if not args.recurrent:  # a sequence is a step, and `whole-seq` deals shuffled sequences
        args.batching, args.max_seq_len = "whole-seq", None
    if args.batching == "whole-seq" and args.num_minibatches > args.num_envs * num_pieces(args):
        fail(
            f"--num-minibatches is {args.num_minibatches}, but a rollout has {args.num_envs} lanes: lower it, or take --batching fixed-size"
        )
    if num_pieces(args) > args.num_steps:
        made = f"{args.num_minibatches} minibatches of equal size can't be made of {args.num_envs} lanes of {args.num_steps} steps"
        fail(f"--num-minibatches: {made}: lower it")
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
        base, mask = gym.spec(base_id), {"func": functools.partial(masked, entries=entries), "observation_space": None}
        wrapper = WrapperSpec("NoVel", "gymnasium.wrappers:TransformObservation", mask)
        same = {name: getattr(base, name) for name in ("entry_point", "kwargs", "max_episode_steps", "reward_threshold")}
        if no_vel_id not in gym.registry:
            gym.register(no_vel_id, additional_wrappers=(wrapper,), **same)


def masked(obs, entries):
    """A copy of an observation (..., D), or of a batch of them, with some entries set to zero."""
    obs = obs.copy()
    obs[..., entries] = 0
    return obs


register_no_vel()


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
        counts, start = np.full(math.prod(space.shape), 2), np.zeros(math.prod(space.shape), int)
    else:
        counts, start = np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec), np.ravel(space.start)
    return start, np.arange(counts.max()) < counts[:, None]


class MaskInInfo(gym.Wrapper):
    """Puts `env.action_masks()`, where sb3-contrib's users have the valid actions, into the info, where Gymnasium's have them."""

    def reset(self, **how):
        obs, info = self.env.reset(**how)
        return obs, info | {"action_mask": self.get_wrapper_attr("action_masks")()}

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, info | {"action_mask": self.get_wrapper_attr("action_masks")()}


def input_space(paths, action_space, args):
    """What the agent sees, as a Tuple: the leaves of the observations, what `--prev-action` and `--prev-reward` add, the mask (A, P)."""
    start, exists = choices(action_space)
    spaces = list(paths.values())
    if args.prev_action:
        numbers = gym.spaces.Box(-np.inf, np.inf, start.shape, np.float32)
        spaces.append(numbers if isinstance(action_space, gym.spaces.Box) else gym.spaces.MultiBinary(int(exists.sum())))
    if args.prev_reward:
        spaces.append(gym.spaces.Box(-np.inf, np.inf, (1,), np.float32))
    return gym.spaces.Tuple([*spaces, gym.spaces.MultiBinary(exists.shape)])


class AgentInputs(gym.vector.VectorWrapper):
    """Environments that observe all that the agent sees, as a tuple of arrays: each leaf of their own observation; the last action
    and the last reward where asked for, zero at an episode's start; and the mask of valid actions (N, A, P)."""

    def __init__(self, envs, args):
        super().__init__(envs)
        self.env_id, self.prev_action, self.prev_reward = args.env_id, args.prev_action, args.prev_reward
        self.paths, self.single_action_space = leaves(envs.single_observation_space), envs.single_action_space
        self.is_box = isinstance(self.single_action_space, gym.spaces.Box)
        self.start, self.exists = choices(self.single_action_space)
        self.single_observation_space = input_space(self.paths, self.single_action_space, args)

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.done = np.ones(self.num_envs, bool)
        inputs = self.inputs(self.leaves_of(obs), info, np.zeros((self.num_envs, len(self.start))), np.zeros(self.num_envs))
        self.done = ~self.done
        return inputs, info

    def step(self, action):
        try:
            obs, reward, termination, truncation, info = self.env.step(action)
        except Exception as error:  # Gymnasium's vector environments keep the failing one's number in `i` or `index`
            frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
            numbers = [x.get("index", x.get("i")) for x in frames if isinstance(x.get("self"), gym.vector.VectorEnv)]
            file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
            fail(f"environment {numbers[-1]} failed: {type(error).__name__}: {error} ({file}:{line})", 1)
        reward = np.asarray(reward, np.float64)
        inputs = self.inputs(self.leaves_of(obs), info, action, reward)
        self.done = termination | truncation
        for what, x in [("reward", reward), *(("observation", leaf) for leaf in inputs if leaf.dtype.kind == "f")]:
            finite = np.isfinite(x).reshape(self.num_envs, -1).all(1) | termination  # nothing learns from a terminal observation
            if not finite.all():
                i = np.argmin(finite)
                fail(f"the {what} of environment {i} is {x[i]}: mend the environment, or clip its {what}s in a wrapper", 1)
        return inputs, reward, termination, truncation, info

    def leaves_of(self, obs):
        """The arrays of an observation: {(key, ...): leaf}."""
        return {path: functools.reduce(operator.getitem, path, obs) for path in self.paths}

    def inputs(self, leaves, info, action, reward):
        """The tuple of what is seen behind a step; `self.done` (N,) still says which episodes had ended before it."""
        seen = list(leaves.values())
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


def env_seeds(args, iteration=0):
    """One seed for each training environment, below FIRST_EVAL_SEED; others for a run that goes on."""
    return [int(seed) for seed in np.random.SeedSequence([args.seed, iteration]).generate_state(args.num_envs) % FIRST_EVAL_SEED]


def envpool_envs(args, seeds):
    """EnvPool's version of the environments, seeded here, since its `reset` takes no seed."""
    if importlib.util.find_spec("envpool") is None:
        fail("--vec-env envpool needs EnvPool: pip install envpool")
    import envpool

    base_id, entries = NO_VEL.get(args.env_id, (args.env_id, None))
    if base_id not in envpool.list_all_envs():
        fail(f"--env-id {args.env_id}: EnvPool has no {base_id}: take --vec-env sync or async")
    warnings.filterwarnings("ignore", ".*precision lowered by casting")  # said each time EnvPool's spaces are read
    envs = envpool.make(base_id, env_type="gymnasium", num_envs=args.num_envs, seed=seeds or env_seeds(args))
    reset, step = envs.reset, envs.step

    def hidden(obs, *rest):
        return masked(obs, entries) if entries else obs, *rest

    envs.reset, envs.step = lambda **_: hidden(*reset()), lambda action: hidden(*step(action))
    return envs


def make_envs(args, seeds=None, video_dir=None):
    """`args.num_envs` environments side by side, seen as `AgentInputs` says, in next-step autoreset: the step after an episode's
    last one ignores its action, pays nothing and returns the next episode's first observation. An id that can't be made and a
    space that can't be handled end the program. The first environment's episodes are recorded into `video_dir`."""
    if args.vec_env == "jax":
        return DeviceEnvs(args)
    env_id, package = args.env_id, args.env_id.split("-")[0].lower()
    if package in ("popgym", "minigrid"):  # these register their ids when imported
        env_id = f"{package}:{env_id}"
    wrappers = [lambda env: MaskInInfo(env) if env.has_wrapper_attr("action_masks") else env]
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # an outdated id that can't be made is said below
                render = {"render_mode": "rgb_array"} if video_dir else {}
                envs = gym.make_vec(env_id, args.num_envs, args.vec_env, wrappers=wrappers, disable_env_checker=True, **render)
    except gym.error.DependencyNotInstalled as error:
        fail(f"--env-id {args.env_id} needs a package that is missing: {' '.join(str(error).split())}")
    except (gym.error.Error, ImportError, ValueError, TypeError) as error:
        close = [] if env_id in gym.registry else difflib.get_close_matches(env_id, gym.registry, n=3)
        mend = f" Close matches: {', '.join(close)}." if close else f" Try: pip install {error.name}" if getattr(error, "name", "") else ""
        fail(f"--env-id {args.env_id!r}: {' '.join(str(error).split())}{mend}")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    supported, obs_space = (
        (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary),
        envs.single_observation_space,
    )
    for path, leaf in leaves(obs_space).items():
        if not isinstance(leaf, supported):
            keys = " ".join(key for key in obs_space if key != path[0]) if isinstance(obs_space, gym.spaces.Dict) else ""
            what = f"observations {'/'.join(map(str, path))} of type {type(leaf).__name__}".replace("  ", " ")
            fail(
                f"--env-id {args.env_id} has {what}, which has no encoder: "
                + (f"try --obs-keys {keys}" if keys else "wrap the environment")
            )
    if not isinstance(envs.single_action_space, supported):
        kinds = ", ".join(kind.__name__ for kind in supported)
        fail(f"--env-id {args.env_id} has actions of type {type(envs.single_action_space).__name__}: only {kinds} are supported")
    return AgentInputs(envs, args)


# gymnax's MountainCarContinuous pays for goals that Gymnasium's does not see, so the host keeps it.
NOT_ON_DEVICE = ("MountainCarContinuous-v0",)


@functools.cache
def gymnax_base(env_id):
    """The id under which gymnax has an environment, or that which a velocity-masked one hides; None if it has none."""
    base_id = NO_VEL.get(env_id, (env_id,))[0]
    if importlib.util.find_spec("gymnax") is None or base_id in NOT_ON_DEVICE:
        return None
    import gymnax

    return base_id if base_id in gymnax.registered_envs else None


class DeviceEnvs:
    """gymnax's version of an environment as pure functions of N environments, seen as `AgentInputs` says, in the same next-step
    autoreset: the step after an episode's last one ignores its action, pays nothing and returns the next episode's first observation.
    A state is gymnax's own and whether the episode has ended."""

    def __init__(self, args):
        if gymnax_base(args.env_id) is None:
            missing = importlib.util.find_spec("gymnax") is None
            fail(
                "--vec-env jax needs gymnax: pip install gymnax"
                if missing
                else f"--env-id {args.env_id} is not in gymnax: take --vec-env sync"
            )
        import gymnax
        from gymnax.environments.spaces import gymnax_space_to_gym_space

        self.env, self.params = gymnax.make(gymnax_base(args.env_id))
        self.num_envs, self.prev_action, self.prev_reward = args.num_envs, args.prev_action, args.prev_reward
        self.entries = NO_VEL.get(args.env_id, (None, None))[1]
        self.single_action_space = gymnax_space_to_gym_space(self.env.action_space(self.params))
        self.start, self.exists = choices(self.single_action_space)
        paths = leaves(gymnax_space_to_gym_space(self.env.observation_space(self.params)))
        self.single_observation_space = input_space(paths, self.single_action_space, args)

    def reset(self, keys):
        """From keys (N, 2): the states, and the first inputs."""
        obs, state = jax.vmap(self.env.reset_env, (0, None))(keys, self.params)
        state = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)  # no weak types: they compile a second time
        done = jnp.zeros(self.num_envs, bool)
        nothing = jnp.zeros((self.num_envs, *self.single_action_space.shape))
        return (state, done), self.inputs(obs, nothing, jnp.zeros(self.num_envs), ~done)

    def step(self, keys, state, action):
        """From keys (N, 2), states and actions as the environment takes them: the next states, inputs, rewards, terminations and
        truncations (N,)."""

        def step(key, state, done, action):
            step_key, reset_key = jax.random.split(key)
            step_obs, step_state, reward, termination, _ = self.env.step_env(step_key, state, action, self.params)
            truncation = self.env.is_truncated(step_state, self.params)
            reset = self.env.reset_env(reset_key, self.params)
            obs, state = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset, (step_obs, step_state))
            return obs, state, jnp.where(done, 0.0, reward), termination & ~done, truncation & ~done

        env_state, done = state
        obs, env_state, reward, termination, truncation = jax.vmap(step)(keys, env_state, done, action)
        inputs = self.inputs(obs, action, reward, done)
        return (env_state, termination | truncation), inputs, reward, termination, truncation

    def inputs(self, obs, action, reward, first):
        """The tuple of what is seen behind a step, or at an episode's start where `first` (N,)."""
        if self.entries:
            obs = obs.at[..., jnp.array(self.entries)].set(0)
        seen = [obs]
        if self.prev_action:
            action = action.reshape(self.num_envs, -1)  # (N, A)
            if not isinstance(self.single_action_space, gym.spaces.Box):
                action = ((action - self.start)[..., None] == np.arange(self.exists.shape[1]))[:, self.exists]  # one-hot
            seen.append(jnp.where(first[:, None], 0, action))
        if self.prev_reward:
            seen.append(jnp.where(first, 0, reward)[:, None])
        return (*seen, jnp.broadcast_to(self.exists, (self.num_envs, *self.exists.shape)))

    def close(self, **_):
        pass


# --------------------------------------------------------------------------------------------------------- recurrence
def cell_steps(weights, inputs, keep, h, c):
    """An LSTM's cells, a step at a time: h, c and the activated gates after each step.

    weights (H, 4H) from h to the gates, inputs (L, B, 4H) from all else; keep (L, B) is False where the state is set to zero
    before the step; h, c (B, H) before the first. Gates lie in PyTorch's order: input, forget, cell, output.
    As sigmoid(x) = (tanh(x / 2) + 1) / 2, one tanh makes all four gates: 1.8 x faster than three sigmoids and a tanh (measured).
    """
    hidden_size = h.shape[-1]
    half = jnp.full(4 * hidden_size, 0.5).at[2 * hidden_size : 3 * hidden_size].set(1.0)  # 1 for the cell gate, a tanh itself
    weights, inputs, offset = weights * half, inputs * half, 1 - half

    def step(state, now):
        h, c = (jnp.where(now[1][:, None], x, 0.0) for x in state)  # where, not a product: NaN x 0 is NaN
        gates = jnp.tanh(now[0] + h @ weights) * half + offset  # (B, 4H)
        i, f, g, o = jnp.split(gates, 4, -1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, gates)

    return jax.lax.scan(step, (h, c), (inputs, keep))[1]


@jax.custom_vjp
def recurrence(weights, inputs, keep, h, c):
    """h and c (L, B, H) after each step; see `cell_steps`. No gradient flows back from c, which nothing in a loss uses.

    Autodiff of the scan would add up the weights' gradient inside its loop. Here the backward loop makes only the gates' gradients,
    from factors computed for all steps at once, and the weights' gradient is one product after it."""
    return cell_steps(weights, inputs, keep, h, c)[:2]


def recurrence_forward(weights, inputs, keep, h, c):
    hs, cs, gates = cell_steps(weights, inputs, keep, h, c)
    return (hs, cs), (weights, keep, h, c, hs, cs, gates)


def recurrence_backward(saved, gradients):
    weights, keep, h, c, hs, cs, gates = saved
    keep = keep[..., None]  # (L, B, 1)
    h_before = jnp.where(keep, jnp.concatenate([h[None], hs[:-1]]), 0)  # (L, B, H), as the step saw it
    c_before = jnp.where(keep, jnp.concatenate([c[None], cs[:-1]]), 0)
    i, f, g, o = jnp.split(gates, 4, -1)
    tanh_c = jnp.tanh(cs)
    c_from_h, c_from_c = o * (1 - tanh_c**2), jnp.where(keep, f, 0)  # dc gains the first x dh, and passes on the second x dc
    gate_factors = jnp.concatenate([g * i * (1 - i), c_before * f * (1 - f), i * (1 - g**2), tanh_c * o * (1 - o)], -1)

    def step(later, now):
        dh_later, dc_later = later
        dh_output, keep, c_from_h, c_from_c, gate_factors = now
        dh = dh_later + dh_output
        dc = dc_later + dh * c_from_h
        d_gates = jnp.concatenate([dc, dc, dc, dh], -1) * gate_factors  # (B, 4H)
        dh_before = d_gates @ weights.T
        return (jnp.where(keep, dh_before, 0), dc * c_from_c), d_gates

    nothing = jnp.zeros_like(h)
    (dh, dc), d_inputs = jax.lax.scan(step, (nothing, nothing), (gradients[0], keep, c_from_h, c_from_c, gate_factors), reverse=True)
    return jnp.tensordot(h_before, d_inputs, ((0, 1), (0, 1))), d_inputs, None, dh, dc  # faster than an einsum (measured)


recurrence.defvjp(recurrence_forward, recurrence_backward)


# ------------------------------------------------------------------------------------------------------------- agent
# The encoder is two functions of a leaf of the observation space. The action distribution is three functions of the action space and
# of `policy` (..., A, P): for each entry of an action the logits of its P choices, or for a Box mean and log std.
def is_image(space):
    """Whether a leaf goes through convolutions: uint8 of shape (H, W), (H, W, C) or (C, H, W), or a stack of K such frames in front."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2


def is_float(space):
    """Whether a leaf is normalised by --norm-obs."""
    return space.dtype.kind == "f"


def prepared(space, obs):
    """A leaf's observations (n, *shape) as a network takes them: images (n, H, W, C) and other bytes scaled to 0 ... 1, the discrete
    ones one-hot (n, F), all others flat (n, F)."""
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        start, exists = choices(space)
        return ((obs.reshape(len(obs), -1) - start)[..., None] == np.arange(exists.shape[1]))[:, exists]
    if is_image(space):
        obs = obs.reshape(len(obs), *(1, 1, *space.shape)[-4:])  # (n, K, H, W, C) or (n, K, C, H, W): the colours are fewer
        obs = obs if obs.shape[-1] < obs.shape[2] else jnp.moveaxis(obs, 2, -1)
        return jnp.moveaxis(obs, 1, -2).reshape(len(obs), *obs.shape[2:4], -1) / 255  # (n, H, W, K * C)
    scale = 255 if space.dtype == np.uint8 and space.high.max() == 255 else 1
    return obs.reshape(len(obs), -1) / scale


def mlp(x, sizes, std):
    """Linear layers of these output sizes with tanh between them; orthogonal weights, of scale `std` in the last one."""
    for size in sizes[:-1]:
        x = jnp.tanh(nn.Dense(size, kernel_init=orthogonal(2**0.5))(x))
    return nn.Dense(sizes[-1], kernel_init=orthogonal(std))(x)


def for_each_lstm(init):
    """An initialiser of K LSTMs' weights (K, in, out) from one of a single LSTM's."""
    return lambda key, shape, dtype: jnp.stack([init(k, shape[1:], dtype) for k in jax.random.split(key, shape[0])])


def forget_bias(_, shape, dtype):
    """Biases (K, 4H) of 0, of the forget gate 1, so that it remembers from the start."""
    hidden_size = shape[1] // 4
    return jnp.zeros(shape, dtype).at[:, hidden_size : 2 * hidden_size].set(1.0)


class Agent(nn.Module):
    """Encoders, LSTM(s) and heads. Acting calls it with L = 1, learning with whole lanes or pieces of them: the same computation."""

    obs_space: Any
    action_space: Any
    args: Any

    def initial_state(self, num_envs):
        """The state at the start of an episode: zeros (K, 2, layers, N, H), h and c of each layer of each LSTM."""
        num_lstms = (2 if self.args.critic_lstm == "separate" else 1) if self.args.recurrent else 0
        return jnp.zeros((num_lstms, 2, self.args.lstm_layers, num_envs, self.args.lstm_hidden_size))

    def float_obs(self, obs):
        """The float leaves of observations (n, *shape), flat and side by side: (n, D)."""
        flat = [leaf.reshape(len(leaf), -1) for space, leaf in zip(self.obs_space, obs, strict=True) if is_float(space)]
        return jnp.concatenate(flat, -1) if flat else jnp.zeros((len(obs[0]), 0))

    @nn.compact
    def __call__(self, obs, obs_stats, keep, state):
        """L steps of B lanes: the policy outputs (L, B, A, P), the values (L, B), and the states after each step
        (L, K, 2, layers, B, H).

        obs: of each leaf (L, B, *shape), the action mask (L, B, A, P) last. obs_stats (3, D): count, mean and variance of each float.
        keep (L, B) is False where an episode starts; state (K, 2, layers, B, H) is the one before the first step.
        """
        args, size = self.args, keep.shape
        obs = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in obs]  # (L * B, *shape)
        features = [self.float_obs(obs).astype(jnp.float32)]
        if args.norm_obs:
            features = [((features[0] - obs_stats[1]) / jnp.sqrt(obs_stats[2] + 1e-8)).clip(-10, 10)]
        for space, leaf in zip(self.obs_space.spaces[:-1], obs, strict=False):
            x = prepared(space, leaf).astype(jnp.float32)
            if is_image(space):  # 3 x 3 convolutions halve the sides until they are 7 or less, then a linear layer
                for n in itertools.count():
                    if n and max(x.shape[1:3]) <= 7:
                        break
                    x = nn.relu(nn.Conv(32, (3, 3), 2, padding=1, kernel_init=orthogonal(2**0.5))(x))
                x = nn.relu(nn.Dense(128, kernel_init=orthogonal(2**0.5))(x.reshape(len(x), -1)))
            features += [] if is_float(space) else [x]
        features = jnp.concatenate(features, -1).reshape(*size, -1)  # (L, B, F), the floats first

        memories, states = [features] * max(1, len(state)), []  # of each of the K LSTMs (L, B, F)
        for layer in range(args.lstm_layers if args.recurrent else 0):
            K, F, hidden_size = len(state), memories[0].shape[-1], args.lstm_hidden_size
            w_in = self.param(f"lstm{layer}_in", for_each_lstm(orthogonal()), (K, F, 4 * hidden_size), jnp.float32)
            w_hidden = self.param(f"lstm{layer}_hidden", for_each_lstm(orthogonal()), (K, hidden_size, 4 * hidden_size), jnp.float32)
            bias = self.param(f"lstm{layer}_bias", forget_bias, (K, 4 * hidden_size), jnp.float32)
            # A loop for each LSTM: one loop with both in it is 1.5 to 1.9 x slower (measured).
            after = [recurrence(w_hidden[k], memories[k] @ w_in[k] + bias[k], keep, *state[k, :, layer]) for k in range(K)]
            memories = [h for h, _ in after]  # K x (L, B, H)
            states.append(jnp.stack([jnp.stack(h_c, 1) for h_c in after], 1))  # (L, K, 2, B, H)
        states = jnp.stack(states, 3) if states else jnp.zeros((size[0], *state.shape))

        num_entries, num_choices = choices(self.action_space)[1].shape
        hidden = [64] if args.recurrent else [args.lstm_hidden_size, 64]
        if isinstance(self.action_space, gym.spaces.Box):
            mean = mlp(memories[0], [*hidden, num_entries], 0.1)
            logstd = self.param("logstd", zeros, (num_entries,), jnp.float32)
            policy = jnp.stack([mean, jnp.broadcast_to(logstd, mean.shape)], -1)
        else:
            logits = mlp(memories[0], [*hidden, num_entries * num_choices], 0.1)
            policy = jnp.where(obs[-1].reshape(*size, num_entries, num_choices), logits.reshape(*size, num_entries, num_choices), -1e9)
        value = mlp(features if args.critic_lstm == "none" else memories[-1], [*hidden, 1], 1.0)
        return policy, value[..., 0], states


def sampled_action(space, policy, key=None):
    """An action (..., A) for each row of `policy` (..., A, P), the likeliest if there is no key; choices are counted from 0."""
    if not isinstance(space, gym.spaces.Box):
        return (policy if key is None else policy + jax.random.gumbel(key, policy.shape)).argmax(-1)
    mean, logstd = policy[..., 0], policy[..., 1]
    return mean if key is None else mean + jnp.exp(logstd) * jax.random.normal(key, mean.shape)


def logprob_and_entropy(space, policy, action):
    """The log-probability of each action (..., A) and the entropy of each row's distribution, both (...), summed over the entries."""
    if not isinstance(space, gym.spaces.Box):
        logprobs = jax.nn.log_softmax(policy)
        taken = jnp.take_along_axis(logprobs, action[..., None], -1)
        return taken.sum((-2, -1)), -(jnp.exp(logprobs) * logprobs).sum((-2, -1))
    mean, logstd = policy[..., 0], policy[..., 1]
    logprob = -0.5 * ((action - mean) / jnp.exp(logstd)) ** 2 - logstd - 0.5 * math.log(2 * math.pi)
    return logprob.sum(-1), (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def env_action(space, action):
    """Sampled actions (N, A) as the environments take them (N, *shape). Of a bounded Box, -1 and 1 mean the bounds, so that the
    initial std of 1 explores a wide Box too; actions are clipped to the bounds here only."""
    if not isinstance(space, gym.spaces.Box):
        return (action + choices(space)[0]).reshape(-1, *space.shape)
    bounded = (space.low > -1e30) & (space.high < 1e30)  # float32's largest number is a bound in name only
    low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
    action = (high + low) / 2 + (high - low) / 2 * action.reshape(-1, *space.shape)
    action = action.clip(space.low, space.high)
    return jnp.rint(action) if space.dtype.kind in "iu" else action


# ----------------------------------------------------------------------------------------------------------- learner
class Learner(NamedTuple):
    """All that learning changes. Of several seeds, each leaf has one more axis in front."""

    params: Any
    opt_state: Any
    obs_stats: jax.Array  # (3, D), running count, mean and variance of every float entry of the observations
    return_stats: jax.Array  # (3,), of the discounted return
    discounted_return: jax.Array  # (N,), of the running episodes
    key: jax.Array  # (2,), the source of all random choices


def optimizer(args):
    """Adam on the clipped gradient, still to be scaled by the learning rate."""
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-8))


def fresh_learner(agent, args, key):
    """A learner before its first step."""
    params_key, key = jax.random.split(key)
    obs = [np.zeros((1, 1, *space.shape), space.dtype) for space in agent.obs_space]
    num_floats = agent.float_obs([leaf[0] for leaf in obs]).shape[1]
    obs_stats, return_stats = jnp.tile(jnp.array([[0.0], [0.0], [1.0]]), (1, num_floats)), jnp.array([0.0, 0.0, 1.0])
    params = agent.init(params_key, obs, obs_stats, jnp.ones((1, 1), bool), agent.initial_state(1))
    return Learner(params, optimizer(args).init(params), obs_stats, return_stats, jnp.zeros(args.num_envs), key)


def merged_statistics(stats, batch, weight):
    """`stats`, the running count, mean and variance (3, *shape), and the rows of `batch` (n, *shape) whose `weight` (n,) is 1 (Chan et
    al. 1979). A row of weight 0 may be NaN."""
    (count, mean, var), n = stats, weight.sum()
    weight = weight.reshape(-1, *[1] * (batch.ndim - 1))
    batch_mean = jnp.where(weight > 0, batch, 0).sum(0) / jnp.maximum(n, 1)
    batch_var = jnp.where(weight > 0, (batch - batch_mean) ** 2, 0).sum(0) / jnp.maximum(n, 1)
    delta, total = batch_mean - mean, jnp.maximum(count + n, 1)
    merged = [count + n, mean + delta * n / total, (var * count + batch_var * n + delta**2 * count * n / total) / total]
    return jnp.where(n > 0, jnp.stack(merged), stats)


# ----------------------------------------------------------------------------------------------------------- rollout
class Rollout(NamedTuple):
    """What is kept between acting and learning. No LSTM state but `initial_state` is in it.

    Slot t of an environment is not valid if an episode ended at t-1: it holds that episode's final observation, its action
    is ignored, and the next episode starts at t+1 with a zero state. Its value is what a truncation at t-1 bootstraps from.
    """

    obs: tuple  # of each leaf (T + 1, N, *shape), the action mask (T + 1, N, A, P) last; row T is the observation after the rollout
    keep: jax.Array  # (T + 1, N), False where an episode starts
    valid: jax.Array  # (T, N)
    actions: jax.Array  # (T, N, A)
    logprobs: jax.Array  # (T, N)
    rewards: jax.Array  # (T, N), as paid by the environment
    terminations: jax.Array  # (T, N), the episode ended here
    truncations: jax.Array  # (T, N), the episode was cut here by a time limit
    initial_state: jax.Array  # (K, 2, layers, N, H), before slot 0


class Carry(NamedTuple):
    """What acting hands from one step to the next, for each of the N environments."""

    next_obs: tuple  # of each leaf (N, *shape), the action mask (N, A, P) last
    next_done: jax.Array  # the episode has ended: this observation is its final one
    keep: jax.Array  # False if this observation is an episode's first
    next_state: jax.Array  # (K, 2, layers, N, H) before this observation
    episode_return: jax.Array
    episode_length: jax.Array
    env_state: Any  # of environments on the device, else ()


def first_carry(agent, inputs, env_state=()):
    """The carry before the first step, from the first observations."""
    n = len(inputs[-1])
    return Carry(inputs, jnp.zeros(n, bool), jnp.zeros(n, bool), agent.initial_state(n), jnp.zeros(n), jnp.zeros(n, int), env_state)


def act(agent, learner, obs, keep, state, key=None):
    """One step of N environments: sampled actions (N, A), deterministic ones if there is no key, their log-probabilities (N,), the
    actions as the environments take them, and the state after the step."""
    policy, _, states = agent.apply(learner.params, [leaf[None] for leaf in obs], learner.obs_stats, keep[None], state)
    action = sampled_action(agent.action_space, policy[0], key)
    return action, logprob_and_entropy(agent.action_space, policy[0], action)[0], env_action(agent.action_space, action), states[0]


def after_step(carry, inputs, reward, termination, truncation, state, env_state=()):
    """The carry behind a step, and what to tell of the episodes that ended with it: where, their returns and lengths, each (N,)."""
    done = termination | truncation
    episode_return, episode_length = carry.episode_return + reward, carry.episode_length + ~carry.next_done
    told = done, episode_return, episode_length
    going_on = Carry(inputs, done, ~carry.next_done, state, (1 - done) * episode_return, (1 - done) * episode_length, env_state)
    return going_on, told


def device_rollout(envs, agent, learner, carry, num_steps):
    """Act for `num_steps` on the device: the rollout, the carry after it, the ended episodes as three (T, N), and the next key."""
    keys, start = jax.random.split(learner.key, num_steps + 1), carry

    def slot(carry, key):
        keys = jax.random.split(key, envs.num_envs + 1)
        action, logprob, sent, state = act(agent, learner, carry.next_obs, carry.keep, carry.next_state, keys[0])
        env_state, inputs, reward, termination, truncation = envs.step(keys[1:], carry.env_state, sent)
        row = carry.next_obs, carry.keep, ~carry.next_done, action, logprob, reward, termination, truncation
        carry, told = after_step(carry, inputs, reward, termination, truncation, state, env_state)
        return carry, (row, told)

    carry, (rows, episodes) = jax.lax.scan(slot, carry, keys[1:])
    obs, keep, *rest = rows
    obs, keep = jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), (obs, keep), (carry.next_obs, carry.keep))
    return Rollout(obs, keep, *rest, start.next_state), carry, episodes, keys[0]


def host_rollout(envs, acting, learner, carry, num_steps, key):
    """Act for `num_steps` in environments of the host: the rollout, the carry after it, and the ended episodes as three (T, N)."""
    start, rows, episodes = carry, [], []
    for t in range(num_steps):
        action, logprob, sent, state = acting(learner, carry.next_obs, carry.keep, carry.next_state, jax.random.fold_in(key, t))
        inputs, reward, termination, truncation, _ = envs.step(as_sent(envs.single_action_space, sent))
        rows.append((carry.next_obs, carry.keep, ~carry.next_done, action, logprob, reward, termination, truncation))
        carry, told = after_step(carry, inputs, reward, termination, truncation, state)
        episodes.append(told)
    obs, keep, *rest = zip(*rows, strict=True)
    obs = tuple(np.stack(leaf) for leaf in zip(*obs, carry.next_obs, strict=True))
    return (
        Rollout(obs, np.stack([*keep, carry.keep]), *map(np.stack, rest), start.next_state),
        carry,
        map(np.stack, zip(*episodes, strict=True)),
    )


def as_sent(space, action):
    """Actions of the device as numpy, in the space's own dtype."""
    return np.asarray(action).astype(space.dtype)


def scaled_rewards(learner, rollout, gamma):
    """The rewards (T, N) divided by the running std of the discounted return and clipped to +-10, and the learner with these statistics.
    The slot behind an episode's end, which is not valid, clears the discounted return, after a truncation too. The statistics are
    updated first: they do not touch the policy."""

    def step(discounted_return, now):
        reward, valid = now
        discounted_return = (discounted_return * gamma + reward) * valid
        return discounted_return, discounted_return

    last, returns = jax.lax.scan(step, learner.discounted_return, (rollout.rewards, rollout.valid))
    stats = merged_statistics(learner.return_stats, returns.flatten(), rollout.valid.flatten().astype(jnp.float32))
    rewards = (rollout.rewards / jnp.sqrt(stats[2] + 1e-8)).clip(-10, 10)
    return rewards, learner._replace(return_stats=stats, discounted_return=last)


def gae(rewards, values, terminations, truncations, gamma, gae_lambda):
    """Advantages (T, N) by generalised advantage estimation (Schulman et al. 2016), from rewards and flags (T, N) and
    values (T + 1, N).

    The value in the slot after an episode's last step is the final observation's, under the state carried to it: a
    truncation bootstraps from it, a termination does not, and neither passes advantage back from the next episode. In slots
    that are not valid the result means nothing.
    """
    deltas = rewards + gamma * jnp.where(terminations, 0.0, values[1:]) - values[:-1]

    def step(advantage, now):
        delta, ended = now
        advantage = delta + gamma * gae_lambda * jnp.where(ended, 0.0, advantage)  # where, not 0 x: a final value may be NaN
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros_like(values[0]), (deltas, terminations | truncations), reverse=True)[1]


# ------------------------------------------------------------------------------------------------ pieces, minibatches
def num_pieces(args):
    """Into how many pieces of nearly equal length each lane of a rollout is cut: as few as the strategy and --max-seq-len allow. Without
    recurrence a piece is a step."""
    if not args.recurrent:
        return args.num_steps
    together = args.num_minibatches // math.gcd(args.num_envs, args.num_minibatches) if args.batching == "fixed-size" else 1
    longest = min(args.max_seq_len or args.num_steps, args.num_steps)
    return together * math.ceil(args.num_steps / longest / together)


def piece_steps(num_steps, c):
    """Where the c pieces of a lane begin (c,), the slot of each of their steps (L, c), and whether that step is theirs (L, c): pieces of
    fewer than L steps have their last one twice, once with weight 0."""
    begins = np.arange(c) * num_steps // c
    ends = np.append(begins[1:], num_steps)
    slots = begins + np.arange((ends - begins).max())[:, None]
    return begins, np.minimum(slots, num_steps - 1), slots < ends


def pieces(x, slots):
    """The pieces (L, R, ...) of lanes (T, N, ...); row r is piece r % c of environment r // c."""
    if slots.shape[1] == 1:
        return x
    x = jnp.moveaxis(x[slots], 1, 2)  # (L, N, c, ...)
    return x.reshape(len(x), -1, *x.shape[3:])


def drawn_minibatches(args, key):
    """One epoch's minibatches (M, B), as rows of pieces; -1 where there is none. Every row is in exactly one."""
    M, c = args.num_minibatches, num_pieces(args)
    if args.batching == "env-split":  # the same environments each epoch, in another order
        lanes = np.arange(args.num_envs).reshape(-1, M).T  # (M, N / M)
        return jax.random.permutation(key, (lanes[..., None] * c + np.arange(c)).reshape(M, -1))
    rows = jax.random.permutation(key, args.num_envs * c)
    padding = -len(rows) % M
    return jnp.pad(rows, (0, padding), constant_values=-1).reshape(-1, M).T  # their sizes differ by at most one row


# ------------------------------------------------------------------------------------------------------------ update
def normalised(advantages, weight):
    """`advantages` with mean 0, std 1 over those of weight 1; a single one becomes 0."""
    n = jnp.maximum(weight.sum(), 1)
    centred = (advantages - (advantages * weight).sum() / n) * weight
    return centred / (jnp.sqrt((centred**2).sum() / n) + 1e-8)


def ppo_losses(args, newlogprob, entropy, newvalue, oldlogprob, oldvalue, advantages, returns, weight):
    """Sums over the steps of weight 1: policy loss, value loss, entropy; and without gradient: both estimates of the KL divergence
    (http://joschu.net/blog/kl-approx.html) and the number of clipped ratios."""
    logratio = newlogprob - oldlogprob
    ratio = jnp.exp(logratio)
    pg_loss = jnp.maximum(-advantages * ratio, -advantages * ratio.clip(1 - args.clip_coef, 1 + args.clip_coef))
    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = oldvalue + (newvalue - oldvalue).clip(-args.clip_coef, args.clip_coef)
        v_loss = jnp.maximum(v_loss, (v_clipped - returns) ** 2)
    clipped = jnp.abs(ratio - 1) > args.clip_coef
    rows = pg_loss, 0.5 * v_loss, entropy, *jax.lax.stop_gradient((-logratio, ratio - 1 - logratio, clipped))
    return jnp.stack([(row * weight).sum() for row in rows])


def update(agent, learner, rollout, args, learning_rate):
    """All epochs over one rollout: the learner after them and the metrics to log; losses are means over all steps learnt from. One
    gradient-free pass over the whole lanes opens an epoch: it gives the values from which advantages are computed anew
    (Andrychowicz et al. 2021, section 3.5) and the states at which pieces begin."""
    (T, N), valid = rollout.valid.shape, rollout.valid
    optimizer_step = optimizer(args).update
    begins, slots, is_step = piece_steps(T, num_pieces(args))
    obs = rollout.obs
    if args.norm_reward:
        rewards, learner = scaled_rewards(learner, rollout, args.gamma)
        rollout = rollout._replace(rewards=rewards)

    def clean(x):  # what ignored slots hold can be anything, NaN too: 0
        return jnp.where(valid.reshape(T, N, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x))

    def rows_of(x):
        return pieces(clean(x), slots)

    b_obs, b_keep = tuple(rows_of(leaf[:-1]) for leaf in obs), pieces(rollout.keep[:-1], slots)
    b_actions, b_logprobs = rows_of(rollout.actions), rows_of(rollout.logprobs)
    b_weight = pieces(valid, slots) & np.tile(is_step, N)  # (L, R)
    num_valid = valid.sum()
    nominal = jnp.maximum(num_valid, 1) / args.num_minibatches

    def whole_lanes(params):  # what the weights make of all slots
        policy, values, states = agent.apply(params, obs, learner.obs_stats, rollout.keep, rollout.initial_state)
        before = jnp.moveaxis(jnp.concatenate([rollout.initial_state[None], states])[begins], 0, 4)  # (K, 2, layers, N, c, H)
        return policy[:-1], values, before.reshape(*before.shape[:3], len(begins) * N, before.shape[-1])  # (K, 2, layers, R, H) at last

    def targets(values):  # advantages and returns (L, R), and how much of the returns' variance the values explain
        advantages = clean(gae(rollout.rewards, values, rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda))
        returns = advantages + clean(values[:-1])
        unexplained, var = variance(advantages, valid), variance(returns, valid)
        if args.norm_adv and args.norm_adv_scope == "rollout":
            advantages = normalised(advantages, valid)
        return pieces(advantages, slots), pieces(returns, slots), jnp.where(var > 0, 1 - unexplained / var, 0.0)

    def minibatch(carry, rows):
        params, opt_state, state, targets = carry
        (mb_obs, mb_keep, mb_actions, mb_logprobs, mb_weight), (mb_values, mb_advantages, mb_returns) = jax.tree.map(
            lambda x: x[:, rows], ((b_obs, b_keep, b_actions, b_logprobs, b_weight), targets)
        )
        mb_weight = (mb_weight & (rows >= 0)).astype(jnp.float32)
        if args.norm_adv and args.norm_adv_scope == "minibatch":
            mb_advantages = normalised(mb_advantages, mb_weight)

        def loss(params):
            policy, newvalue, _ = agent.apply(params, mb_obs, learner.obs_stats, mb_keep, state[..., rows, :])
            newlogprob, entropy = logprob_and_entropy(agent.action_space, policy, mb_actions)
            old = mb_logprobs, mb_values, mb_advantages, mb_returns
            sums = ppo_losses(args, newlogprob, entropy, newvalue, *old, mb_weight)
            # A step weighs the same in a small minibatch as in a large one: the sum is divided by the nominal size.
            size = nominal if args.loss_norm == "nominal" else jnp.maximum(mb_weight.sum(), 1)
            return (sums[0] - args.ent_coef * sums[2] + args.vf_coef * sums[1]) / size, sums

        gradients, sums = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer_step(gradients, opt_state)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(gradients)]).all()
        return (params, opt_state, state, targets), (sums, mb_weight.sum(), finite)

    def epoch(carry, now):
        params, opt_state, stopped, first = carry
        number, key = now
        policy, values, state = whole_lanes(params)
        logprobs, _ = logprob_and_entropy(agent.action_space, policy, rollout.actions)
        ratio_error = jnp.where(valid, jnp.abs(jnp.exp(logprobs - rollout.logprobs) - 1), 0).max()
        *fresh, explained = rows_of(values[:-1]), *targets(values)
        first = jax.tree.map(lambda new, old: jnp.where(number == 0, new, old), fresh, first)  # values, advantages, returns, each (L, R)
        used = [first[0], *(fresh if args.recompute_adv else first)[1:]]
        learnt, (sums, sizes, finite) = jax.lax.scan(minibatch, (params, opt_state, state, used), drawn_minibatches(args, key))
        learnt = jax.tree.map(lambda new, old: jnp.where(stopped, old, new), learnt[:2], (params, opt_state))
        stop_now = stopped | (sums[:, 4].sum() / jnp.maximum(num_valid, 1) > (args.target_kl or jnp.inf))
        told = jax.tree.map(lambda x: jnp.where(stopped, 0, x), (sums.sum(0), sizes))
        return (*learnt, stop_now, first), (*told, finite.all() | stopped, ~stopped, ratio_error, explained)

    epoch_keys = jax.random.split(learner.key, args.update_epochs + 1)
    start = learner.params, learner.opt_state, num_valid == 0, [jnp.zeros(b_weight.shape)] * 3
    numbered = jnp.arange(args.update_epochs), epoch_keys[1:]
    (params, opt_state, *_), (sums, sizes, finite, ran, ratio_error, explained) = jax.lax.scan(epoch, start, numbered)

    num_epochs = jnp.maximum(ran.sum(), 1)
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    means = sums.sum(0) / jnp.maximum(num_valid * num_epochs, 1)
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)} | {
        "losses/explained_variance": explained[0],
        "charts/valid_steps": num_valid,
        "charts/minibatches": args.num_minibatches * ran[0],
        "charts/minibatch_steps_min": jnp.where(ran[:, None], sizes, sizes.max()).min(),
        "charts/minibatch_steps_max": sizes.max(),
        "charts/padding_fraction": 1 - T * N / (len(slots) * args.num_minibatches * math.ceil(len(begins) * N / args.num_minibatches)),
        "debug/ratio_error": ratio_error[0],  # before the first gradient step
    }
    finite = {"reward": jnp.isfinite(rollout.rewards).all(), "gradient": finite.all()}
    finite["observation"] = jnp.isfinite(jnp.where(valid[..., None], agent_floats(agent, obs, T, N), 0)).all()
    if args.norm_obs:  # between iterations only: inside one, the policy that learns must be the policy that acted
        floats, weight = agent_floats(agent, obs, T, N).reshape(T * N, -1), valid.flatten().astype(jnp.float32)
        learner = learner._replace(obs_stats=merged_statistics(learner.obs_stats, floats, weight))
    return learner._replace(params=params, opt_state=opt_state, key=epoch_keys[0]), metrics, finite


def agent_floats(agent, obs, T, N):
    """The float entries of a rollout's observations (T, N, D)."""
    return agent.float_obs([leaf[:-1].reshape(T * N, *leaf.shape[2:]) for leaf in obs]).reshape(T, N, -1)


def variance(x, weight):
    """The variance of the entries of weight 1."""
    n = jnp.maximum(weight.sum(), 1)
    return (((x - (x * weight).sum() / n) * weight) ** 2).sum() / n


def iteration(envs, agent, args, learner, carry, learning_rate):
    """A rollout on the device and all epochs over it, one jitted function."""
    rollout, carry, episodes, key = device_rollout(envs, agent, learner, carry, args.num_steps)
    learner, metrics, finite = update(agent, learner._replace(key=key), rollout, args, learning_rate)
    return learner, carry, metrics, finite, episodes


# -------------------------------------------------------------------------------------------------------- evaluation
def device_returns(envs, agent, learner, keys, deterministic):
    """Undiscounted returns (episodes,) of one whole episode for each of the keys (episodes, 2), on the device."""

    def running(carry):
        return ~carry[-1].all()

    def step(carry):
        obs, keep, state, env_state, key, returns, over = carry
        step_keys = jax.random.split(key, len(keys) + 2)
        _, _, sent, state = act(agent, learner, obs, keep, state, None if deterministic else step_keys[1])
        env_state, obs, reward, termination, truncation = envs.step(step_keys[2:], env_state, sent)
        return (
            obs,
            jnp.ones_like(keep),
            state,
            env_state,
            step_keys[0],
            returns + jnp.where(over, 0, reward),
            over | termination | truncation,
        )

    env_state, obs = envs.reset(keys)
    nothing = jnp.zeros(len(keys))
    start = obs, nothing > 0, agent.initial_state(len(keys)), env_state, keys[0], nothing, nothing > 0
    return jax.lax.while_loop(running, step, start)[5]


def evaluate(agent, learner, args, deterministic=True, video_dir=None):
    """Undiscounted returns (--eval-episodes,) of whole episodes, one for each of the seeds FIRST_EVAL_SEED, FIRST_EVAL_SEED + 1, ...
    The state is carried through an episode and is zero at its start."""
    episodes = args.eval_episodes
    if args.vec_env == "jax":
        envs = make_envs(replace(args, num_envs=episodes))
        keys = jax.vmap(jax.random.PRNGKey)(FIRST_EVAL_SEED + jnp.arange(episodes))
        return np.asarray(jax.jit(functools.partial(device_returns, envs, agent, deterministic=deterministic))(learner, keys), float)
    if args.vec_env == "async":  # its processes would be forks of JAX's threads
        args = replace(args, vec_env="sync")
    returns = np.zeros(episodes)
    num_envs = min(args.num_envs, episodes) if args.vec_env != "envpool" else episodes  # its seeds are given but once
    envs = make_envs(replace(args, num_envs=num_envs), [FIRST_EVAL_SEED + i for i in range(num_envs)], video_dir)
    acting, key = jax.jit(functools.partial(act, agent)), jax.random.PRNGKey(FIRST_EVAL_SEED)
    for first in range(0, episodes, num_envs):
        numbers = first + np.arange(num_envs)  # in the last round, numbers beyond `episodes` are run and not counted
        obs, _ = envs.reset(seed=[FIRST_EVAL_SEED + int(i) for i in numbers])
        state, keep = agent.initial_state(num_envs), np.zeros(num_envs, bool)
        running = numbers < episodes
        while running.any():
            key, act_key = (key, None) if deterministic else jax.random.split(key)
            _, _, sent, state = acting(learner, obs, keep, state, act_key)
            obs, reward, termination, truncation, _ = envs.step(as_sent(envs.single_action_space, sent))
            returns[numbers[running]] += reward[running]
            running &= ~(termination | truncation)
            keep = np.ones(num_envs, bool)
    envs.close()
    return returns


# ------------------------------------------------------------------------------------------------------- checkpoints
CHECKPOINT, MODEL = "checkpoint.msgpack", "model.msgpack"


def write_state(path, state):
    """Write a checkpoint so that at every moment `path` is the old file or the whole new one."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(serialization.msgpack_serialize(state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def loaded(run_dir, *names):
    """The newest of a run's files of these names: numbers, strings and arrays only, so that a hostile file runs no code."""
    paths = [path for name in names if os.path.exists(path := os.path.join(run_dir, name))]
    if not paths:
        fail(f"{run_dir} holds no {' or '.join(names)}: give the folder of a run, runs/NAME")
    path = max(paths, key=os.path.getmtime)
    try:
        with open(path, "rb") as file:
            state = serialization.msgpack_restore(file.read())
        saved_args(state)
        return state
    except Exception as error:
        fail(f"{path} is not a checkpoint of this script: {type(error).__name__} {error}")


def saved_args(state):
    """The arguments of a run from its checkpoint."""
    args = json.loads(bytes(state["args"]))
    return Args(**args | {"obs_keys": tuple(args["obs_keys"]), "num_seeds": 1})


class LoadedAgent(NamedTuple):
    """An agent of `load_agent`."""

    agent: Agent
    learner: Learner
    envs: Any
    args: Args
    acting: Any

    def act(self, obs, state, episode_start, deterministic=False, reward=0.0, info=None, key=None):
        """An action for one environment, and the state to hand back with its next observation.

        obs and the action are the environment's own. `state` is what the call before returned, None at first. `episode_start`
        says whether obs is an episode's first: the memory starts empty then. `reward` is the last reward, wanted by agents
        with --prev-reward; `info` may hold an action mask; `key` is JAX's, a fresh one if None. Raises ValueError if an episode goes on
        and its state is missing.
        """
        if state is None and not episode_start:
            raise ValueError("an episode goes on, so `state` must be what the last call of `act` returned")
        memory, last_action = (self.agent.initial_state(1), np.zeros(self.envs.start.shape)) if episode_start else state
        leaves = {path: np.asarray(leaf)[None] for path, leaf in self.envs.leaves_of(obs).items()}
        masks = {"action_mask": [info["action_mask"]], "_action_mask": [True]} if info and "action_mask" in info else {}
        self.envs.done = np.array([episode_start])
        inputs = self.envs.inputs(leaves, masks, last_action[None], np.array([reward]))
        key = None if deterministic else jax.random.PRNGKey(random.getrandbits(31)) if key is None else key
        _, _, sent, memory = self.acting(self.learner, inputs, np.array([not episode_start]), memory, key)
        action = as_sent(self.envs.single_action_space, sent)[0]
        return action, (memory, action)


def load_agent(run_dir):
    """The agent of a run, to `act` in one Gymnasium environment of the same spaces."""
    state = loaded(run_dir, MODEL, CHECKPOINT)
    args = saved_args(state)
    envs = make_envs(replace(args, num_envs=1, vec_env="sync" if args.vec_env == "jax" else args.vec_env))
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    return LoadedAgent(agent, restored(agent, args, state), envs, args, jax.jit(functools.partial(act, agent)))


def restored(agent, args, state):
    """The learner of a checkpoint."""
    return serialization.from_state_dict(fresh_learner(agent, args, jax.random.PRNGKey(0)), state["learner"])


def stop(signum, _):
    """End the program on SIGINT or SIGTERM: `train` keeps the state of the last iteration on the way out. A second signal kills."""
    signal.signal(signum, signal.SIG_DFL)
    if os.getpid() == MAIN_PROCESS:  # not in a worker of --vec-env async, which the main process closes
        sys.exit(128 + signum)
    elif signum == signal.SIGTERM:
        os._exit(128 + signum)


MAIN_PROCESS = os.getpid()


# -------------------------------------------------------------------------------------------------------------- main
def over_seeds(function, num_seeds):
    """`function` of arguments that have one more axis in front, one entry for each seed. The learning rate, last, has none."""
    if num_seeds > 1:
        return jax.jit(lambda *xs: jax.vmap(lambda *ys: function(*ys, xs[-1]))(*xs[:-1]))
    first, back = (lambda tree: jax.tree.map(lambda x: x[0], tree)), (lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree))
    return jax.jit(lambda *xs: back(function(*first(xs[:-1]), xs[-1])))


def sharded(carry, num_envs):
    """The carry with its environments spread over the devices, if there are several and they divide --num-envs: the compiler then
    spreads everything that is computed from them."""
    devices = jax.devices()
    if len(devices) == 1 or num_envs % len(devices):
        return carry
    mesh = jax.make_mesh((len(devices),), ("envs",), (AxisType.Auto,))
    by_env = NamedSharding(mesh, PartitionSpec(None, "envs"))  # (seeds, N, ...)
    by_state = NamedSharding(mesh, PartitionSpec(None, None, None, None, "envs"))  # (seeds, K, 2, layers, N, H)
    where = jax.tree.map(lambda _: by_env, carry)._replace(next_state=by_state)
    return jax.device_put(carry, where)


def train(args):
    """Train an agent for each seed and evaluate it: the agent, the learner (each leaf with one more axis in front, a seed each), the
    returns of the evaluations (seeds, episodes), and the runs' folders."""
    state = loaded(args.resume, CHECKPOINT) if args.resume else {"iteration": 0, "wandb": ""}
    first_iteration, wandb_id = int(state["iteration"]), str(state["wandb"]) or None
    random.seed(args.seed)
    np.random.seed(args.seed)
    seeds, on_device = [args.seed + k for k in range(args.num_seeds)], args.vec_env == "jax"
    names = [f"{args.env_id}__{args.exp_name}__{seed}__{int(time.time())}".replace("/", "_").replace(":", "_") for seed in seeds]
    run_dirs = [os.path.normpath(args.resume)] if args.resume else [f"runs/{name}" for name in names]
    envs = make_envs(args, env_seeds(args, first_iteration), f"{run_dirs[0]}/videos" if args.capture_video else None)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    keys = jnp.stack([jax.random.fold_in(jax.random.PRNGKey(seed), first_iteration) for seed in seeds])
    fresh = jax.jit(functools.partial(fresh_learner, agent, args))
    learner = jax.tree.map(lambda *x: jnp.stack(x), *map(fresh, keys))  # not by vmap: XLA's CPU runtime hangs on batches of QR (seen)
    if args.resume:
        learner = jax.tree.map(lambda x: jnp.asarray(x)[None], restored(agent, args, state))
        learner = learner._replace(discounted_return=jnp.zeros((1, args.num_envs)))
    if on_device:
        env_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, 1), args.num_envs))(keys)
        carry = jax.jit(jax.vmap(lambda keys: first_carry(agent, *envs.reset(keys)[::-1])))(env_keys)
        carry = sharded(carry, args.num_envs)
        iterate = over_seeds(functools.partial(iteration, envs, agent, args), args.num_seeds)
    else:
        carry = first_carry(agent, envs.reset(seed=env_seeds(args, first_iteration))[0])
        carry = jax.tree.map(np.asarray, carry)._replace(next_state=carry.next_state)  # as each step leaves it: one type, one compilation
        acting = jax.jit(lambda learner, *rest: act(agent, jax.tree.map(lambda x: x[0], learner), *rest))
        learn = over_seeds(lambda learner, rollout, learning_rate: update(agent, learner, rollout, args, learning_rate), 1)

    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    last_returns, writers, eval_returns = [deque(maxlen=100) for _ in seeds], [], np.zeros((len(seeds), 0))
    bar = tqdm(total=num_iterations * batch_size, initial=first_iteration * batch_size, unit=" steps", disable=not sys.stderr.isatty())
    last_state = first_iteration, learner

    def save(name):  # behind the last whole iteration: numbers, strings and arrays only
        number, kept = last_state
        for k, run_dir in enumerate(run_dirs):
            saved = replace(args, resume=None, seed=seeds[k], num_seeds=1)
            plain = {"iteration": number, "args": np.frombuffer(json.dumps(vars(saved)).encode(), np.uint8), "wandb": wandb_id or ""}
            learner = serialization.to_state_dict(jax.tree.map(lambda x, k=k: np.asarray(x[k]), kept))
            write_state(f"{run_dir}/{name}", {**plain, "learner": learner})

    try:
        for run_dir in run_dirs:
            os.makedirs(run_dir, exist_ok=True)
        if args.track:
            import wandb

            where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": os.path.basename(run_dirs[0])}
            run = wandb.init(**where, id=wandb_id, resume="allow", config=vars(args), sync_tensorboard=True, save_code=True)
            wandb_id = run.id
        for run_dir, seed in zip(run_dirs, seeds, strict=True):
            writers.append(SummaryWriter(run_dir, purge_step=first_iteration * batch_size + 1 if args.resume else None))
            table = "\n".join(f"|{key}|{value}|" for key, value in vars(replace(args, seed=seed)).items())
            writers[-1].add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", first_iteration * batch_size)
        start_time = last_print = time.time()
        for number in range(first_iteration, num_iterations):
            if args.checkpoint_interval and number % args.checkpoint_interval == 0:
                save(CHECKPOINT)
            global_step = number * batch_size
            learning_rate = args.learning_rate * (1 - number / num_iterations if args.anneal_lr else 1.0)

            collect_start = update_start = time.time()
            if on_device:
                learner, carry, metrics, finite, episodes = iterate(learner, carry, learning_rate)
            else:
                key = jax.random.fold_in(learner.key[0], 2)
                rollout, carry, episodes = host_rollout(envs, acting, learner, carry, args.num_steps, key)
                episodes = [x[None] for x in episodes]
                update_start = time.time()
                learner, metrics, finite = learn(learner, jax.tree.map(lambda x: x[None], rollout), learning_rate)
            metrics, finite, episodes = jax.device_get((metrics, finite, episodes))
            update_end = time.time()
            if bad := [name for name in ("observation", "reward", "gradient") if not finite[name].all()]:  # the cause first
                what = f"iteration {number + 1} met a {bad[0]} that is not finite: the weights are as they were before"
                mend = (
                    "lower --learning-rate or --max-grad-norm" if bad[0] == "gradient" else f"mend the environment, or clip its {bad[0]}s"
                )
                fail(f"{what}; {mend}", 1)
            last_state = number + 1, learner

            global_step += batch_size
            sps = int((global_step - first_iteration * batch_size) * len(seeds) / (update_end - start_time))
            for k, writer in enumerate(writers):
                ended, returns, lengths = (x[k] for x in episodes)
                for t, n in np.argwhere(ended):
                    writer.add_scalar("charts/episodic_return", returns[t, n], number * batch_size + (t + 1) * args.num_envs)
                    writer.add_scalar("charts/episodic_length", lengths[t, n], number * batch_size + (t + 1) * args.num_envs)
                    last_returns[k].append(returns[t, n])
                own = {name: float(x[k]) for name, x in metrics.items()}
                own |= {"charts/learning_rate": learning_rate, "charts/SPS": sps}
                own |= {"time/collect": update_start - collect_start, "time/update": update_end - update_start}
                for tag, value in own.items():
                    writer.add_scalar(tag, value, global_step)
            known = [np.mean(returns) for returns in last_returns if returns]
            mean_return = f"{np.mean(known):.1f}" if known else "-"
            bar.set_postfix_str(f"return {mean_return}")
            bar.update(batch_size)
            if bar.disable and (update_end - last_print > 5 or number + 1 == num_iterations):
                left = (bar.total - global_step) * len(seeds) / max(sps, 1)
                print(f"step {global_step}/{bar.total}, return {mean_return} (last 100), {sps} steps/s, {left:.0f} s left", flush=True)
                last_print = update_end

        envs.close()
        save(CHECKPOINT)
        if args.save_model:
            save(MODEL)
        if args.eval_episodes:
            each = [evaluate(agent, jax.tree.map(lambda x, k=k: x[k], learner), args) for k in range(len(seeds))]
            eval_returns = np.stack(each)
            for writer, returns in zip(writers, eval_returns, strict=True):
                writer.add_scalar("charts/eval_return", returns.mean(), num_iterations * batch_size)
    except SystemExit as stopped:  # a signal, numbers that are not finite, an environment that failed
        save(CHECKPOINT)
        print(f"stopped behind iteration {last_state[0]}; go on with --resume {run_dirs[0]}", file=sys.stderr)
        raise stopped
    except OSError as error:
        fail(f"the folder of the run can't be written, {error}: make room or give rights, then --resume {run_dirs[0]}", 1)
    finally:
        bar.close()
        envs.close(**({"terminate": True} if args.vec_env == "async" else {}))
        for writer in writers:
            writer.close()
        if args.track:
            wandb.finish()
    return agent, learner, eval_returns, run_dirs


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    args = parsed_args()
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    if args.evaluate:
        envs = make_envs(replace(args, num_envs=1))
        agent = Agent(envs.single_observation_space, envs.single_action_space, args)
        learner = restored(agent, args, loaded(args.evaluate, MODEL, CHECKPOINT))
        for how in ("deterministic", "stochastic"):
            video_dir = f"{args.evaluate}/videos/{how}" if args.capture_video else None
            returns = evaluate(agent, learner, args, how == "deterministic", video_dir)
            print(f"{how}: eval_return={returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes", flush=True)
    else:
        _, _, all_returns, run_dirs = train(args)
        for returns, run_dir in zip(all_returns, run_dirs, strict=True):
            result = f"eval_return={returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes, " if len(returns) else ""
            print(f"{result}run: {run_dir}")
