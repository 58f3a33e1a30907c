"""The sections of an experiment: every key with its type, default, range and meaning."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from cfl_ray.config.client_ids import compress_ids, parse_ids
from cfl_ray.core.errors import ConfigError, did_you_mean

SOURCES = (  # those that are divided among clients are functions of `data/sources.py`, by these names
    "digits",
    "mnist",
    "fashion_mnist",
    "cifar10",
    "images",
    "image_folder",
    "csv",
    "hf_disk",
    "femnist",
    "femnist_leaf",
    "shakespeare_leaf",
    "sent140_leaf",
    "mnist_by_writer",
    "synthetic",
    "arrays",
)
WITH_TESTS = ("digits", "mnist", "fashion_mnist", "cifar10", "mnist_by_writer")  # always come with a test part
UNDIVIDED = ("synthetic", "arrays")  # sources whose samples already belong to clients


class ConfigSection(BaseModel):
    """One section of the YAML file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


# --- data ---------------------------------------------------------------------------------------


class ShiftConfig(ConfigSection):
    """How the true groups of clients differ (StoCFL, section 5)."""

    kind: Literal["none", "rotated", "shifted", "pathological", "hybrid", "rotated_labels"] = Field(
        "none",
        description="how groups differ: none | rotated (rotated images) | shifted (labels moved by an offset) | "
        "pathological (label sets) | hybrid (two data sets) | rotated_labels (every angle with every label set)",
    )
    angles: list[int] = Field(
        [0, 90, 180, 270],
        description="rotation of each group in degrees, multiples of 90, counter-clockwise (rotated, rotated_labels)",
    )
    offsets: list[int] = Field(
        [0, 3, 6, 9], description="offset s of each group: label y becomes (y + s) mod C (shifted)"
    )
    label_sets: list[list[int]] = Field(
        [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group (pathological, rotated_labels)"
    )
    other: str = Field("fashion_mnist", description="second data set, that of the second group (hybrid)")

    @model_validator(mode="after")
    def _check_angles(self) -> Self:
        bad = [angle for angle in self.angles if angle % 90]
        if bad:
            raise ValueError(f"angles must be multiples of 90 degrees, got {bad}")
        return self


class CutConfig(ConfigSection):
    """Randomly drawn clients with less training data than the others."""

    keep: float = Field(gt=0, lt=1, description="share of its training samples that each of these clients keeps")
    clients: int = Field(ge=1, description="number of clients to cut, drawn at random; no client is cut twice")


class PartitionConfig(ConfigSection):
    """How the samples of a group are divided among its clients, and how many of them each client keeps."""

    kind: Literal["iid", "dirichlet", "classes", "writer"] = Field(
        "iid",
        description="iid | dirichlet (label skew) | classes (n classes per client) | writer (one client per writer)",
    )
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


class TestDataConfig(ConfigSection):
    """The test data of each client: cluster view, label view or hold-out."""

    view: Literal["cluster", "label", "holdout"] | None = Field(
        None,
        description="cluster: the official test set, shifted like the client's group | label: its images of the "
        "client's labels | holdout: a share of the client's own samples | null: what has the client's own "
        "distribution: label for partitions by classes or unequal sizes; holdout for dirichlet, writer and sources "
        "without test data; cluster otherwise",
    )
    fraction: float = Field(0.2, gt=0, lt=1, description="share of a client's samples held out for testing (holdout)")
    pool: bool = Field(
        False,
        description="true: divide the official training and test images together; false: the official test images go "
        "unused (holdout)",
    )
    max_images: int | None = Field(None, ge=1, description="most images of a shared test set; null: all of them")

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.pool and self.view not in ("holdout", None):
            raise ValueError(
                f"pool divides the test images among the clients, so view must be holdout, not {self.view}"
            )
        return self


class ColumnsConfig(ConfigSection):
    """Names of the columns of image parquet files, CSV files and saved Hugging Face data sets."""

    image: str = Field(
        "image",
        description="input column: a struct of `bytes` (PNG, JPEG) and `path`, or plain bytes; hf_disk: also lists of "
        "numbers of one length, or of token ids",
    )
    features: list[str] | None = Field(
        None, description="columns of numbers that make up the input (csv); null: all but label, client and group"
    )
    label: str = Field("label", description="label column, integers from 0; csv: also words, numbered in sorted order")
    client: str | None = Field(
        None, description="column with the client of each sample, integers or strings (kind writer); null: no clients"
    )
    group: str | None = Field(
        None, description="column with the true group of each sample's client; null: no true groups are known"
    )


class DataConfig(ConfigSection):
    """The federation: its samples, and how they are divided among clients."""

    source: str = Field(
        "digits",
        description="data set: " + " | ".join(SOURCES) + " | path/to/file.py:function that returns arrays or a "
        "Federation",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the function (file.py:function)")
    root: str | None = Field(
        None,
        description="folder of the data set (arrays: the .npz file); null: the environment variable CFL_RAY_DATA, "
        "then ./data",
    )
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="number of token ids, for inputs that are token ids 0 .. vocabulary - 1 (hf_disk) or words "
        "(sent140_leaf; null: 10000); null: the inputs are not tokens",
    )
    download: bool = Field(False, description="let torchvision download the data set where it is missing")
    train_files: str | None = Field(
        None,
        description="glob below root of the training files (images, femnist, csv), folder of LEAF's files "
        "(*_leaf), or subfolder of the training part (image_folder, hf_disk); null: the usual places",
    )
    test_files: str | None = Field(
        None,
        description="glob below root of the test files (images, femnist, csv), or subfolder of the test part "
        "(image_folder, hf_disk); null: there are none, and test.view must be holdout",
    )
    columns: ColumnsConfig = ColumnsConfig()
    normalize: list[list[float]] | None = Field(
        None, description="[means, standard deviations] per channel, after scaling to [0, 1]; null: only scaling"
    )
    shift: ShiftConfig = ShiftConfig()
    partition: PartitionConfig = PartitionConfig()
    test: TestDataConfig = TestDataConfig()
    shards: str | None = Field(
        None,
        description="folder in which shards are written and reused, or the folder of one prepared federation: a path "
        "or any URI that pyarrow knows; null: below `output`",
    )
    federation: Any = Field(None, exclude=True, description="a Federation made in Python, instead of a source")
    synthetic_shape: list[int] = Field([1, 28, 28], description="shape of one input, channels first (synthetic)")
    synthetic_samples: int = Field(50, ge=1, description="training samples per client (synthetic)")
    synthetic_groups: int = Field(4, ge=1, description="number of true groups (synthetic)")
    synthetic_classes: int = Field(10, ge=2, description="C, number of classes (synthetic)")

    @model_validator(mode="after")
    def _choose_view(self) -> Self:
        """Puts the view in the place of null, so that it is on record; arrays say themselves what they can be."""
        if self.test.view is None and self.source != "arrays" and not self.is_function:
            object.__setattr__(self, "test", self.test.model_copy(update={"view": self._own_view()}))
        return self

    @staticmethod
    def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
        """Returns the section's values without the defaults of keys that data sets of images do not have.

        Runs and shards are recognised by a hash of this.
        """
        unused: tuple[tuple[str, Any], ...] = (("options", {}), ("vocabulary", None), ("features", None))
        kept = {key: value for key, value in values.items() if (key, value) not in unused}
        return kept | {
            "columns": {key: value for key, value in values["columns"].items() if (key, value) not in unused}
        }

    @property
    def is_function(self) -> bool:
        """Whether the source is a function in a file of the user."""
        return ":" in self.source

    def with_view(self, has_tests: bool) -> "DataConfig":
        """This section with a view in the place of null. has_tests: whether the data have a test part."""
        if self.test.view is not None:
            return self
        return self.model_copy(update={"test": self.test.model_copy(update={"view": self._own_view(has_tests)})})

    def _own_view(self, has_tests: bool | None = None) -> str:
        """The view whose test data have each client's own distribution. has_tests: None for what the source has."""
        part = self.partition
        if self.source == "synthetic":
            return "cluster"
        if has_tests is None:
            has_tests = self.test_files is not None or self.source in WITH_TESTS
        if self.test.pool or part.kind in ("dirichlet", "writer") or not has_tests:
            return "holdout"
        return "label" if part.kind == "classes" or part.sizes or part.cut else "cluster"

    @property
    def view_warning(self) -> str | None:
        """Why the given view does not measure clients on their own distribution; None where it does."""
        part = self.partition
        skewed = part.kind in ("dirichlet", "classes") and self.source not in UNDIVIDED
        if self.test.view != "cluster" or not skewed:
            return None
        return (
            f"data.test.view cluster tests clients on all classes alike, but partition.kind {part.kind} gives each "
            f"client classes of its own; {self._own_view()} tests it on its own distribution"
        )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for name in (self.source, self.shift.other):
            if name not in SOURCES and ":" not in name:
                raise ValueError(f"unknown data set {name!r}{did_you_mean(name, SOURCES)}")
        return self

    @model_validator(mode="after")
    def _check_division(self) -> Self:
        part, pool = self.partition, self.test.pool
        if part.groups is not None and self.shift.kind != "none":
            raise ValueError(
                f"partition.groups ({part.groups}) and shift.kind ({self.shift.kind}) both make true groups; "
                "set one of them"
            )
        if pool and part.kind == "writer":
            raise ValueError(
                "test.pool: the writers of the test images are not known, so partition.kind cannot be writer; "
                "set pool: false"
            )
        if self.source in UNDIVIDED:
            division = {
                "partition.groups": part.groups,
                "partition.sizes": part.sizes,
                "partition.cut": part.cut,
                "test.pool": pool,
            }
            if key := next((key for key, value in division.items() if value), None):
                raise ValueError(f"{key} has no meaning for source {self.source}, which is not divided; leave it out")
        return self


# --- training -----------------------------------------------------------------------------------


class ModelConfig(ConfigSection):
    """The network that every client trains."""

    name: Any = Field(
        "mlp", description="name of a registered model, or path/to/file.py:Factory that returns a torch.nn.Module"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the model, e.g. {hidden: 200}")


class LocalConfig(ConfigSection):
    """Local training of a client in one round: SGD, by default with a fresh momentum buffer."""

    epochs: int = Field(5, ge=1, le=100_000, description="E, local epochs per round")
    steps: int | None = Field(
        None, ge=1, description="local SGD steps per round, instead of epochs; null: epochs decide"
    )
    batch_size: int | None = Field(
        None, ge=1, description="B, samples per batch; null: all samples of the client in one batch"
    )
    lr: float = Field(0.1, gt=0, le=100, description="eta, learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="rho, momentum of SGD; 0: none")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="factor of the L2 penalty in the gradient; 0: none")
    persist: bool = Field(
        False,
        description="true: a client keeps the momentum buffer of the training whose result it keeps, for its next "
        "round (the official code of CFL); false: every round begins with zeros",
    )


class AvailabilityConfig(ConfigSection):
    """Which clients can be reached in a round. A number stands for {kind: bernoulli, chance: number}."""

    kind: Literal["always", "bernoulli", "diurnal", "trace"] = Field(
        "always",
        description="always | bernoulli (the same chance in every round) | diurnal (day and night) | "
        "trace (recorded intervals)",
    )
    chance: float = Field(
        0.5,
        gt=0,
        le=1,
        description="chance that a client can be reached in a round (bernoulli); mean of that chance over a day "
        "(diurnal)",
    )
    amplitude: float = Field(0.4, ge=0, le=1, description="swing of the chance around its mean (diurnal)")
    period: float = Field(24.0, gt=0, description="length of a day in rounds (diurnal)")
    zones: int | None = Field(
        None,
        ge=1,
        description="number of time zones that the clients are spread over; null: every client has its own phase "
        "(diurnal)",
    )
    file: str | None = Field(
        None,
        description="CSV or parquet file with columns client, from, to: a client can be reached in rounds from .. to, "
        "both included; a client without a row never can (trace)",
    )
    unit: float = Field(
        1.0,
        gt=0,
        description="length of a round in the time unit of the file, e.g. 60 for seconds and rounds of a minute "
        "(trace)",
    )

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if (self.kind == "trace") != (self.file is not None):
            raise ValueError(f"kind trace and a file belong together, got kind {self.kind} and file {self.file}")
        return self


class CohortConfig(ConfigSection):
    """The clients that are selected for a round."""

    fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="R, share of the clients online that a round selects: m = max(1, floor(R * online))",
    )
    clients: int | None = Field(
        None, ge=1, description="m, clients per round, instead of a fraction; null: the fraction decides"
    )
    availability: AvailabilityConfig = Field(
        AvailabilityConfig(),
        description="which clients can be reached; a number: each with this chance, drawn independently per round",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="chance that a selected client fails before it reports; 0: never"
    )

    @field_validator("availability", mode="before")
    @classmethod
    def _from_chance(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {} if value == 1 else {"kind": "bernoulli", "chance": value}
        return value


# --- schedule -----------------------------------------------------------------------------------


def _parse_clients(value: Any) -> Any:
    """Returns clients as YAML names them, 7, "80-99" or a list of both, as a list of ids."""
    items = [value] if isinstance(value, (str, int)) else value
    if not isinstance(items, (list, tuple)):
        return value
    try:
        return [client for item in items for client in (parse_ids([item]) if isinstance(item, str) else [item])]
    except ConfigError as error:
        raise ValueError(str(error)) from None


ClientIds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_parse_clients), PlainSerializer(compress_ids)]


class DataChangeConfig(ConfigSection):
    """Clients whose data change, from one round on."""

    clients: ClientIds = Field(min_length=1, description="ids and ranges of the clients whose data change")
    rotate: int = Field(0, description="rotate their images by this many degrees more, a multiple of 90; 0: not at all")
    relabel: int = Field(0, description="s: label y becomes (y + s) mod C, after earlier changes; 0: not at all")
    data_of: ClientIds | None = Field(
        None,
        description="take over the present data of these clients, one for each of `clients`; the same clients in "
        "another order swap their data. null: keep their own",
    )

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.rotate % 90:
            raise ValueError(f"rotate must be a multiple of 90 degrees, got {self.rotate}")
        if self.data_of is None and not self.rotate % 360 and not self.relabel:
            raise ValueError("nothing would change; say rotate, relabel or data_of")
        if self.data_of is not None and len(self.data_of) != len(self.clients):
            raise ValueError(f"data_of names {len(self.data_of)} clients for {len(self.clients)}; give one for each")
        return self


class EventConfig(ConfigSection):
    """Clients that join, leave or change before the clients of a round are selected."""

    round: int = Field(ge=1, description="round before which the event takes place, counted from 1")
    join: ClientIds = Field(
        [],
        description="clients that join, ids and ranges, e.g. [3, 80-99]; they are absent before, unless they left "
        "earlier",
    )
    leave: ClientIds = Field([], description="clients that leave, ids and ranges")
    change: list[DataChangeConfig] = Field(
        [], description="changes of clients' data, in the order given, e.g. [{clients: 0-9, rotate: 90}]"
    )


# --- evaluation and execution -------------------------------------------------------------------


class EvaluationConfig(ConfigSection):
    """The evaluation: what it measures, and how often."""

    every: int = Field(
        1, ge=1, description="rounds from one evaluation to the next; the last round is always evaluated"
    )
    clients: int | None = Field(
        None, ge=1, description="number of clients evaluated, one random sample for all rounds; null: all clients"
    )
    local: bool = Field(True, description="also measure P-local: each client's model right after its own training")
    local_images: int = Field(
        500,
        ge=1,
        description="most images of a shared test set for a model that belongs to one client (P-local, personal "
        "models)",
    )
    choice_samples: int | None = Field(
        256,
        ge=1,
        description="number of first training samples on which a client compares models to choose one for the "
        "evaluation (ifca, ifca_cam); null: as many as the method uses in training, where this limit has no effect",
    )
    tuned_epochs: int = Field(
        0, ge=0, description="F of P-tune(F): local epochs of fine-tuning before the test; 0: do not measure it"
    )
    target: float | None = Field(
        None,
        gt=0,
        le=1,
        description="accuracy for rounds_to_target and mbit_to_target, 0..1; null: do not measure them",
    )


class RuntimeConfig(ConfigSection):
    """The processes of a run."""

    address: str | None = Field(
        None,
        description="Ray cluster to use; auto: the one running on this machine; null: RAY_ADDRESS, or a new one on "
        "this machine for this run",
    )
    hosts: int | None = Field(
        None, ge=1, description="number of client host processes; null: one per CPU (or per GPU share)"
    )
    clients_per_host: int | None = Field(
        None, ge=1, description="most clients of one host; 1: one process per client; null: no limit"
    )
    gpus_per_host: float = Field(
        0.0, ge=0, le=16, description="share of a GPU that each host reserves, e.g. 0.25; 0: none"
    )
    cpus_per_host: float = Field(1.0, gt=0, description="CPUs that each host reserves; it computes with one thread")
    engine: Literal["auto", "sequential", "manual", "vectorised", "span"] = Field(
        "auto",
        description="how a host trains its clients: sequential (one by one) | manual (one by one, without autograd) | "
        "vectorised (together) | span (full-batch shortcut) | auto (the fastest in a short measurement, which is kept "
        "with the runs)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where hosts compute: cpu | cuda | auto (cuda on hosts that reserve a share of a GPU)"
    )
    round_deadline: float | None = Field(
        None,
        gt=0,
        description="seconds for one piece of a host's work (a few clients), loading included, before the host is "
        "ended and its clients are tried one by one; a client over the limit then is excluded from the round. null: no "
        "limit. No effect in a run within one process",
    )
    retries: int = Field(
        3,
        ge=0,
        description="restarts of one host before the run goes on without it, and of the server before the run ends; "
        "the count begins anew after ten minutes without a fault",
    )
    wait_for_hosts: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        "auto",
        description="seconds to wait for machines while a run has no client host; null: for ever; auto: 900 for the "
        "first host, for ever once the run has had one. A number or null also accepts more hosts than the cluster has "
        "room for at the start, for clusters that grow on demand",
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="rounds from one checkpoint to the next; the last round always has one. null: by what a checkpoint "
        "costs, sqrt(2 C M) seconds apart, with C the seconds that one takes and M = 1 hour between faults (3 ms: "
        "every 4.6 s; 1 s: every 85 s)",
    )
    keep_last: int = Field(3, ge=1, description="number of checkpoints kept")


class TrackingConfig(ConfigSection):
    """Where results are recorded."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, or an SQLite store below `output`"
    )
    experiment: str = Field("cfl_ray", description="name of the MLflow experiment")
    enabled: bool = Field(True, description="record to MLflow; false: only write the files of the run directory")
