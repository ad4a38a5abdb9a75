"""Small environments with known episodes. Importing this module registers them."""

import gymnasium as gym
import numpy as np


class Toy(gym.Env):
    """Observes (t, noise); pays 1 a step; an episode's length is drawn from min_length..max_length and it ends by
    termination, by truncation, or by either at random."""

    def __init__(self, min_length, max_length, end="either"):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.lengths, self.end = (min_length, max_length), end

    def _obs(self):
        return np.array([self.t, self.np_random.normal()], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, self.np_random.integers(self.lengths[0], self.lengths[1] + 1)
        self.end_now = self.end if self.end != "either" else self.np_random.choice(["terminates", "truncates"])
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        ended = self.t >= self.length
        return self._obs(), 1.0, bool(ended and self.end_now == "terminates"), bool(ended and self.end_now == "truncates"), {}


class Shapes(Toy):
    """Observes a (2, 3) Box; takes a (2, 3) Box, or Discrete(3, start=5) and pays 1 for 6."""

    def __init__(self, discrete):
        super().__init__(4, 9)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64)
        self.action_space = gym.spaces.Discrete(3, start=5) if discrete else gym.spaces.Box(-2.0, 0.5, (2, 3), np.float32)

    def _obs(self):
        return self.np_random.uniform(-1, 1, (2, 3))

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(np.all(action == 6)), *rest


class Recall(gym.Env):
    """Shows a sign in the first observation, then zeros; the last action is paid 1 if it repeats the sign."""

    def __init__(self, length):
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1], np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        return np.zeros(1, np.float32), float(over and action == self.sign), over, False, {}


for toy_id, entry_point, kwargs in (
    ("Three-v0", Toy, {"min_length": 3, "max_length": 3}),
    ("Single-v0", Toy, {"min_length": 1, "max_length": 1}),
    ("Ragged-v0", Toy, {"min_length": 1, "max_length": 9}),
    ("Long-v0", Toy, {"min_length": 40, "max_length": 40}),
    ("Truncated5-v0", Toy, {"min_length": 5, "max_length": 5, "end": "truncates"}),
    ("Terminated5-v0", Toy, {"min_length": 5, "max_length": 5, "end": "terminates"}),
    ("Terminated50-v0", Toy, {"min_length": 50, "max_length": 50, "end": "terminates"}),
    ("Truncated50-v0", Toy, {"min_length": 50, "max_length": 50, "end": "truncates"}),
    ("Shapes-v0", Shapes, {"discrete": False}),
    ("ShapesDiscrete-v0", Shapes, {"discrete": True}),
    ("Recall-v0", Recall, {"length": 8}),
):
    gym.register(toy_id, entry_point=entry_point, kwargs=kwargs)
