"""The section `local`."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.section import ConfigSection


class LocalConfig(ConfigSection):
    """Local training of a client in one round: SGD, by default with a fresh momentum buffer, or another optimiser."""

    epochs: int = Field(5, ge=1, le=100_000, description="E, local epochs per round")
    steps: int | None = Field(
        None, ge=1, description="local SGD steps per round, instead of epochs; null: epochs decide"
    )
    batch_size: int | None = Field(
        None, ge=1, description="B, samples per batch; null: all samples of the client in one batch"
    )
    drop_last: bool | Literal["single"] = Field(
        False,
        description="true: the samples of an epoch that fill no batch are left out, others in each epoch | single: a "
        "last batch of one sample is left out, on which BatchNorm cannot train | false: the last batch may be smaller",
    )
    lr: float = Field(0.1, gt=0, le=100, description="eta, learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="rho, momentum of SGD; 0: none")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="factor of the L2 penalty in the gradient; 0: none")
    persist: bool = Field(
        False,
        description="true: a client keeps its momentum buffer for its next round, if it keeps the result of the "
        "training (official code of CFL); false: every round begins with zeros",
    )
    optimizer: Any = Field(
        "sgd",
        description="sgd (with momentum and weight_decay above) | adam | adamw | adamax | nadam | radam | rmsprop | "
        "adagrad | adadelta | rprop | path/to/file.py:Name of a torch.optim.Optimizer; all but sgd are created "
        "anew in every round, with lr as their learning rate",
    )
    optimizer_options: dict[str, Any] = Field(
        {}, description="keyword arguments of the optimiser, e.g. {weight_decay: 0.01}; sgd has none"
    )
    schedule: Any = Field(
        "constant",
        description="factor of lr in each round: constant | step | exponential | linear | cosine | warmup | "
        "path/to/file.py:function of (round, rounds); with options {step: {every: 10, gamma: 0.5}}",
    )
    step_schedule: Any = Field(
        "constant",
        description="further factor of lr in each local step: likewise, of (step, steps), from 1 in each round",
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="largest norm of the gradient of a step, with proximal terms, before weight decay; larger "
        "gradients are scaled down to it. null: no limit",
    )
    augment: list[Any] = Field(
        [],
        description="random changes of the training samples, anew in every epoch, one after another: crop (out of the "
        "image with a black frame, {crop: {padding: 4}}) | flip (left and right) | path/to/file.py:function of (x, "
        "draw, black)",
    )

    @field_validator("drop_last", mode="before")
    @classmethod
    def _check_drop_last(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() not in ("single", "true", "false"):
            raise ValueError(f"it is true, false or single, got {value!r}")
        return value

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "sgd":
            return self
        for key, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay), ("persist", self.persist)):
            if value:
                other = "its moments are not kept" if key == "persist" else "set it in optimizer_options if it has one"
                raise ValueError(f"{key} is that of sgd, got {value} with optimizer {self.optimizer}; {other}")
        return self
