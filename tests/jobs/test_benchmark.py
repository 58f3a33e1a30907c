"""The part of the benchmark that needs neither Ray nor minutes, with a few clients."""

import importlib.util
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture(scope="module")
def benchmark():
    found = importlib.util.spec_from_file_location("benchmark_clustering", JOBS / "benchmark_clustering.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # where its dataclasses look for their annotations
    found.loader.exec_module(module)
    yield module
    del sys.modules[found.name]


@pytest.mark.parametrize("name", ["fedclust", "pacfl", "stocfl"])
def test_a_method_finds_the_groups_that_the_benchmark_plants(name, benchmark):
    seconds, peak, clusters = benchmark.gather(name, 60)
    assert clusters == benchmark.GROUPS and seconds > 0 and peak > 0


def test_signatures_are_as_long_as_those_of_real_clients(benchmark):
    """850 floats are the final layer of LeNet-5 for three channels, whose 62,006 parameters the papers count."""
    what = benchmark.GATHERINGS["fedclust"]
    spec = benchmark.ParamSpec.of(benchmark.recipe(what.model, what.options, what.input, 10)())
    assert (spec.size, spec.head.count) == (62_006, what.length)
    assert benchmark.GATHERINGS["stocfl"].length == benchmark.GATHERINGS["stocfl"].method.sketch
    pacfl = benchmark.GATHERINGS["pacfl"]
    assert pacfl.vectors % pacfl.method.vectors == 0 and benchmark.signatures(pacfl, 3).shape == (3, 6 * 784)
