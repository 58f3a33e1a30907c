"""The published methods, one paper per file. Importing this package registers them all."""

import importlib
import pkgutil

from cfl_ray.core.method import Method

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

REGISTRY: dict[str, type[Method]] = Method.registry
