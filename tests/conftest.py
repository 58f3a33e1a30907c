"""With several workers (`pytest -n 2`), whatever starts Ray or measures processes goes to one of them, first; the rest goes to the others."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
HERE = Path(__file__).parent
WITH_RAY = ("runtime", "jobs", "tracking", "test_security.py", "test_readme.py", "test_cli.py")
# Started in the background by a shell, this process ignores Ctrl-C, and so would all that it starts: they are to be interrupted here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def starts_ray(item) -> bool:
    return item.path.relative_to(HERE).parts[0] in WITH_RAY


def pytest_itemcollected(item):
    if starts_ray(item):
        item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not starts_ray(item))
