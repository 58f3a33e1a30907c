"""The sections of an experiment: every key with its type, default, range and meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from cfl_ray.core.errors import ConfigError, nearest
from cfl_ray.core.ids import parse_ids, shorten

SOURCES = ("digits", "mnist", "fashion_mnist", "cifar10", "images", "femnist", "femnist_leaf", "mnist_by_writer", "synthetic", "arrays")
UNDIVIDED = ("synthetic", "arrays")  # sources that say themselves who holds what


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Shift(Section):
    """How the groups differ: the true clusters of the federation (StoCFL, section 5)."""

    kind: Literal["none", "rotated", "shifted", "pathological", "hybrid", "rotated_labels"] = Field(
        "none", description="none | rotated (images) | shifted (labels) | pathological (label sets) | hybrid (two data sets) | rotated_labels"
    )
    angles: list[int] = Field([0, 90, 180, 270], description="rotation of each group in degrees; multiples of 90 (rotated, rotated_labels)")
    offsets: list[int] = Field([0, 3, 6, 9], description="s in y -> (y + s) mod C of each group (shifted)")
    label_sets: list[list[int]] = Field([[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group (pathological, rotated_labels)")
    other: str = Field("fashion_mnist", description="the second data set of a hybrid")

    @model_validator(mode="after")
    def _angles(self):
        bad = [angle for angle in self.angles if angle % 90]
        if bad:
            raise ValueError(f"angles must be multiples of 90 degrees, got {bad}")
        return self


class Cut(Section):
    """Some clients that hold less than the others."""

    keep: float = Field(gt=0, lt=1, description="share of its training samples that each of them keeps")
    clients: int = Field(ge=1, description="how many, drawn at random from those that no other cut took")


class Partition(Section):
    """How the samples of a group are divided among its clients, and how much of it each keeps."""

    kind: Literal["iid", "dirichlet", "classes", "writer"] = Field("iid", description="iid | dirichlet | classes (n per client) | writer (natural)")
    clients: int | None = Field(40, ge=1, description="clients of the whole federation; null with writer: every writer that qualifies")
    samples: int | None = Field(None, ge=1, description="training samples per client at most; null: divide all of them")
    sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="samples of each client in order, held-out ones included; what they do not add up to is left over (iid). null: even shares"
    )
    cut: list[Cut] = Field([], description="cut random clients down to a share of their training samples, after `samples`: [{keep: 0.1, clients: 3}]")
    alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet distribution over clients (of one group), per class")
    capped: bool = Field(True, description="dirichlet: who holds an even share already gets none of further classes (NIID-Bench); false: plain")
    classes_per_client: int = Field(2, ge=1, description="classes of one client (classes)")
    groups: int | None = Field(None, ge=2, description="label skew of whole groups, which become the true ones: first divide among this many groups, then "
                               "inside each (dirichlet, classes); null: divide among the clients directly")  # fmt: skip
    group_alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet distribution over groups, per class (dirichlet with groups)")
    classes_per_group: int = Field(3, ge=1, description="classes of one group, drawn so that all are used equally often (classes with groups)")
    min_samples: int = Field(1, ge=1, description="fewest samples of a client as divided; dirichlet redraws, writer leaves smaller ones out")

    @model_validator(mode="after")
    def _sized(self):
        if self.sizes is not None and self.kind != "iid":
            raise ValueError(f"sizes needs kind iid, kind is {self.kind}; use samples or cut")
        if self.sizes is not None and len(self.sizes) != self.clients:
            raise ValueError(f"sizes has {len(self.sizes)} entries, clients is {self.clients}; give every client its size")
        return self

    @model_validator(mode="after")
    def _grouped(self):
        if self.groups is not None and self.kind not in ("dirichlet", "classes"):
            raise ValueError(f"groups needs kind dirichlet or classes, kind is {self.kind}; groups that differ otherwise are a data.shift")
        if self.groups is not None and self.kind == "classes" and self.classes_per_client > self.classes_per_group:
            raise ValueError(f"classes_per_client is {self.classes_per_client}, but a group has {self.classes_per_group} classes; "
                             "lower it or raise classes_per_group")  # fmt: skip
        return self


class Test(Section):
    """Which test data measures a client: cluster-view, label-view or hold-out."""

    view: Literal["cluster", "label", "holdout"] = Field(
        "cluster", description="cluster: the official test set shifted as the client's group; label: its images of the client's labels; holdout: a split of the client's own"
    )
    fraction: float = Field(0.2, gt=0, lt=1, description="share of a client's samples held out (holdout)")
    pool: bool = Field(False, description="divide the official training and test images together (holdout); false: the official test images go unused")
    max_images: int | None = Field(None, ge=1, description="keep at most this many images of each shared test set")

    @model_validator(mode="after")
    def _pooled(self):
        if self.pool and self.view != "holdout":
            raise ValueError(f"pool divides the test images among the clients, so view must be holdout, not {self.view}")
        return self


class Columns(Section):
    """Names of the columns of image parquet files."""

    image: str = Field("image", description="image column: struct of `bytes` (PNG, JPEG) and `path`, or bytes")
    label: str = Field("label", description="integer label column")
    client: str | None = Field(None, description="column whose value says whose sample it is (partition.kind: writer)")
    group: str | None = Field(None, description="column with the true group of a client, if one is known")


class Data(Section):
    """The federation: which samples exist and who holds them."""

    source: str = Field("digits", description=" | ".join(SOURCES))
    root: str | None = Field(None, description="folder of the data (arrays: the .npz file); null: the environment variable CFL_RAY_DATA, then ./data")
    download: bool = Field(False, description="let torchvision fetch the data set when it is absent")
    train_files: str | None = Field(None, description="glob below root of the training parquet files (images, femnist) or LEAF folder")
    test_files: str | None = Field(None, description="glob below root of the test files; null: then test.view must be holdout")
    columns: Columns = Columns()
    normalize: list[list[float]] | None = Field(None, description="[mean per channel, std per channel] after scaling to [0, 1]; null: scaling only")
    shift: Shift = Shift()
    partition: Partition = Partition()
    test: Test = Test()
    shards: str | None = Field(None, description="where shards are written and reused, or one federation's own folder: a path or any URI pyarrow knows; null: below `output`")
    federation: Any = Field(None, exclude=True, description="a Federation made in Python, instead of a source")
    synthetic_shape: list[int] = Field([1, 28, 28], description="input shape (synthetic)")
    synthetic_samples: int = Field(50, ge=1, description="samples per client (synthetic)")
    synthetic_groups: int = Field(4, ge=1, description="true groups (synthetic)")
    synthetic_classes: int = Field(10, ge=2, description="classes (synthetic)")

    @model_validator(mode="after")
    def _known(self):
        for name in (self.source, self.shift.other):
            if name not in SOURCES:
                raise ValueError(f"unknown data set {name!r}{nearest(name, SOURCES)}")
        return self

    @model_validator(mode="after")
    def _divisible(self):
        part, pool = self.partition, self.test.pool
        if part.groups is not None and self.shift.kind != "none":
            raise ValueError(f"partition.groups ({part.groups}) and shift.kind ({self.shift.kind}) both make true groups; set one of them")
        if pool and part.kind == "writer":
            raise ValueError("test.pool: who made the test images is not known, so partition.kind cannot be writer; set pool: false")
        told = {"partition.groups": part.groups, "partition.sizes": part.sizes, "partition.cut": part.cut, "test.pool": pool}
        if self.source in UNDIVIDED and (key := next((key for key, value in told.items() if value), None)):
            raise ValueError(f"{key} has no meaning for source {self.source}, which is not divided; leave it out")
        return self


class Model(Section):
    """The network every client trains."""

    name: Any = Field("mlp", description="a registered model, or path/to/file.py:Factory that returns a torch.nn.Module")
    options: dict[str, Any] = Field({}, description="arguments of the model, e.g. {hidden: 200}")


class Local(Section):
    """What one client does in one round: SGD, by default with a fresh momentum buffer."""

    epochs: int = Field(5, ge=1, le=100_000, description="E, local epochs")
    steps: int | None = Field(None, ge=1, description="local steps instead of epochs")
    batch_size: int | None = Field(None, ge=1, description="B; null: the client's whole data in one batch")
    lr: float = Field(0.1, gt=0, le=100, description="eta, learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="rho")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="L2 penalty added to the gradient")
    persist: bool = Field(False, description="a client's momentum buffer survives the round, in the training whose result it holds (the official code of CFL)")


class Availability(Section):
    """Which clients can be reached in a round. A number stands for {kind: bernoulli, chance: number}."""

    kind: Literal["always", "bernoulli", "diurnal", "trace"] = Field(
        "always", description="always | bernoulli (the same chance in every round) | diurnal (day and night) | trace (recorded intervals)"
    )
    chance: float = Field(0.5, gt=0, le=1, description="chance that a client is reachable in a round (bernoulli); its mean over a day (diurnal)")
    amplitude: float = Field(0.4, ge=0, le=1, description="how far the chance swings around its mean (diurnal)")
    period: float = Field(24.0, gt=0, description="rounds of a day (diurnal)")
    zones: int | None = Field(None, ge=1, description="time zones that clients are spread over; null: every client has a phase of its own (diurnal)")
    file: str | None = Field(None, description="CSV or parquet with columns client, from, to: reachable in rounds from .. to, both included; who has no row never is (trace)")
    unit: float = Field(1.0, gt=0, description="length of a round in the unit of the trace, e.g. 60 where it counts seconds and a round takes a minute (trace)")

    @model_validator(mode="after")
    def _traced(self):
        if (self.kind == "trace") != (self.file is not None):
            raise ValueError(f"kind trace and a file belong together, got kind {self.kind} and file {self.file}")
        return self


class Cohort(Section):
    """Who takes part in a round."""

    fraction: float = Field(0.5, gt=0, le=1, description="R: m = max(1, floor(R * clients online))")
    clients: int | None = Field(None, ge=1, description="m itself, instead of a fraction")
    availability: Availability = Field(Availability(), description="which clients can be reached; a number: each with this chance, independently per round")
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that a selected client fails before it reports")

    @field_validator("availability", mode="before")
    @classmethod
    def _chance(cls, value):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {} if value == 1 else {"kind": "bernoulli", "chance": value}
        return value


def _expanded(value: Any) -> Any:
    """Clients as YAML names them, 7, "80-99" or a list of both, as a list of ids."""
    items = [value] if isinstance(value, (str, int)) else value
    if not isinstance(items, (list, tuple)):
        return value
    try:
        return [one for item in items for one in (parse_ids([item]) if isinstance(item, str) else [item])]
    except ConfigError as error:
        raise ValueError(str(error)) from None


ClientIds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_expanded), PlainSerializer(shorten)]


class DataChange(Section):
    """Clients that hold other data from now on."""

    clients: ClientIds = Field(min_length=1, description="who")
    rotate: int = Field(0, description="turn their images by so many degrees more, a multiple of 90")
    relabel: int = Field(0, description="s in y -> (y + s) mod C, on top of what was")
    data_of: ClientIds | None = Field(None, description="take over the data that these clients have, one for each; two lists crosswise: a swap")

    @model_validator(mode="after")
    def _something(self):
        if self.rotate % 90:
            raise ValueError(f"rotate must be a multiple of 90 degrees, got {self.rotate}")
        if self.data_of is None and not self.rotate % 360 and not self.relabel:
            raise ValueError("nothing would change; say rotate, relabel or data_of")
        if self.data_of is not None and len(self.data_of) != len(self.clients):
            raise ValueError(f"data_of names {len(self.data_of)} clients for {len(self.clients)}; give one for each")
        return self


class Event(Section):
    """Clients that come, go or change before a round is drawn."""

    round: int = Field(ge=1, description="the round before which it happens, counted from 1")
    join: ClientIds = Field([], description="clients that come: absent before, unless they left earlier. Ids and ranges: [3, 80-99]")
    leave: ClientIds = Field([], description="clients that go")
    change: list[DataChange] = Field([], description="clients whose data change, e.g. [{clients: 0-9, rotate: 90}]; in the order given")


class Evaluation(Section):
    """What is measured, and how often."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    clients: int | None = Field(None, ge=1, description="evaluate a fixed random sample of this many clients; null: all")
    local: bool = Field(True, description="also P-local: test what a client holds right after its own training")
    local_images: int = Field(500, ge=1, description="images of a shared test set used for models that belong to one client (P-local, personal models)")
    tuned_epochs: int = Field(0, ge=0, description="F of P-tune(F): local epochs before testing; 0: off")
    target: float | None = Field(None, gt=0, le=1, description="accuracy for rounds_to_target and mbit_to_target")


class Runtime(Section):
    """Where it runs."""

    address: str | None = Field(None, description="Ray cluster; null: RAY_ADDRESS, else one on this machine for this run; auto: the running one")
    hosts: int | None = Field(None, ge=1, description="client host processes; null: one per CPU (or per GPU share)")
    clients_per_host: int | None = Field(None, ge=1, description="clients one host may hold; 1: one process per client. null: no limit")
    gpus_per_host: float = Field(0.0, ge=0, le=16, description="share of a GPU that each host reserves, e.g. 0.25")
    cpus_per_host: float = Field(1.0, gt=0, description="CPUs each host reserves; it computes with one thread")
    engine: Literal["auto", "sequential", "vectorised", "span"] = Field(
        "auto", description="how a host trains its clients: one by one, together, or by the full-batch shortcut; auto: by a short measurement, kept beside the runs"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where the host was given a share of a GPU")
    round_deadline: float | None = Field(
        None, gt=0, description="seconds a host may be at work on one piece (up to 8 clients; a new host loads what it needs with the first) before it is ended and its clients are tried again one by one; who takes longer then is left out of the round. null: no limit. Without effect in one process"
    )
    retries: int = Field(3, ge=0, description="restarts of one host, or of the server, before the run goes on without it; ten minutes without a fault and the count begins anew")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    keep_last: int = Field(3, ge=1, description="checkpoints kept")


class Tracking(Section):
    """Where results go."""

    uri: str | None = Field(None, description="MLflow; null: MLFLOW_TRACKING_URI, else an SQLite store below `output`")
    experiment: str = Field("cfl_ray", description="name of the MLflow experiment")
    enabled: bool = Field(True, description="false: only the files of the run directory")
