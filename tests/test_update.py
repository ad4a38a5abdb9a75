"""The update: minibatch weights, padding, NaN and the edges (invariants 3, 4 and 7), determinism."""

import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
from reference import (
    GradientRecorder,
    args,
    gradient,
    make_agent,
    naive_outputs,
    random_rollout,
    random_valid,
    recorded_train,
    relative_error,
)

HUGE = ("--max-grad-norm", "1e9")  # gradients are compared before clipping


def minibatch_gradients(agent, rollout, advantages, a):
    recorder = GradientRecorder(agent)
    metrics = ppo.update(agent, recorder, rollout, advantages.copy(), a, np.random.default_rng(0))
    return recorder.gradients, metrics


def naive_ppo(agent, rollout, advantages, a):
    """The PPO loss summed over all valid steps, one step at a time, and the metrics as means over them."""
    steps = [(t, n) for t, n in np.argwhere(rollout.valid)]
    adv = np.array([advantages[s] for s in steps])
    mean, std = adv.mean(), adv.std()
    outputs = naive_outputs(agent, rollout.obs, rollout.valid, rollout.initial_state)
    total, rows = 0, []
    for t, n in steps:
        policy, value, _ = outputs[t, n]
        normal = torch.distributions.Normal(policy[:, 0], policy[:, 1].exp())
        logratio = normal.log_prob(rollout.actions[t, n]).sum() - rollout.logprobs[t, n]
        ratio, target = logratio.exp(), advantages[t, n] + rollout.values[t, n]
        A = (advantages[t, n] - mean) / (std + 1e-8)
        pg_loss = -torch.min(ratio * A, ratio.clamp(1 - a.clip_coef, 1 + a.clip_coef) * A)
        v_loss = 0.5 * (value - target) ** 2
        if a.clip_vloss:
            old = rollout.values[t, n]
            v_loss = 0.5 * torch.max((value - target) ** 2, (old + (value - old).clamp(-a.clip_coef, a.clip_coef) - target) ** 2)
        entropy = normal.entropy().sum()
        total = total + pg_loss - a.ent_coef * entropy + a.vf_coef * v_loss
        clipped = (ratio - 1).abs() > a.clip_coef
        rows.append([x.item() for x in (pg_loss, v_loss, entropy, -logratio, ratio - 1 - logratio, clipped.double())])
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    return total, {f"losses/{name}": x for name, x in zip(names, np.mean(rows, 0), strict=True)}


@pytest.mark.parametrize("batching", ["whole-seq", "env-split", "fixed-size"])
@pytest.mark.parametrize("flags", [(), ("--clip-vloss", "--critic-lstm", "shared", "--ent-coef", "0.1")], ids=str)
def test_minibatches_add_up_to_the_naive_loss_whatever_their_sizes(batching, flags):
    """Invariants 1, 3 and 4 in float64: the gradients of one epoch's minibatches, each times the nominal size, add up to the gradient
    of the naive sum over all valid steps, so every step weighs the same. Seen to fail if a minibatch is divided by its own count, if
    padding or an ignored step enters, or if a sequence is dropped. (fixed-size stops gradients at its cuts, so one minibatch.)"""
    M = 1 if batching == "fixed-size" else 3
    a = args("--update-epochs", "1", "--num-minibatches", str(M), "--batching", batching, "--lstm-hidden-size", "5", *HUGE, *flags)
    agent = make_agent(a, torch.float64)
    rollout = random_rollout(agent, random_valid(11, 3, np.random.default_rng(3)))
    advantages = np.random.default_rng(1).normal(size=(11, 3))
    gradients, metrics = minibatch_gradients(agent, rollout, advantages, a)
    loss, expected = naive_ppo(agent, rollout, advantages, a)
    agent.zero_grad()
    loss.backward()
    assert len(gradients) == M and (M == 1 or metrics["charts/minibatch_steps_min"] < metrics["charts/minibatch_steps_max"])
    assert relative_error(sum(gradients) * rollout.valid.sum() / M, gradient(agent)) < 1e-10
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-4)  # metrics are summed in float32
    targets = (advantages + rollout.values[:-1].numpy())[rollout.valid]
    explained = 1 - advantages[rollout.valid].var() / targets.var()
    assert metrics["losses/explained_variance"] == pytest.approx(explained)
    assert metrics["charts/valid_steps"] == rollout.valid.sum()


def test_loss_norm_minibatch_divides_by_the_minibatchs_own_count():
    """The ablation. On two environments with 11 and 6 valid steps, the two ways differ by just these weights."""
    valid = np.ones((11, 2), bool)
    valid[::2, 1] = False
    valid[0, 1] = True
    agent = make_agent(args("--lstm-hidden-size", "5"), torch.float64)
    rollout = random_rollout(agent, valid)
    advantages = np.random.default_rng(1).normal(size=(11, 2))
    by = {}
    for loss_norm in ("nominal", "minibatch"):
        flags = ("--update-epochs", "1", "--num-envs", "2", "--num-minibatches", "2", "--batching", "env-split", "--loss-norm", loss_norm)
        by[loss_norm], metrics = minibatch_gradients(agent, rollout, advantages, args(*flags, *HUGE))
    counts, nominal = valid.sum(0), valid.sum() / 2
    assert sorted(counts) == [metrics["charts/minibatch_steps_min"], metrics["charts/minibatch_steps_max"]] == [6, 11]
    weights = sorted(nominal / counts)
    measured = sorted((m.norm() / n.norm()).item() for m, n in zip(by["minibatch"], by["nominal"], strict=True))
    assert measured == pytest.approx(weights)


@pytest.mark.parametrize("flags", [(), ("--batching", "fixed-size", "--max-seq-len", "3"), ("--no-recurrent",)], ids=str)
def test_advantages_are_computed_anew_from_the_values_of_the_current_weights(flags):
    """Stepping through the rollout, a state carried to each final observation and zero behind it, gives the values wherever GAE
    looks; the second epoch's gradient is the one that the advantages and returns of these values give, and the first epoch's is
    that of the advantages handed in."""
    a = args("--update-epochs", "2", "--num-minibatches", "1", "--no-norm-adv", "--lstm-hidden-size", "5", *flags)
    agent = make_agent(a, torch.float64)
    rollout = random_rollout(agent, random_valid(11, 3, np.random.default_rng(3))) if a.recurrent else None
    if rollout is None:
        rollout = random_rollout(make_agent(args("--lstm-hidden-size", "5"), torch.float64), random_valid(11, 3, np.random.default_rng(3)))
        rollout = rollout._replace(initial_state=agent.initial_state(3))
    values, state = torch.zeros(12, 3, dtype=torch.float64), rollout.initial_state
    with torch.no_grad():
        for t in range(12):
            _, values[t], state = agent.step([x[t] for x in rollout.obs], state)
            if t < 11:
                state[..., torch.as_tensor(~rollout.valid[t]), :] = 0
    fresh = ppo.gae(rollout.rewards, values.numpy(), rollout.terminations, rollout.truncations, a.gamma, a.gae_lambda)
    given = np.random.default_rng(1).normal(size=(11, 3))
    gradients, _ = minibatch_gradients(agent, rollout, given, ppo.replace(a, recompute_adv=True))
    old, _ = minibatch_gradients(agent, rollout, given, a)
    new, _ = minibatch_gradients(agent, rollout._replace(values=values), fresh, a)
    assert relative_error(gradients[0], old[0]) < 1e-10 and relative_error(gradients[1], new[1]) < 1e-10
    assert relative_error(old[1], new[1]) > 1e-2


@pytest.mark.parametrize("batching", ["whole-seq", "env-split", "fixed-size"])
@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_what_ignored_slots_hold_changes_nothing(batching, scope):
    """Invariant 3: 0, 1e6 or NaN in the ignored slots' observations, actions, old log-probabilities, values and advantages give the
    same gradients and metrics, all finite."""
    a = args("--update-epochs", "2", "--num-minibatches", "3", "--batching", batching, "--norm-adv-scope", scope)
    agent = make_agent(a)
    valid = random_valid(11, 3, np.random.default_rng(3))
    results = []
    for poison in (0.0, 1e6, np.nan):
        rollout = random_rollout(agent, valid)
        advantages = np.random.default_rng(1).normal(size=(11, 3))
        advantages[~valid] = poison
        for x in (rollout.obs[0][:-1], rollout.actions, rollout.logprobs, rollout.values[:-1]):
            x[torch.as_tensor(~valid)] = poison
        gradients, metrics = minibatch_gradients(agent, rollout, advantages, a)
        assert torch.stack(gradients).isfinite().all() and np.isfinite(list(metrics.values())).all()
        results.append((torch.stack(gradients), metrics))
    for gradients, metrics in results[1:]:
        assert torch.equal(gradients, results[0][0]) and metrics == results[0][1]


def test_advantages_of_short_and_long_sequences_are_normalised_over_valid_steps(monkeypatch):
    """Sequences of 1, 100 and 101 steps: what reaches the loss has mean 0 and std 1, over the rollout or over each minibatch."""
    valid = np.ones((102, 2), bool)
    valid[1, 0] = valid[101, 1] = False
    seen, losses = [], ppo.ppo_losses
    monkeypatch.setattr(ppo, "ppo_losses", lambda args, *x: (seen.append(x[5]), losses(args, *x))[1])
    for scope in ("rollout", "minibatch"):
        seen.clear()
        a = args("--update-epochs", "1", "--num-minibatches", "2", "--norm-adv-scope", scope)
        agent = make_agent(a)
        advantages = np.random.default_rng(1).normal(3, 5, valid.shape)
        advantages[~valid] = 1e9
        minibatch_gradients(agent, random_rollout(agent, valid), advantages, a)
        for adv in [torch.cat(seen)] if scope == "rollout" else seen:
            assert abs(adv.mean()) < 1e-5 and abs(adv.std(correction=0) - 1) < 1e-5
        assert len(seen) == 2
    seen.clear()
    minibatch_gradients(agent, random_rollout(agent, valid), advantages, args("--update-epochs", "1", "--no-norm-adv"))
    assert sorted(torch.cat(seen).tolist()) == pytest.approx(sorted(advantages[valid]))


EDGES = [  # environment, environments, steps, minibatches
    ("Ragged-v0", 1, 1, 1),
    ("Single-v0", 1, 1, 1),  # every other rollout has no valid step
    ("Single-v0", 2, 6, 2),
    ("Single-v0", 3, 4, 11),  # more minibatches than sequences
    ("Long-v0", 1, 7, 5),  # one sequence
    ("Three-v0", 2, 3, 2),  # ends on the last step
    ("Three-v0", 2, 8, 2, "--max-seq-len", 1),
]


def can_be_made(edge, batching):
    _, num_envs, num_steps, num_minibatches, *_ = edge
    return num_minibatches <= num_envs * num_steps and (batching != "env-split" or num_envs % num_minibatches == 0)


@pytest.mark.parametrize(
    "flags, batching", [(e, b) for e in EDGES for b in ("whole-seq", "fixed-size", "env-split") if can_be_made(e, b)], ids=str
)
@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_nothing_is_nan_at_the_edges(flags, batching, scope):
    """Invariant 7: nothing is NaN, and learning rebuilds what acting computed. (That nothing is lost: test_sequences.py.)"""
    env_id, num_envs, num_steps, num_minibatches, *flags = flags
    size = num_envs * num_steps
    flags += ["--num-envs", num_envs, "--num-steps", num_steps, "--num-minibatches", num_minibatches, "--batching", batching]
    flags += ["--total-timesteps", 5 * size, "--update-epochs", 2, "--eval-episodes", 0, "--norm-adv-scope", scope]
    a = args("--env-id", env_id, *map(str, flags))
    agent, calls, _, _ = recorded_train(a)
    seen = [metrics for metrics, _, _ in calls]
    assert len(seen) == 5 and all(np.isfinite(list(m.values())).all() for m in seen)
    assert all(p.isfinite().all() for p in agent.state_dict().values())
    if env_id == "Single-v0" and size == 1:
        assert [m["charts/valid_steps"] for m in seen] == [1, 0, 1, 0, 1]
    for m in seen:
        if m["charts/valid_steps"]:
            assert m["debug/ratio_error"] < 1e-4


def test_fewer_sequences_than_minibatches_take_the_nominal_size_from_their_number():
    """Three sequences for five minibatches: each is divided by a third of the valid steps."""
    a = args("--update-epochs", "1", "--num-minibatches", "5", "--lstm-hidden-size", "5", *HUGE)
    agent = make_agent(a, torch.float64)
    rollout, advantages = random_rollout(agent, np.ones((11, 3), bool)), np.random.default_rng(1).normal(size=(11, 3))
    gradients, metrics = minibatch_gradients(agent, rollout, advantages, a)
    agent.zero_grad()
    naive_ppo(agent, rollout, advantages, a)[0].backward()
    assert len(gradients) == metrics["charts/minibatches"] == 3
    assert relative_error(sum(gradients) * 33 / 3, gradient(agent)) < 1e-10


def test_the_gradient_is_clipped_by_its_norm():
    a = args("--update-epochs", "1", "--num-minibatches", "2", "--max-grad-norm", "0.01")
    agent = make_agent(a)
    gradients, _ = minibatch_gradients(agent, random_rollout(agent, np.ones((11, 3), bool)), np.ones((11, 3)), a)
    assert [g.norm().item() for g in gradients] == pytest.approx([0.01, 0.01], rel=1e-3)


def test_learning_calls_the_lstm_once_a_minibatch_and_never_step_by_step(monkeypatch):
    """128 steps, 4 minibatches, 2 epochs, 2 LSTMs: one call for each of these and one for the check before the first."""
    calls, forward = [], torch.nn.LSTM.forward
    monkeypatch.setattr(torch.nn.LSTM, "forward", lambda *x: (calls.append(1), forward(*x))[1])
    a = args("--update-epochs", "2", "--num-minibatches", "4", "--num-steps", "128")
    agent = make_agent(a)
    minibatch_gradients(agent, random_rollout(agent, random_valid(128, 3, np.random.default_rng(0), 0.05)), np.ones((128, 3)), a)
    assert len(calls) == 2 * (4 * 2 + 1)


def test_the_kl_limit_ends_the_epochs():
    """It is compared with an epoch's mean over its steps."""
    a = args("--update-epochs", "6", "--num-minibatches", "2", "--num-steps", "20")
    agent = make_agent(a)
    rollout = random_rollout(agent, np.ones((20, 3), bool))
    gradients, metrics = minibatch_gradients(agent, rollout, np.ones((20, 3)), a)
    assert len(gradients) == 12 and metrics["losses/approx_kl"] > 0  # the recorder never steps, so each epoch's mean is this
    for factor, minibatches in ((0.9, 2), (1.1, 12)):
        a.target_kl = factor * metrics["losses/approx_kl"]
        assert len(minibatch_gradients(agent, rollout, np.ones((20, 3)), a)[0]) == minibatches


def test_a_constant_target_explains_nothing():
    a = args("--num-minibatches", "1", "--update-epochs", "1")
    agent = make_agent(a)
    rollout = random_rollout(agent, np.ones((11, 3), bool))
    rollout.values.fill_(0)
    assert minibatch_gradients(agent, rollout, np.ones((11, 3)), a)[1]["losses/explained_variance"] == 0


@pytest.mark.parametrize("batching", ["whole-seq", "fixed-size", "env-split"])
def test_the_same_seed_gives_the_same_bits(batching):
    flags = ("--env-id", "CartPoleNoVel-v1", "--num-envs", "4", "--num-steps", "32", "--total-timesteps", "512", "--eval-episodes", "3")
    runs = []
    for seed in ("7", "7", "8"):
        agent, calls, returns, _ = recorded_train(args(*flags, "--seed", seed, "--batching", batching))
        weights = torch.cat([p.flatten().double() for p in agent.state_dict().values()])
        runs.append(([metrics for metrics, _, _ in calls], weights, returns.tolist()))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1]) and runs[0][2] == runs[1][2]
    assert not torch.equal(runs[0][1], runs[2][1])
