"""The section `model`."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from cfl_ray.config.part import check_part
from cfl_ray.config.section import FILE, ConfigSection


class ModelConfig(ConfigSection):
    """The network that every client trains."""

    name: Any = Field(
        "mlp", description="name of a registered model, or path/to/file.py:Factory that returns a torch.nn.Module"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the model, e.g. {hidden: 200}")
    weights: Annotated[str | None, FILE] = Field(
        None,
        description="safetensors file of pretrained weights with which the first models begin: tensors by their names "
        "in the model; those that the file lacks, such as a new head, begin at random. null: all do",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        check_part(value, "model")
        return value
