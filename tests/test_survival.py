"""Runs that survive: checkpoints, resume, signals, numbers that are not finite, environments that fail, evaluation, several processes."""

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_lstm_seq as ppo
import two_processes
from reference import args, recorded_train
from test_script import ROOT, SCRIPT, events, run_script

SMALL = ("--env-id", "CartPoleNoVel-v1", "--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--eval-episodes", "0")


def killed(flags, after=None, writes=None):
    """Train in a process of its own, which is killed so many seconds `after` its third checkpoint, or inside its checkpoint number
    `writes`, when half of the file is on disk. Returns whether it came to its end before that."""
    seen = {path.stat().st_mtime_ns for path in Path("runs").glob("*/checkpoint.pt")}
    old = len(seen)
    pid = os.fork()
    if pid == 0:
        replace, count = os.replace, []

        def dying(source, target):
            count.append(1)
            if len(count) == writes:
                os.truncate(source, os.path.getsize(source) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        try:
            with mock.patch("os.replace", dying):
                ppo.train(ppo.parsed_args(list(flags)))
        finally:
            os._exit(0)
    if after is not None:
        while len(seen) < old + 3:
            seen |= {path.stat().st_mtime_ns for path in Path("runs").glob("*/checkpoint.pt")}
            time.sleep(0.001)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_killed_at_any_moment_goes_on_and_its_log_has_each_step_once():
    """Ten kills, two of them inside a checkpoint write. Each loses at most --checkpoint-interval iterations of the last checkpoint,
    and the log ends up with every step of every loss once, in order."""
    moments = random.Random(1)
    flags = [*SMALL, "--update-epochs", "1", "--total-timesteps", str(128 * 2000), "--checkpoint-interval", "3"]
    kills = [{"writes": 2}, {"writes": 5}] + [{"after": moments.uniform(0, 0.4)} for _ in range(8)]
    assert not killed(flags, after=0.5)
    (run_dir,) = Path("runs").iterdir()
    reached = []
    for kill in kills[:-1]:
        time.sleep(1.1)  # TensorBoard sorts files by the second
        killed(["--resume", str(run_dir)], **kill)
        reached.append(ppo.loaded(run_dir, "checkpoint.pt")["iteration"])
        assert reached[-1] % 3 == 0 or reached[-1] == 2000
        logged = max(e.step for e in events(run_dir).Scalars("losses/value_loss")) // 128
        assert logged - reached[-1] <= 3
    assert reached == sorted(reached) and len(set(reached)) > 3
    time.sleep(1.1)
    assert killed(["--resume", str(run_dir), "--total-timesteps", str(128 * (max(reached) + 20))])
    log = events(run_dir)
    for tag in ("losses/value_loss", "losses/approx_kl", "charts/SPS"):
        assert [e.step for e in log.Scalars(tag)] == list(range(128, 128 * (max(reached) + 20) + 1, 128))


def test_a_resumed_run_has_the_weights_statistics_optimiser_and_random_states_it_had(monkeypatch):
    """And other environment seeds, none of them an evaluation seed."""
    seeds, reset = [], ppo.AgentInputs.reset

    def resetting(envs, *, seed):
        seeds.append(seed)
        return reset(envs, seed=seed)

    monkeypatch.setattr(ppo.AgentInputs, "reset", resetting)
    a = args(*SMALL, "--total-timesteps", "256", "--norm-obs", "--eval-episodes", "0")
    agent, _, _, run_dir = recorded_train(a)
    kept = ppo.loaded(run_dir, "checkpoint.pt")
    seen, update = [], ppo.update

    def spying(agent, optimizer, *rest):
        seen.append((agent.state_dict(), optimizer.state_dict(), rest[-1].bit_generator.state, ppo.loaded(run_dir, "checkpoint.pt")))
        seen[-1] = ppo.copy.deepcopy(seen[-1])
        return update(agent, optimizer, *rest)

    with mock.patch.object(ppo, "update", spying):
        resumed, _, _ = ppo.train(ppo.parsed_args(["--resume", run_dir, "--total-timesteps", "512"]))
    weights, optimizer, numpy_rng, _ = seen[0]
    assert len(seen) == 2 and kept["iteration"] == 2 and kept["args"]["num_steps"] == 32
    assert all(torch.equal(weights[k], v) for k, v in kept["agent"].items() if k != "return_stats")
    assert weights["return_stats"][0] > kept["agent"]["return_stats"][0] > 0  # the new rollout's are in already
    assert optimizer["state"][0]["step"] == kept["optimizer"]["state"][0]["step"] > 0
    assert torch.equal(optimizer["state"][0]["exp_avg_sq"], kept["optimizer"]["state"][0]["exp_avg_sq"])
    assert numpy_rng == kept["numpy_rng"] and not torch.equal(
        resumed.logstd if resumed.logstd else weights["actor.0.weight"], 0 * weights["actor.0.weight"]
    )
    assert len(seeds) == 2 and not set(seeds[0]) & set(seeds[1]) and max(seeds[0] + seeds[1]) < ppo.FIRST_EVAL_SEED


def test_arguments_that_contradict_the_run_are_named_and_refused(capfd):
    _, _, run_dir = ppo.train(args(*SMALL, "--total-timesteps", "128", "--gamma", "0.9"))
    capfd.readouterr()
    assert ppo.parsed_args(["--resume", run_dir, "--gamma", "0.9", "--total-timesteps", "999"]).gamma == 0.9
    for flags, names in (
        (("--resume", run_dir, "--gamma", "0.8"), "--gamma is 0.8, but the run has 0.9"),
        (("--evaluate", run_dir, "--env-id", "CartPole-v1"), "--env-id is CartPole-v1"),
        (("--resume", "runs/none"), "runs/none holds no checkpoint.pt"),
    ):
        with pytest.raises(SystemExit) as stopped:
            ppo.parsed_args(list(flags))
        err = capfd.readouterr().err
        assert stopped.value.code == 2 and names in err and err.count("\n") == 1


def test_a_hostile_checkpoint_runs_no_code(capfd):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, ("owned",)

    Path("evil").mkdir()
    Path("evil/checkpoint.pt").write_bytes(pickle.dumps(Hostile()))
    torch.save({"args": Hostile()}, "evil/model.pt")
    for flag in ("--resume", "--evaluate"):
        with pytest.raises(SystemExit) as stopped:
            ppo.parsed_args([flag, "evil"])
        assert stopped.value.code == 2 and "is not a checkpoint" in capfd.readouterr().err
    assert not Path("owned").exists()


@pytest.mark.parametrize("signum, vec_env", [(signal.SIGINT, "async"), (signal.SIGTERM, "sync")])
def test_a_signal_keeps_the_last_iteration_and_says_how_to_go_on(signum, vec_env):
    """Exit code 130 or 143. The signal goes to the whole group, as a terminal and Slurm send it. The checkpoint interval is off."""
    flags = [*SMALL, "--total-timesteps", "1000000", "--checkpoint-interval", "0", "--vec-env", vec_env]
    run = subprocess.Popen(
        [sys.executable, SCRIPT, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not run.stdout.readline().startswith("step"):
        pass
    os.killpg(run.pid, signum)
    _, err = run.communicate(timeout=30)
    found = re.fullmatch(r"stopped behind iteration (\d+); go on with --resume (runs/.*)\n", err)
    assert run.returncode == 128 + signum and found, err
    state = ppo.loaded(found[2], "checkpoint.pt")
    assert state["iteration"] == int(found[1]) == max(e.step for e in events(found[2]).Scalars("charts/SPS")) // 128
    assert all(x.isfinite().all() for x in state["agent"].values())


@pytest.mark.parametrize(
    "env_id, words",
    [
        ("NanReward-v0", "the reward of environment 0 is nan"),
        ("InfObservation-v0", "the observation of environment 0 is"),
        ("Failing-v0", "failed: ZeroDivisionError: thirty steps"),
        ("NanLoss", "the value loss in epoch 0 is not finite"),
    ],
)
@pytest.mark.parametrize("vec_env", ["sync", "async"])
def test_a_run_that_goes_wrong_stops_before_the_weights_are_touched(env_id, words, vec_env, capfd):
    """Exit code 1, a line that says what and where, and a checkpoint of the last iteration (2 of 16 steps) with finite weights."""
    losses, calls = ppo.ppo_losses, []

    def bad(*x):
        calls.append(1)
        pg_loss, v_loss, *rest = losses(*x)
        return pg_loss, v_loss * (torch.nan if env_id == "NanLoss" and len(calls) == 5 else 1), *rest

    flags = ("--num-envs", "2", "--num-steps", "14", "--num-minibatches", "2", "--update-epochs", "1", "--vec-env", vec_env)
    a = args("--env-id", "Long-v0" if env_id == "NanLoss" else env_id, *flags, "--total-timesteps", "280")
    with pytest.raises(SystemExit) as stopped, mock.patch.object(ppo, "ppo_losses", bad):
        ppo.train(a)
    err = capfd.readouterr().err
    assert (
        stopped.value.code == 1
        and words in err
        and "stopped behind iteration 2; go on with --resume" in err
        and "Traceback" not in err.split("error: ")[-1]
    )
    (run_dir,) = Path("runs").iterdir()
    state = ppo.loaded(run_dir, "checkpoint.pt")
    assert state["iteration"] == 2 and all(x.isfinite().all() for x in state["agent"].values())


def test_a_full_disk_is_one_line(monkeypatch, capfd):
    def full(path, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ppo, "write_state", full)
    with pytest.raises(SystemExit) as stopped:
        ppo.train(args(*SMALL, "--total-timesteps", "128"))
    err = capfd.readouterr().err
    assert stopped.value.code == 1 and "No space left on device" in err and err.count("\n") == 1
    Path("runs").rename("elsewhere")
    Path("runs").write_text("a file, not a folder")
    with pytest.raises(SystemExit) as stopped:
        ppo.train(args(*SMALL, "--total-timesteps", "128"))
    assert stopped.value.code == 1 and capfd.readouterr().err.count("\n") == 1


def test_evaluating_a_run_from_the_command_line():
    """The deterministic evaluation is the one at the end of training; actions drawn at random give another."""
    _, returns, run_dir = ppo.train(args(*SMALL, "--total-timesteps", "2560", "--eval-episodes", "6"))
    result = run_script("--evaluate", run_dir, "--eval-episodes", "6")
    first, second = result.stdout.splitlines()
    assert first == f"deterministic: eval_return={returns.mean():.1f} +- {returns.std():.1f} over 6 episodes"
    assert second.startswith("stochastic: eval_return=") and second.split("=")[1] != first.split("=")[1]


@pytest.mark.parametrize(
    "flags",
    [
        ("--env-id", "Everything-v0", "--prev-action", "--prev-reward", "--frame-stack", "2"),
        ("--env-id", "InfoMask-v0", "--prev-action"),
        SMALL,
    ],
    ids=str,
)
def test_a_loaded_agent_acts_in_one_environment_as_the_evaluation_does(flags):
    a = args(*flags, "--total-timesteps", "132", "--eval-episodes", "4")
    _, returns, run_dir = ppo.train(a)
    agent, acted = ppo.load_agent(run_dir), []
    wrap = lambda env: gym.wrappers.FrameStackObservation(env, a.frame_stack) if a.frame_stack > 1 else env  # noqa: E731
    for i in range(4):
        env = wrap(gym.make(a.env_id))
        obs, info = env.reset(seed=ppo.FIRST_EVAL_SEED + i)
        state, episode_start, reward, total, over = None, True, 0.0, 0.0, False
        while not over:
            action, state = agent.act(obs, state, episode_start, deterministic=True, reward=reward, info=info)
            obs, reward, termination, truncation, info = env.step(action)
            total, episode_start, over = total + reward, False, termination or truncation
        acted.append(total)
    assert np.allclose(acted, returns)
    with pytest.raises(ValueError, match="state"):
        agent.act(obs, None, False)


def test_videos_are_recorded(tmp_path):
    pytest.importorskip("moviepy")
    _, _, run_dir = ppo.train(args(*SMALL, "--total-timesteps", "256", "--capture-video"))
    videos = list(Path(run_dir, "videos").glob("*.mp4"))
    assert videos and b"avc1" in videos[0].read_bytes()  # H.264, which any browser plays
    ppo.evaluate(ppo.load_agent(run_dir), args(*SMALL, "--eval-episodes", "2"), True, "seen")
    assert list(Path("seen").glob("*.mp4"))


def torchrun(*flags):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        ROOT / "tests/two_processes.py",
        *flags,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_two_processes_give_the_gradient_of_one():
    """2 x 2 environments and 1 x 4, the same rollout, one minibatch: gradients, metrics and statistics agree. Seen to fail if a
    process divides by its own size, or normalises advantages or observations by its own."""
    result = torchrun("gradients")
    assert result.returncode == 0, result.stderr
    theirs, stats, metrics = torch.load("two.pt", weights_only=True)
    torch.manual_seed(0)
    ours, own_stats, own_metrics = two_processes.gradients(0, 1)
    assert ((theirs - ours).norm() / ours.norm()).item() < 1e-5 and torch.allclose(stats, own_stats)
    assert metrics == pytest.approx(own_metrics, rel=1e-4)


def test_two_processes_learn_together_whatever_their_sequences_look_like():
    """Recall-v0 from 2 x 8 environments; ragged episodes make unequal counts of sequences, with as many minibatches as they allow."""
    flags = ("--num-envs", "16", "--num-steps", "32", "--total-timesteps", "16384", "--gamma", "0.99", "--eval-episodes", "50")
    result = torchrun("--env-id", "Recall-v0", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("returns [") == 2 and f"returns {[1.0] * 50}" in result.stdout
    ragged = ("--env-id", "Ragged-v0", "--num-envs", "2", "--num-steps", "5", "--num-minibatches", "4", "--total-timesteps", "200")
    result = torchrun(*ragged, "--target-kl", "0.01", "--eval-episodes", "0")
    assert result.returncode == 0, result.stderr


def test_a_process_that_dies_takes_the_others_down():
    start = time.time()
    result = torchrun(
        "--env-id", "FailingAlone-v0", "--num-envs", "2", "--num-steps", "40", "--total-timesteps", "8000", "--eval-episodes", "0"
    )
    assert result.returncode != 0 and time.time() - start < 60 and "error: environment 0 failed: ZeroDivisionError" in result.stderr
