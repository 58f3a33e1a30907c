"""Models of a run as files for other programs: safetensors, PyTorch, ONNX."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from cfl_ray.core.errors import ConfigError
from cfl_ray.core.files import drafted
from cfl_ray.runtime.trained import TrainedMethod


def export_model(trained: TrainedMethod, path: Path, cluster: int | None = None, client: int | None = None) -> str:
    """Writes the model of a cluster, or the one that a client predicts with, and returns what was written, in words.

    The ending of `path` is the format:
        .safetensors  parameters and buffers by name
        .pt           the same, for `torch.load` and `load_state_dict`
        .onnx         the network with its parameters; needs the packages onnx and onnxscript

    A safetensors file names method, cluster or client, round, input shape and normalisation in its metadata.
    Raises ConfigError for another ending, and for a cluster or client that does not exist.
    """
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ConfigError(f"{path}: a model is written as {', '.join(_WRITERS)}, got {path.suffix or 'no ending'!r}")
    if cluster is not None and client is not None:
        raise ConfigError(f"name a cluster or a client, got cluster {cluster} and client {client}")
    model = trained.model(cluster) if client is None else trained.personal_model(client)
    federation = trained.federation
    whose = f"client {client}" if client is not None else f"cluster {cluster or 0}"
    facts = {
        "method": trained.label,
        "of": whose,
        "round": trained.round,
        "input": list(federation.shape.input),
        "normalize": federation.normalize,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with drafted(path) as draft:
        write(model, draft, torch.zeros(2, *federation.shape.input), facts)
    return f"{trained.label}, {whose}, after round {trained.round}: {path}"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def _write_safetensors(model: nn.Module, path: Path, example: Tensor, facts: dict[str, Any]) -> None:
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    path.write_bytes(save(_tensors(model), metadata))


def _write_pt(model: nn.Module, path: Path, example: Tensor, facts: dict[str, Any]) -> None:
    torch.save(_tensors(model), path)


def _write_onnx(model: nn.Module, path: Path, example: Tensor, facts: dict[str, Any]) -> None:
    try:
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            input_names=["x"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("n")},),  # any number of samples
            verbose=False,
        )
    except ImportError as error:
        raise ConfigError(
            f"an ONNX file needs the packages onnx and onnxscript: pip install onnx onnxscript ({error})"
        ) from error
    assert program is not None
    program.save(str(path))


_WRITERS: dict[str, Callable[[nn.Module, Path, Tensor, dict[str, Any]], None]] = {
    ".safetensors": _write_safetensors,
    ".pt": _write_pt,
    ".onnx": _write_onnx,
}
