"""Speed, side by side: `python benchmarks/speed.py {peers,costs,envs}`. Compare ratios, not seconds: the contestants take turns in one
process, and each figure is a median. `peers` needs `pip install sb3-contrib`, `envs` needs `pip install envpool`."""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent.parent))
import ppo_lstm_seq as ppo

# RL Zoo's PendulumNoVel-v1 settings, less its state-dependent exploration, which only costs time there
PEERS = ["--env-id", "PendulumNoVel-v1", "--critic-lstm", "separate", "--lstm-hidden-size", "64"]
PEERS += ["--update-epochs", "10", "--gamma", "0.9", "--gae-lambda", "0.95", "--norm-obs", "--norm-reward"]
PEERS += ["--no-recompute-adv"]  # RecurrentPPO keeps the advantages of the rollout too
ROUNDS = 5


def rollout_seconds(script, flags, rollouts):
    """Wall-clock seconds from one rollout's log entry to the next, in a run of either script: acting, learning, logging, no compilation."""
    args = script.parsed_args(["--eval-episodes", "0", *flags])
    args.total_timesteps = rollouts * args.num_envs * args.num_steps
    run_dirs = script.train(args)[-1]  # the JAX script has one for each seed
    events = EventAccumulator(run_dirs if isinstance(run_dirs, str) else run_dirs[0], size_guidance={"scalars": 0})
    events.Reload()
    return np.diff([e.wall_time for e in events.Scalars("charts/SPS")]).tolist()


def contrib_model(num_envs, num_steps, batch_size):
    """Stable-Baselines3-contrib's RecurrentPPO at RL Zoo's settings: two LSTM(64), a [64] head each, observations and rewards
    normalised."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs = VecNormalize(make_vec_env(lambda: gym.make("PendulumNoVel-v1"), n_envs=num_envs), gamma=0.9)
    heads = {"pi": [64], "vf": [64]}
    network = {
        "ortho_init": False,
        "activation_fn": torch.nn.ReLU,
        "lstm_hidden_size": 64,
        "enable_critic_lstm": True,
        "net_arch": heads,
    }
    settings = {"batch_size": batch_size, "n_epochs": 10, "gamma": 0.9, "gae_lambda": 0.95, "learning_rate": 1e-3}
    return RecurrentPPO("MlpLstmPolicy", envs, n_steps=num_steps, policy_kwargs=network, device="cpu", seed=1, **settings)


def contrib_rollout_seconds(model):
    start = time.perf_counter()
    model.learn(model.n_envs * model.n_steps, reset_num_timesteps=False)
    return time.perf_counter() - start


def peers():
    """Environment steps per second against RecurrentPPO, at RL Zoo's sizes and at equal gradient steps."""
    for num_envs, num_steps, batch_size, ours in (
        (4, 1024, 128, [("whole-seq", 4), ("fixed-size", 32)]),
        (16, 128, 512, [("whole-seq", 4), ("fixed-size", 4), ("env-split", 4)]),
    ):
        steps = num_envs * num_steps
        model = contrib_model(num_envs, num_steps, batch_size)
        theirs, seconds = [], {o: [] for o in ours}
        for _ in range(ROUNDS):
            for batching, num_minibatches in ours:
                flags = ["--num-envs", num_envs, "--num-steps", num_steps, "--num-minibatches", num_minibatches, "--batching", batching]
                seconds[batching, num_minibatches] += rollout_seconds(ppo, [*PEERS, *map(str, flags)], 9)
            theirs.append(contrib_rollout_seconds(model))
        base = statistics.median(theirs)
        print(f"{num_envs} envs x {num_steps}: RecurrentPPO, batches of {batch_size}: {steps / base:.0f} steps/s")
        for (batching, num_minibatches), values in seconds.items():
            ours_median = statistics.median(values)
            print(f"    {batching}, {num_minibatches} minibatches: {steps / ours_median:.0f} steps/s, {base / ours_median:.1f} x")


def bare_seconds(agent, shapes):
    """Forward and backward of the agent's LSTMs and heads alone, over dense batches (L, S) of as many steps: `shapes` holds each
    minibatch's (steps, sequences)."""
    lstm = agent.lstms[0]
    batches = [torch.randn(max(1, round(n / s)), s, lstm.input_size) for n, s in shapes]
    start = time.perf_counter()
    for x in batches:
        agent.zero_grad()
        memories = [lstm(x)[0].flatten(0, 1) for lstm in agent.lstms]
        (agent.actor(memories[0]).sum() + agent.critic(memories[-1]).sum()).backward()
    return time.perf_counter() - start


def costs(flags):
    """What lies around the unavoidable: `time/update` against the bare forward and backward of the same LSTMs and heads over the valid
    steps in one dense batch a minibatch, and `time/collect` against stepping the same environments with fixed actions."""
    args = ppo.parsed_args(["--eval-episodes", "0", *flags])
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    envs, idle_envs = ppo.make_envs(args), ppo.make_envs(args).env  # the second without what the agent adds
    idle_envs.reset(seed=1)
    action = idle_envs.action_space.sample()
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    carry, discounted_return = (envs.reset(seed=1)[0], agent.initial_state(args.num_envs)), np.zeros(args.num_envs)
    shapes, run_sequences = [], agent.run_sequences

    def recording(obs, state, lengths, **how):
        if torch.is_grad_enabled():
            shapes.append((int(sum(lengths)), len(lengths)))
        return run_sequences(obs, state, lengths, **how)

    agent.run_sequences = recording
    update_ratios, collect_ratios = [], []
    for iteration in range(16):
        start = time.perf_counter()
        rollout, carry, _ = ppo.collect(envs, agent, carry, args.num_steps)
        collected = time.perf_counter()
        shapes.clear()
        rollout, discounted_return = ppo.with_scaled_rewards(agent, rollout, discounted_return, args.gamma)
        advantages = ppo.gae(
            rollout.rewards, rollout.values.numpy(), rollout.terminations, rollout.truncations, args.gamma, args.gae_lambda
        )
        metrics = ppo.update(agent, optimizer, rollout, advantages, args, rng)
        if args.norm_obs:
            ppo.update_statistics(agent.obs_stats, agent.float_obs([x[:-1][torch.as_tensor(rollout.valid)] for x in rollout.obs]))
        updated = time.perf_counter()
        bare = bare_seconds(agent, shapes)
        idle = time.perf_counter()
        for _ in range(args.num_steps):
            idle_envs.step(action)
        idle = time.perf_counter() - idle
        if iteration:
            update_ratios.append((updated - collected) / bare)
            collect_ratios.append((collected - start) / idle)
            print(
                f"    update {updated - collected:.3f} s, bare {bare:.3f} s; collect {collected - start:.3f} s, environments alone "
                f"{idle:.3f} s; padding {metrics['charts/padding_fraction']:.2f}"
            )
    print(
        f"{args.env_id}, {args.num_envs} x {args.num_steps}, {args.batching}, {args.num_minibatches} minibatches: medians of 15 iterations:"
    )
    print(f"    time/update = {statistics.median(update_ratios):.2f} x the bare forward + backward")
    print(f"    time/collect = {statistics.median(collect_ratios):.2f} x stepping the environments")


def envs_alone():
    """Environment steps per second of 32 environments with random actions, without an agent: `--vec-env envpool` against `sync`."""
    for env_id in ("PendulumNoVel-v1", "BipedalWalker-v3"):
        seconds, contestants = {"sync": [], "envpool": []}, {}
        for vec_env in seconds:
            contestants[vec_env] = ppo.make_envs(ppo.parsed_args(["--env-id", env_id, "--num-envs", "32", "--vec-env", vec_env]))
            contestants[vec_env].reset(seed=list(range(32)))
        actions = [contestants["sync"].action_space.sample() for _ in range(300)]
        for _ in range(2 * ROUNDS):
            for vec_env, envs in contestants.items():
                start = time.perf_counter()
                for action in actions:
                    envs.step(action)
                seconds[vec_env].append((time.perf_counter() - start) / len(actions) / 32)
        sync, envpool = (statistics.median(x) for x in seconds.values())
        print(f"{env_id}, 32 environments: sync {1 / sync:.0f} steps/s, envpool {1 / envpool:.0f} steps/s, {sync / envpool:.1f} x")


if __name__ == "__main__":
    script, what, *flags = sys.argv
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        {"peers": peers, "costs": lambda: costs(flags), "envs": envs_alone}[what]()
