"""Small environments with known episodes. Importing this module registers them."""

import os

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


class Random(gym.Env):
    """Observations drawn from a space; takes any action of another; episodes of 3 to 9 steps. With `masks`, it offers the valid
    actions in that way, and an action that is not valid is an error."""

    def __init__(self, obs_space, action_space, masks=None):
        self.observation_space, self.action_space, self.masks = obs_space, action_space, masks
        self.valid = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t, self.length = 0, self.np_random.integers(3, 10)
        return self.observation_space.sample(), self._info()

    def _info(self):
        if self.masks is None:
            return {}
        counts = np.ravel(self.action_space.n if isinstance(self.action_space, gym.spaces.Discrete) else self.action_space.nvec)
        masks = [self.np_random.random(n) < 0.5 for n in counts]
        for mask in masks:
            mask[self.np_random.integers(len(mask))] = self.t < self.length  # at least one; behind the end maybe none
        self.valid = masks
        if self.masks == "info":
            return {"action_mask": masks[0].astype(np.int8) if len(masks) == 1 else tuple(masks)}
        return {"action_mask": np.ones(2)} if self.masks == "wrong" else {}

    def step(self, action):
        assert self.action_space.contains(action), action
        if self.masks in ("info", "method"):
            assert all(mask[a] for mask, a in zip(self.valid, np.ravel(action - self.action_space.start), strict=True)), (
                action,
                self.valid,
            )
        self.t += 1
        return self.observation_space.sample(), float(self.np_random.normal()), bool(self.t == self.length), False, self._info()


class RandomWithMethod(Random):
    """Random, with the valid actions as sb3-contrib wants them."""

    def action_masks(self):
        return np.concatenate(self.valid)


class Echo(Toy):
    """Observes what it was last sent and last paid, zeros at the start: (action..., reward)."""

    def __init__(self, action_space):
        super().__init__(2, 6)
        self.action_space = action_space
        self.size = gym.spaces.flatdim(action_space)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.size + 1,), np.float32)

    def _obs(self):
        if self.t == 0:
            return np.zeros(self.size + 1, np.float32)
        return np.append(gym.spaces.flatten(self.action_space, self.action), self.reward).astype(np.float32)

    def step(self, action):
        self.action, self.reward = action, float(self.np_random.normal())
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


class Broken(Toy):
    """Toy with episodes of 40 steps, whose 30th goes wrong."""

    def __init__(self, how):
        super().__init__(40, 40)
        self.how = how

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.t == 30 and (self.how != "fails in one process" or os.environ.get("RANK") == "1"):
            if self.how in ("fails", "fails in one process"):
                raise ZeroDivisionError("thirty steps")
            obs, reward = (obs, np.nan) if self.how == "reward" else (obs * np.inf, reward)
        return obs, reward, *rest


Box, Dict, Discrete = gym.spaces.Box, gym.spaces.Dict, gym.spaces.Discrete
MultiBinary, MultiDiscrete, Tuple = gym.spaces.MultiBinary, gym.spaces.MultiDiscrete, gym.spaces.Tuple
NESTED = Dict(
    image=Box(0, 255, (9, 8, 3), np.uint8),
    more=Tuple([Discrete(3, start=2), Dict(vector=Box(-5, 5, (2,), np.float64), bits=MultiBinary(3)), MultiDiscrete([2, 3])]),
)
OBSERVATIONS = {
    "Float64": Box(-1, 1, (2, 3), np.float64),
    "Int": Box(-4, 9, (3,), np.int32),
    "Uint16": Box(0, 999, (3,), np.uint16),
    "Bytes": Box(0, 255, (5,), np.uint8),
    "ChannelsLast": Box(0, 255, (20, 18, 3), np.uint8),
    "ChannelsFirst": Box(0, 255, (3, 20, 18), np.uint8),
    "Discrete": Discrete(16),
    "MultiDiscrete": MultiDiscrete([[2, 5], [3, 4]]),
    "MultiBinary": MultiBinary(4),
    "Nested": NESTED,
}
ACTIONS = {
    "DiscreteStart": Discrete(3, start=5),
    "Box": Box(-2.0, 0.5, (2, 3), np.float32),
    "WideBox": Box(-1e4, 3e4, (2,), np.float32),
    "MultiDiscrete": MultiDiscrete([2, 5, 3]),
    "MultiBinary": MultiBinary(3),
}
TEXT = Dict(mission=gym.spaces.Text(9), image=Box(0, 255, (7, 7, 3), np.uint8), direction=Discrete(4))

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
    *((f"Obs{name}-v0", Random, {"obs_space": space, "action_space": Discrete(2)}) for name, space in OBSERVATIONS.items()),
    *((f"Act{name}-v0", Random, {"obs_space": Box(-1, 1, (2,)), "action_space": space}) for name, space in ACTIONS.items()),
    ("Everything-v0", Random, {"obs_space": NESTED, "action_space": MultiDiscrete([2, 5, 3])}),
    ("TextObs-v0", Random, {"obs_space": TEXT, "action_space": Discrete(2)}),
    ("SequenceObs-v0", Random, {"obs_space": gym.spaces.Sequence(Discrete(2)), "action_space": Discrete(2)}),
    ("TextAction-v0", Random, {"obs_space": Box(-1, 1, (2,)), "action_space": gym.spaces.Text(3)}),
    ("InfoMask-v0", Random, {"obs_space": Discrete(3), "action_space": Discrete(4, start=1), "masks": "info"}),
    ("InfoMaskMulti-v0", Random, {"obs_space": Discrete(3), "action_space": MultiDiscrete([4, 2]), "masks": "info"}),
    ("MethodMask-v0", RandomWithMethod, {"obs_space": Discrete(3), "action_space": MultiDiscrete([4, 2]), "masks": "method"}),
    ("WrongMask-v0", Random, {"obs_space": Discrete(3), "action_space": Discrete(3), "masks": "wrong"}),
    ("EchoBox-v0", Echo, {"action_space": Box(-2.0, 0.5, (3,), np.float32)}),
    ("EchoDiscrete-v0", Echo, {"action_space": Discrete(3, start=5)}),
    ("EchoMulti-v0", Echo, {"action_space": MultiDiscrete([2, 5, 3])}),
    ("NanReward-v0", Broken, {"how": "reward"}),
    ("InfObservation-v0", Broken, {"how": "observation"}),
    ("Failing-v0", Broken, {"how": "fails"}),
    ("FailingAlone-v0", Broken, {"how": "fails in one process"}),
    ("Recall-v0", Recall, {"length": 8}),
):
    gym.register(toy_id, entry_point=entry_point, kwargs=kwargs)
