"""Models of a run as files for other programs: safetensors, PyTorch, ONNX, MLflow."""

import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from cfl_ray.errors import ConfigError
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.system.files import SHARED, drafted, private_umask
from cfl_ray.tracking import save_model

_ENDINGS = (".safetensors", ".pt", ".onnx")


def export_model(trained: TrainedMethod, path: Path, cluster: int | None = None, client: int | None = None) -> str:
    """Writes the model of a cluster, or the model that a client predicts with, and returns a description of the file.

    The ending of `path` is the format:
        .safetensors  parameters and buffers by name
        .pt           the same, for `torch.load` and `load_state_dict`
        .onnx         the network with its parameters; needs the packages onnx and onnxscript

    The tensors of a mixture of K models are `models.0.NAME` and so on, and their weights `weight_K`, float64 (K,).
    Frozen parameters of several models are written once; a safetensors file has them under their first name, and
    `shared` in its metadata maps the other names to the first.
    The metadata of a safetensors file also name method, cluster or client, round, input shape, scale and normalisation
    of inputs, and the names of the classes if the data set has them.
    Raises ConfigError for another ending, and for a cluster or client that does not exist.
    """
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"{path}: a model is written as {', '.join(_ENDINGS)}, got {path.suffix or 'no ending'!r}")
    if cluster is not None and client is not None:
        raise ConfigError(f"name a cluster or a client, got cluster {cluster} and client {client}")
    model = trained.model(cluster) if client is None else trained.personal_model(client)
    federation = trained.federation
    whose = f"client {client}" if client is not None else f"cluster {cluster or 0}"
    values: dict[str, object] = {
        "round": trained.round,
        "input": list(federation.shape.input),
        "scale": federation.scale,
        "normalize": federation.normalize,
    }
    if federation.shape.class_names:
        values["class_names"] = federation.shape.class_names
    metadata = {"method": trained.label, "of": whose} | {name: json.dumps(value) for name, value in values.items()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with drafted(path, SHARED) as draft:
        if path.suffix == ".onnx":
            _write_onnx(model, draft, _example(trained))
        elif path.suffix == ".pt":
            content = io.BytesIO()  # on a full disk, PyTorch's own writer raises an error without a reason
            torch.save(tensors, content)
            draft.write_bytes(content.getbuffer())
        else:
            first = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(tensors.items())}
            shared = {name: first[tensor.data_ptr(), tensor.shape] for name, tensor in tensors.items()}
            shared = {name: kept for name, kept in shared.items() if kept != name and tensors[name].numel()}
            metadata |= {"shared": json.dumps(shared)} if shared else {}
            draft.write_bytes(save({name: part for name, part in tensors.items() if name not in shared}, metadata))
    return f"{trained.label}, {whose}, after round {trained.round}: {path}"


def save_models(trained: TrainedMethod, directory: Path, warn: Callable[[str], None]) -> None:
    """Writes each cluster's model as an MLflow model to `directory`/cluster-0 and so on; removes other models from it.

    warn: receives a line for each model that cannot be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    example = _example(trained)
    for cluster in range(trained.num_clusters):
        model, folder = trained.model(cluster), directory / f"cluster-{cluster}"
        try:
            with torch.no_grad():
                outputs = model(example)
            with private_umask(), warnings.catch_warnings(action="ignore"):  # of torch.export, about weights of LSTMs
                save_model(model, example.numpy(), outputs.numpy(), folder)
        except Exception as error:  # boundary to torch.export and MLflow: a refused model does not end the run
            shutil.rmtree(folder, ignore_errors=True)
            reason = next(iter(str(error).strip().splitlines()), "")
            warn(
                f"{trained.label}: the model of cluster {cluster} is not logged to MLflow, since torch.export cannot "
                f"write it ({type(error).__name__}: {reason}); `cfl-ray export` writes its parameters"
            )


def _example(trained: TrainedMethod) -> Tensor:
    """Two samples of zeros in the shape of the federation's samples, so that no client data are exported."""
    shape = trained.federation.shape
    return torch.zeros(2, *shape.input, dtype=shape.dtype)


def _write_onnx(model: nn.Module, path: Path, example: Tensor) -> None:
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
