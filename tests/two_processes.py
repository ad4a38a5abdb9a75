"""Run by torchrun in test_survival.py: the gradient of one minibatch that every process takes part in, and a short run."""

import sys

import numpy as np
import torch
import torch.distributed as dist

import ppo_lstm_seq as ppo
from reference import GradientRecorder, args, make_agent, random_rollout, random_valid


def gradients(rank, world_size):
    """Of 4 environments with ragged episodes, each process takes its share: the gradients of two epochs, the statistics."""
    a = args("--update-epochs", "2", "--num-envs", "4", "--num-minibatches", "1", "--max-grad-norm", "1e9", "--norm-adv-scope", "minibatch")
    agent = make_agent(a)
    rollout = random_rollout(agent, random_valid(11, 4, np.random.default_rng(3)))
    advantages = np.random.default_rng(1).normal(size=(11, 4))
    mine = slice(4 // world_size * rank, 4 // world_size * (rank + 1))
    share = rollout._replace(
        **{name: getattr(rollout, name)[:, mine] for name in rollout._fields if name not in ("obs", "initial_state")},
        obs=tuple(leaf[:, mine] for leaf in rollout.obs),
        initial_state=rollout.initial_state[..., mine, :],
    )
    recorder = GradientRecorder(agent)
    metrics = ppo.update(agent, recorder, share, advantages[:, mine], a, np.random.default_rng(rank))
    ppo.update_statistics(agent.obs_stats, agent.float_obs([leaf[:-1][torch.as_tensor(share.valid)] for leaf in share.obs]))
    shared = {k: metrics[k] for k in metrics if k.startswith("losses/") and k != "losses/explained_variance"}
    return torch.stack(recorder.gradients), agent.obs_stats, shared


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "gradients":
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        result = gradients(dist.get_rank(), dist.get_world_size())
        if dist.get_rank() == 0:
            torch.save(result, "two.pt")
        dist.destroy_process_group()
    else:
        _, returns, _ = ppo.train(args(*sys.argv[1:]))
        print(f"returns {returns.tolist()}")
