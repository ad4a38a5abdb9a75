import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compile faster, run slower
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # toy_envs and the scripts


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs/ go there
    torch.set_num_threads(1)
    torch.manual_seed(0)
