"""The section `runtime`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from cfl_ray.config.part import BuiltinKind, check_name
from cfl_ray.config.section import ConfigSection
from cfl_ray.core.engine_names import COMPILED, ENGINES
from cfl_ray.plugins.calling import reference_of
from cfl_ray.plugins.registry import Registry

BACKENDS: Registry[Any] = Registry(
    "backend",
    {
        "ray": BuiltinKind("on the hosts of a Ray cluster", keys=("runtime.address", "runtime.hosts")),
        "in_process": BuiltinKind("in this process, for debugging and tests; the results are the same"),
    },
    "cfl_ray.backends",
)


_SMALLEST_SHARE = 1e-4  # in which Ray counts CPUs and GPUs


def hosts_on_gpu(share: float) -> int:
    """Number of hosts with this share of a GPU that one GPU has room for."""
    return int(1 / share + 1e-9)


class RuntimeConfig(ConfigSection):
    """The processes of a run."""

    address: str | None = Field(
        None,
        description="Ray cluster to use; auto: the cluster running on this machine; null: RAY_ADDRESS, or a new one on "
        "this machine for this run",
    )
    hosts: int | None = Field(
        None, ge=1, description="number of client host processes; null: one per CPU (or per GPU share)"
    )
    clients_per_host: int | None = Field(
        None,
        ge=1,
        description="most clients of a host; 1: one process per client; null: no limit. A number changes the last "
        "bits of sums, since clients are added up one by one",
    )
    gpus_per_host: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of a GPU that each host reserves, e.g. 0.25; 0: none. A host trains on one GPU: more GPUs "
        "need more hosts",
    )
    cpus_per_host: float = Field(1.0, gt=0, description="CPUs that each host reserves; it computes with one thread")
    engine: Literal["auto", *ENGINES] = Field(  # type: ignore[valid-type]  # mypy knows no unpacked names
        "auto",
        description=f"how a host trains its clients: {' | '.join(f'{name} ({how})' for name, how in ENGINES.items())} "
        "| auto (by a rule from device, network, batch and cohort, the same on every machine). Engines agree up to "
        "rounding; a resumed run keeps its own",
    )
    compile: Literal["auto", "never", "always"] = Field(
        "auto",
        description="when engine: auto may choose compiled, whose program PyTorch makes once per machine, in "
        "10 to 60 s: auto (if manual cannot train the network and the rule expects to save more time than that) | "
        "always (if a step is faster) | never",
    )
    backend: Any = Field(
        "ray",
        description="what carries out the work of clients: ray (hosts of a cluster) | in_process (this process, for "
        "debugging) | path/to/file.py:Class, in this process; with options {file.py:Class: {key: value}}",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="where hosts compute: cpu | cuda | auto (cuda on hosts that reserve a share of a GPU). "
        "Devices agree up to rounding",
    )
    cpu_capability: Literal["default", "avx2", "avx512"] | None = Field(
        None,
        description="instructions that server and hosts use on an x86 CPU: default | avx2 | avx512 | null (the newest "
        "of each CPU). Instructions that all machines have make their last bits equal. In one process, set the "
        "variable ATEN_CPU_CAPABILITY as well",
    )
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="precision of local training: float32 | tf32 (of all products and convolutions on a GPU; no effect "
        "on a CPU) | bf16 (bfloat16 passes by autocast, on GPU and CPU, with sequential and vectorised). Models, their "
        "updates and sums are float32",
    )
    round_deadline: float | None = Field(
        None,
        gt=0,
        description="seconds for one chunk of a host's work (a few clients), loading included, before the host is "
        "ended and its clients are tried one by one; a client over the limit then is excluded from the round, so "
        "results then depend on the clock. null: no limit. No effect in a run within one process",
    )
    retries: int = Field(
        3,
        ge=0,
        description="restarts of a host before the run continues without it, and of the server before the run ends; "
        "the count begins anew after ten minutes without a fault",
    )
    wait_for_hosts: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        "auto",
        description="seconds to wait for machines while a run has no client host; null: for ever; auto: 900 for the "
        "first host, for ever once the run has had one. A number or null also accepts more hosts than the cluster has "
        "room for at the start, for clusters that grow on demand",
    )
    stall_warning: float = Field(
        30.0,
        gt=0,
        description="seconds without progress, at least, after which a host or the server is named on the terminal and "
        "in `cfl-ray status`. A host also has ten times the time that such work took before",
    )
    stall_limit: float | None = Field(
        600.0,
        gt=0,
        description="seconds without progress, at least, after which a host or the server is replaced and its work is "
        "done again, with the same results (a host: at least ten times as long as it takes to be named; six times this "
        "if nothing is known of such work yet, and for a server or a host that starts); null: never",
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="rounds from one checkpoint to the next; the last round always has one. null: by what a checkpoint "
        "costs, sqrt(2 C M) seconds apart, with C the seconds that it takes and M = 1 hour between faults (3 ms: "
        "every 4.6 s; 1 s: every 85 s)",
    )
    state_budget: int = Field(
        1 << 30,
        ge=0,
        description="bytes of client states in memory, on all machines together: a round after which more have changed "
        "since the last checkpoint has a checkpoint, after which hosts read states from its files",
    )
    keep_last: int = Field(3, ge=1, description="number of checkpoints kept")

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, value: Any) -> Any:
        name = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
        check_name(name, BACKENDS.kind, BACKENDS.builtin, BACKENDS.group)
        return value

    @field_validator("gpus_per_host", "cpus_per_host")
    @classmethod
    def _check_share(cls, value: float) -> float:
        if 0 < value < _SMALLEST_SHARE:
            raise ValueError(f"the smallest share is {_SMALLEST_SHARE:.4f}, got {value:g}")
        return value

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.compile == "never" and self.engine == COMPILED:
            raise ValueError(
                "engine: compiled needs a compiler; set runtime.compile to auto, or another runtime.engine"
            )
        return self

    @field_serializer("backend")
    def _backend_reference(self, value: Any) -> Any:
        return value if isinstance(value, dict) else reference_of(value)
