"""One thread, as a client host has; `federations` beside this folder can be imported."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))
