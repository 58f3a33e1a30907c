"""The section `data.partition`."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from cfl_ray.config.part import BuiltinKind, PartConfig, meanings_of
from cfl_ray.config.section import ConfigSection, without_effect


class CutConfig(ConfigSection):
    """Randomly drawn clients with less training data than the others."""

    keep: float = Field(gt=0, lt=1, description="share of its training samples that each of these clients keeps")
    clients: int = Field(ge=1, description="number of clients to cut, drawn at random; no client is cut twice")


class PartitionConfig(PartConfig):
    """How the samples of a group are divided among its clients, and how many of them each client keeps."""

    part = "partition"
    where = "data.partition"
    group = "cfl_ray.partitions"
    keys_of_own = ("min_samples",)
    builtin = {
        "iid": BuiltinKind("at random, in equal or given sizes", ("sizes", "min_samples")),
        "dirichlet": BuiltinKind("label skew", ("alpha", "capped", "groups", "group_alpha", "min_samples")),
        "classes": BuiltinKind(
            "n classes per client", ("classes_per_client", "groups", "classes_per_group", "min_samples")
        ),
        "writer": BuiltinKind("one client per writer", ("min_samples",)),
    }

    kind: Any = Field("iid", description=meanings_of(builtin))
    clients: int | None = Field(
        40, ge=1, description="N, number of clients; null: every writer with at least min_samples samples (writer)"
    )
    samples: int | None = Field(None, ge=1, description="most training samples of a client; null: no limit")
    sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="number of samples of each client in order, held-out ones included; the rest goes unused (iid). "
        "null: equal sizes",
    )
    cut: list[CutConfig] = Field(
        [],
        description="reduce random clients to a share of their training samples, after `samples` is applied, "
        "e.g. [{keep: 0.1, clients: 3}]",
    )
    alpha: float = Field(
        0.1, gt=0, description="concentration of the Dirichlet distribution over the clients of a group, per class"
    )
    capped: bool = Field(
        True,
        description="true: a client that has an even share of the samples gets none of the remaining classes "
        "(NIID-Bench); false: no cap (dirichlet)",
    )
    classes_per_client: int = Field(2, ge=1, description="number of classes of one client (classes)")
    groups: int | None = Field(
        None,
        ge=2,
        description="number of true groups made by label skew: samples are divided among the groups, then inside each "
        "(dirichlet, classes); null: directly among the clients",
    )
    group_alpha: float = Field(
        0.1,
        gt=0,
        description="concentration of the Dirichlet distribution over groups, per class (dirichlet with groups)",
    )
    classes_per_group: int = Field(
        3, ge=1, description="number of classes of one group; all classes are used equally often (classes with groups)"
    )
    min_samples: int = Field(
        1,
        ge=1,
        description="fewest samples that the division gives to a client, held-out ones included; dirichlet draws again "
        "until all have them, writer excludes smaller clients",
    )

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that the kind does not use, or uses with groups alone."""
        of_groups = {"dirichlet": "group_alpha", "classes": "classes_per_group"}.get(self.kind, "")
        without = [] if self.groups else without_effect(self, self.where, [of_groups], f"{self.where}.groups is null")
        return super().warnings + without

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.sizes is not None and self.kind != "iid":
            raise ValueError(f"sizes needs kind iid, kind is {self.kind}; use samples or cut")
        if self.sizes is not None and len(self.sizes) != self.clients:
            raise ValueError(
                f"sizes has {len(self.sizes)} entries, clients is {self.clients}; give every client its size"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.groups is not None and self.kind not in ("dirichlet", "classes"):
            raise ValueError(
                f"groups needs kind dirichlet or classes, kind is {self.kind}; "
                "groups that differ otherwise are a data.shift"
            )
        if self.groups is not None and self.kind == "classes" and self.classes_per_client > self.classes_per_group:
            raise ValueError(
                f"classes_per_client is {self.classes_per_client}, but a group has {self.classes_per_group} classes; "
                "lower it or raise classes_per_group"
            )
        return self
