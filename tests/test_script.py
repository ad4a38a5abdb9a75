"""The script as a user meets it: the command line, what it prints and logs, bad input, evaluation."""

import ast
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import fields
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_lstm_seq as ppo
from reference import args, help_words, make_agent, make_envs, recorded_train

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "ppo_lstm_seq.py"
SMALL = ("--num-envs", "4", "--num-steps", "32", "--total-timesteps", "300", "--eval-episodes", "5")


def run_script(*flags, **env):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env={**os.environ, **env}, timeout=120)


def events(run_dir):
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_a_run_from_the_command_line():
    """The last line, the plain progress lines in a pipe, every tag, and the hyperparameter table. 300 steps are two rollouts of 128."""
    result = run_script("--env-id", "CartPoleNoVel-v1", *SMALL)
    assert result.returncode == 0 and result.stderr == ""
    *lines, last = result.stdout.splitlines()
    found = re.fullmatch(r"eval_return=(\d+\.\d) \+- \d+\.\d over 5 episodes, run: (runs/CartPoleNoVel-v1__ppo_lstm_seq__1__\d+)", last)
    assert found and re.match(r"step 256/256, return \d+\.\d \(last 100\), \d+ steps/s, 0 s left", lines[-1])
    log = events(found[2])
    losses = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance"]
    charts = ["learning_rate", "SPS", "minibatch_steps_min", "minibatch_steps_max", "padding_fraction", "valid_steps", "minibatches"]
    tags = [f"losses/{x}" for x in losses] + [f"charts/{x}" for x in charts] + ["time/collect", "time/update", "debug/ratio_error"]
    for tag in tags:
        assert [e.step for e in log.Scalars(tag)] == [128, 256]
    assert {"charts/episodic_return", "charts/episodic_length", "charts/eval_return"} == set(log.Tags()["scalars"]) - set(tags)
    assert log.Scalars("charts/eval_return")[0].value == pytest.approx(float(found[1]), abs=0.06)
    assert [e.value for e in log.Scalars("charts/learning_rate")] == pytest.approx([ppo.Args.learning_rate, ppo.Args.learning_rate / 2])
    table = log.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "|num_envs|4|" in table and "|batching|whole-seq|" in table


def test_a_terminal_gets_a_progress_bar(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    flags = ["--env-id", "CartPoleNoVel-v1", *SMALL]
    process = subprocess.Popen([sys.executable, SCRIPT, *flags], stdout=subprocess.PIPE, stderr=slave, text=True)
    out, _ = process.communicate(timeout=120)
    os.close(slave)
    bar = ""
    with contextlib.suppress(OSError):  # the terminal's end
        while chunk := os.read(master, 100_000).decode():
            bar += chunk
    assert "256/256" in bar and "return " in bar and "steps/s" in bar
    assert len(out.splitlines()) == 1 and out.startswith("eval_return=")


def test_weights_and_biases_offline():
    """Metrics, configuration and code are sent, and a resumed run is the same W&B run."""
    pytest.importorskip("wandb")
    result = run_script("--track", "--env-id", "CartPoleNoVel-v1", *SMALL, WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("eval_return=")
    (run,) = Path("wandb").glob("offline-run-*/*.wandb")
    content = run.read_bytes()
    assert b"losses/value_loss" in content and b"max_seq_len" in content and b"ppo_lstm_seq.py" in content
    (run_dir,) = Path("runs").iterdir()
    assert run_script("--resume", str(run_dir), "--total-timesteps", "500", WANDB_MODE="offline").returncode == 0
    ids = [folder.name.split("-")[-1] for folder in Path("wandb").glob("offline-run-*")]
    assert len(ids) == 2 and ids[0] == ids[1]


def test_the_episodes_logged_are_the_episodes_ended(tmp_path):
    """CartPole, 2,000 steps, two environments ending together included: one event each, at the step where it ended."""
    ended = []
    make_envs = ppo.make_envs

    def counting(*x):
        envs = make_envs(*x)
        step = envs.step

        def counted(action):
            result = step(action)
            ended.append(int((result[2] | result[3]).sum()))
            return result

        envs.step = counted
        return envs

    ppo.make_envs = counting
    try:
        _, _, _, run_dir = recorded_train(
            args("--env-id", "CartPole-v1", "--num-envs", "8", "--num-steps", "125", "--total-timesteps", "2000", "--eval-episodes", "0")
        )
    finally:
        ppo.make_envs = make_envs
    steps = [e.step for e in events(run_dir).Scalars("charts/episodic_return")]
    assert len(ended) == 250 and max(ended) > 1
    assert steps == [8 * (t + 1) for t, n in enumerate(ended) for _ in range(n)]
    lengths = [e.value for e in events(run_dir).Scalars("charts/episodic_length")]
    assert lengths == [e.value for e in events(run_dir).Scalars("charts/episodic_return")]  # CartPole pays 1 a step


BAD = [
    (("--env-id", "PendulmNoVel-v1"), "--env-id 'PendulmNoVel-v1'", "PendulumNoVel-v1"),
    (("--env-id", "LunarLanderNoVel-v2"), "--env-id 'LunarLanderNoVel-v2'", "LunarLanderNoVel-v3"),
    (("--env-id", "no_such_module:Foo-v0"), "--env-id 'no_such_module:Foo-v0'", "no_such_module"),
    (("--env-id", "Pendulum v1"), "--env-id 'Pendulum v1'", "Pendulum-v1"),
    (("--env-id", "a:b:c"), "--env-id 'a:b:c'", "a:b:c"),
    (("--env-id", "GymV26Environment-v0"), "--env-id 'GymV26Environment-v0'", "gym"),
    (("--env-id", "TextObs-v0"), "--env-id TextObs-v0 has observations mission of type Text", "--obs-keys image direction"),
    (("--env-id", "SequenceObs-v0"), "--env-id SequenceObs-v0 has observations of type Sequence", "wrap the env"),
    (("--env-id", "TextAction-v0"), "--env-id TextAction-v0 has actions of type Text", "MultiBinary"),
    (("--env-id", "WrongMask-v0"), "--env-id WrongMask-v0: its action_mask has 2 entries", "3 choices"),
    (("--env-id", "TextObs-v0", "--obs-keys", "imgae"), "--env-id 'TextObs-v0'", "imgae"),
    (("--vec-env", "envpool", "--frame-stack", "2"), "--vec-env envpool", "sync"),
    (("--frame-stack", "0"), "--frame-stack is 0", "at least 1"),
    (("--num-minibatches", "2049"), "--num-minibatches is 2049", "lower it"),
    (("--batching", "env-split", "--num-envs", "6"), "--batching env-split", "multiple of --num-minibatches"),
    (("--total-timesteps", "2047"), "--total-timesteps is 2047", "raise it"),
    (("--max-seq-len", "0"), "--max-seq-len is 0", "at least 1"),
    (("--learning-rate", "-0.1"), "--learning-rate is -0.1", "0 or more"),
    (("--learning-rate", "nan"), "--learning-rate is nan", "0 or more"),
    (("--gamma", "1.1"), "--gamma is 1.1", "between 0 and 1"),
    (("--clip-coef", "0"), "--clip-coef is 0.0", "greater than 0"),
    (("--num-envs", "0"), "--num-envs is 0", "at least 1"),
    (("--seed", "-1"), "--seed is -1", "0 to 4294967295"),
    (("--cuda", "False"), "--cuda takes no value", "--no-cuda"),
    (("--cuda=False",), "--cuda takes no value", "--no-cuda"),
    (("--no-cuda", "True"), "--cuda takes no value", "--no-cuda"),
    (("--norm_adv", "true"), "--norm-adv takes no value", "--no-norm-adv"),
]


@pytest.mark.parametrize("flags, names, mend", BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_input_gets_one_line_that_names_the_flag_and_the_mend(flags, names, mend, capfd):
    full = ("--num-envs", "16", "--num-steps", "128", "--num-minibatches", "4", *flags)
    with pytest.raises(SystemExit) as stop:
        ppo.train(ppo.parsed_args(list(full)))
    captured = capfd.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and names in captured.err and mend in captured.err
    assert not Path("runs").exists()


def test_a_missing_package_is_one_line_with_its_install_command(monkeypatch, capfd):
    def make_vec(*x, **y):
        raise gym.error.DependencyNotInstalled('Box2D is not installed,\nrun `pip install "gymnasium[box2d]"`')

    monkeypatch.setattr(gym, "make_vec", make_vec)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call, words in (
        (lambda: make_envs("LunarLanderNoVel-v3", 1), 'pip install "gymnasium[box2d]"'),
        (lambda: args("--track"), "pip install wandb"),
        (lambda: make_envs("CartPoleNoVel-v1", 1, "--vec-env", "envpool"), "pip install envpool"),
    ):
        with pytest.raises(SystemExit) as stop:
            call()
        err = capfd.readouterr().err
        assert stop.value.code == 2 and words in err and err.count("\n") == 1


def test_bad_input_from_the_shell_exits_with_2_and_no_traceback():
    result = run_script("--env-id", "PendulmNoVel-v1")
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr and result.stderr.count("\n") == 1


def test_flags_with_underscores_and_negations():
    assert args("--num_envs", "4").num_envs == args("--num-envs", "4").num_envs == 4
    assert args().cuda and not args("--no-cuda").cuda and not args("--no-norm-obs").norm_obs


def test_every_flag_has_a_line_of_help():
    helps = help_words(SCRIPT)
    assert len(helps) > 30 and all(len(helps[field.name]) > 1 for field in fields(ppo.Args))


def test_fewer_sequences_than_minibatches_is_said_once(capsys):
    ppo.train(
        args(
            "--env-id",
            "Long-v0",
            "--num-envs",
            "2",
            "--num-steps",
            "8",
            "--num-minibatches",
            "5",
            "--total-timesteps",
            "64",
            "--eval-episodes",
            "0",
        )
    )
    out = capsys.readouterr()
    assert (out.out + out.err).count("makes only 2 of 5 minibatches") == 1


def test_the_learning_rate_falls_unless_told_not_to():
    flags = ("--num-steps", "8", "--total-timesteps", "96", "--eval-episodes", "0", "--learning-rate", "0.004")
    for flag, expected in (("--anneal-lr", [0.004, 0.003, 0.002, 0.001]), ("--no-anneal-lr", [0.004] * 4)):
        _, _, run_dir = ppo.train(args(*flags, flag, "--exp-name", flag[2:]))
        assert [e.value for e in events(run_dir).Scalars("charts/learning_rate")] == pytest.approx(expected)


def test_evaluation_is_deterministic():
    """ShapesDiscrete-v0 pays for one of three actions."""
    a = args("--env-id", "ShapesDiscrete-v0", "--eval-episodes", "9")
    agent = make_agent(a)
    returns = [ppo.evaluate(agent, a).tolist() for _ in range(2)]
    assert returns[0] == returns[1] and len(set(returns[0])) > 1


def test_evaluation_runs_each_fixed_seed_once_and_training_uses_none_of_them(monkeypatch):
    """Seven episodes on three environments. The lengths of Ragged-v0 are drawn from the seed, and it pays 1 a step."""
    seeds, make_envs = [], ppo.make_envs

    def spying(*x):
        envs = make_envs(*x)
        reset = envs.reset
        envs.reset = lambda seed: (seeds.extend(seed), reset(seed=seed))[1]
        return envs

    monkeypatch.setattr(ppo, "make_envs", spying)
    returns = ppo.evaluate(make_agent(args()), args("--eval-episodes", "7"))
    expected = []
    for i in range(7):
        env = gym.make("Ragged-v0").unwrapped
        env.reset(seed=ppo.FIRST_EVAL_SEED + i)
        expected.append(env.length)
    assert returns.tolist() == expected and len(set(expected)) > 2
    assert seeds == list(range(ppo.FIRST_EVAL_SEED, ppo.FIRST_EVAL_SEED + 9))
    for seed in ("0", "1", str(ppo.FIRST_EVAL_SEED), str(2**32 - 1)):
        seeds.clear()
        ppo.train(args("--env-id", "Three-v0", "--seed", seed, "--total-timesteps", "33", "--eval-episodes", "0"))
        assert len(set(seeds)) == 3 and max(seeds) < ppo.FIRST_EVAL_SEED


def test_a_recall_task_is_learnt_and_needs_the_state_passed_on():
    """The sign in the first observation is asked for seven steps later: solved with the state carried, at chance without it; and the
    weights and normalisation statistics, saved and loaded, act the same."""
    flags = ("--num-envs", "16", "--num-steps", "32", "--total-timesteps", "16000", "--gamma", "0.99", "--eval-episodes", "50")
    a = args("--env-id", "Recall-v0", *flags)
    agent, _, returns, _ = recorded_train(a)
    assert returns.mean() == 1.0
    torch.save(agent.state_dict(), "weights.pt")
    envs = make_envs("Recall-v0", 1)
    loaded = ppo.Agent(envs.single_observation_space, envs.single_action_space, a)
    assert ppo.evaluate(loaded, a).mean() < 0.8
    loaded.load_state_dict(torch.load("weights.pt", weights_only=True))
    assert np.array_equal(ppo.evaluate(loaded, a), returns)
    step = loaded.step
    loaded.step = lambda obs, state: step(obs, torch.zeros_like(state))
    assert ppo.evaluate(loaded, a).mean() < 0.8


def test_the_script_stands_alone_and_names_its_packages():
    """It imports no other file of ours, and its PEP 723 header and requirements.txt name all that it imports."""
    source = SCRIPT.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    } - {*sys.stdlib_module_names, "envpool"}  # only asked for by --vec-env envpool
    header = re.search(r"# /// script\n(.*?)# ///", source, re.S)[1]
    named = {re.match(r"[\w-]+", x)[0] for x in json.loads(re.search(r"dependencies = (\[.*\])", header)[1])}
    assert imported <= named <= imported | {"tensorboard"}
    required = {re.match(r"[\w-]+", x)[0] for x in (ROOT / "requirements.txt").read_text().splitlines() if x and x[0] != "#"}
    assert named <= required
