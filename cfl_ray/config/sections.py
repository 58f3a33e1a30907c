"""The sections of an experiment: every key with its type, default, range and meaning."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    field_serializer,
    field_validator,
    model_validator,
)

from cfl_ray.config.client_ids import compress_ids, parse_ids
from cfl_ray.config.paths import with_replaced
from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.calling import reference_of
from cfl_ray.plugins.loading import entry_points_of


class BuiltinKind(NamedTuple):
    """A kind of this package: its meaning, and the keys of the section that it uses."""

    meaning: str
    keys: tuple[str, ...] = ()


SOURCES = {  # those that are divided among clients are functions of `data/sources.py` or image_sets, by these names
    "digits": BuiltinKind("1,797 images of digits, 8x8, which come with scikit-learn"),
    "mnist": BuiltinKind("MNIST of torchvision", ("root", "download")),
    "fashion_mnist": BuiltinKind("Fashion-MNIST of torchvision", ("root", "download")),
    "cifar10": BuiltinKind("CIFAR-10 of torchvision or Hugging Face", ("root", "download")),
    "cifar100": BuiltinKind("CIFAR-100 of torchvision or Hugging Face", ("root", "download")),
    "svhn": BuiltinKind("SVHN's cropped digits of torchvision or Hugging Face", ("root", "download")),
    "medmnist": BuiltinKind("a 2-D data set of MedMNIST, e.g. pathmnist.npz", ("root", "train_files")),
    "images": BuiltinKind("images in parquet files", ("root", "train_files", "test_files")),
    "image_folder": BuiltinKind("images in a folder per class", ("root", "train_files", "test_files")),
    "csv": BuiltinKind("tables of numbers", ("root", "train_files", "test_files")),
    "hf_disk": BuiltinKind("a Hugging Face data set after save_to_disk", ("root", "train_files", "vocabulary")),
    "femnist": BuiltinKind("FEMNIST with its writers, as parquet files", ("root", "train_files")),
    "femnist_leaf": BuiltinKind("FEMNIST with its writers, as LEAF's JSON files", ("root", "train_files")),
    "shakespeare_leaf": BuiltinKind("LEAF's Shakespeare: the next of 80 characters", ("root", "train_files")),
    "sent140_leaf": BuiltinKind("LEAF's Sentiment140: tweets", ("root", "train_files", "vocabulary")),
    "mnist_by_writer": BuiltinKind("MNIST with its writers", ("root",)),
    "synthetic": BuiltinKind(
        "generated samples", ("synthetic_shape", "synthetic_samples", "synthetic_groups", "synthetic_classes")
    ),
    "arrays": BuiltinKind("an .npz file with x, y and clients", ("root",)),
}
# Sources that always come with a test part.
WITH_TESTS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "medmnist", "mnist_by_writer")
UNDIVIDED = ("synthetic", "arrays")  # sources whose samples already belong to clients


_LARGEST = 2**63 - 1  # of the whole numbers that arrays hold


class ConfigSection(BaseModel):
    """One section of the YAML file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"a whole number is at most {_LARGEST}")
        return value


TRACKERS = ("mlflow", "csv", "tensorboard", "wandb")  # classes of `tracking`, by these names
BACKENDS = ("ray", "in_process")


def _check_name(value: Any, part: str, builtin: Iterable[str], group: str) -> None:
    """Raises ValueError for a name that is not known, and for a value that can be no part."""
    if isinstance(value, str) and value not in builtin and ":" not in value:
        names = [*builtin, *entry_points_of(group)]
        if value not in names:
            raise ValueError(f"unknown {part} {value!r}{did_you_mean(value, names)}")
    _check_part(value, part)


def _check_part(value: Any, part: str) -> None:
    """Raises ValueError for a value of YAML that can be no part."""
    if value is None or isinstance(value, (bool, int, float, dict, list)):
        raise ValueError(f"a {part} is a name, file.py:Name or, in Python, a function, class or object")


def _without_effect(section: ConfigSection, where: str, names: Iterable[str], reason: str) -> list[str]:
    """Warnings of those keys of a section that have no effect and yet a value of their own."""
    fields, unused = type(section).model_fields, set(names)
    return [
        f"{where}.{name} ({reference_of(value) if name == 'kind' else value}) has no effect: {reason}"
        for name, value in section
        if name in unused and value != fields[name].default
    ]


def _kinds(builtin: dict[str, BuiltinKind]) -> str:
    """The description of a key `kind`."""
    return " | ".join(f"{name} ({kind.meaning})" for name, kind in builtin.items()) + " | path/to/file.py:Name"


class PartConfig(ConfigSection):
    """A section whose `kind` names a part: of this package, of an installed one, or a user's own."""

    part: ClassVar[str] = ""  # e.g. "shift": for messages
    where: ClassVar[str] = ""  # the section's place, e.g. "data.shift": for messages
    group: ClassVar[str] = ""  # entry-point group of installed packages
    builtin: ClassVar[dict[str, BuiltinKind]] = {}
    keys_of_own: ClassVar[tuple[str, ...]] = ()  # used by kinds that are not of this package
    keys_of_all: ClassVar[tuple[str, ...]] = ()  # used by all kinds but "none"

    kind: Any = Field(None, description="name of the part, or path/to/file.py:Name")
    options: dict[str, Any] = Field(
        {}, description="keyword arguments of a function or class that is not of this package (file.py:Name)"
    )

    @property
    def is_plugin(self) -> bool:
        """Whether the kind is not of this package."""
        return self.kind not in self.builtin if isinstance(self.kind, str) else True

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that the kind does not use."""
        used = self.keys_of_own if self.is_plugin else self.builtin[self.kind].keys
        used = () if self.kind == "none" else (*used, *self.keys_of_all)
        known = {*self.keys_of_own, *self.keys_of_all, *(key for kind in self.builtin.values() for key in kind.keys)}
        reason = f"{self.where}.kind is {reference_of(self.kind)}" + (f", which uses {', '.join(used)}" if used else "")
        return _without_effect(self, self.where, known - set(used), reason)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: Any) -> Any:
        _check_name(value, cls.part, cls.builtin, cls.group)
        return value

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and not self.is_plugin:
            keys = ", ".join(self.builtin[self.kind].keys) or "none"
            raise ValueError(f"options are for kinds of your own (file.py:Name); the keys of {self.kind} are: {keys}")
        return self

    @field_serializer("kind")
    def _reference(self, value: Any) -> Any:
        return reference_of(value)


# --- data ---------------------------------------------------------------------------------------


class ShiftConfig(PartConfig):
    """How the true groups of clients differ (StoCFL, section 5)."""

    part = "shift"
    where = "data.shift"
    group = "cfl_ray.shifts"
    keys_of_own = ("groups",)
    builtin = {
        "none": BuiltinKind("all clients draw from one distribution, or keep the groups that the data came with"),
        "rotated": BuiltinKind("rotated images", ("angles",)),
        "shifted": BuiltinKind("labels moved by an offset", ("offsets",)),
        "pathological": BuiltinKind("label sets", ("label_sets",)),
        "hybrid": BuiltinKind("two data sets", ("other",)),
        "rotated_labels": BuiltinKind("every angle with every label set", ("angles", "label_sets")),
        "noise": BuiltinKind("Gaussian noise on the inputs", ("sigmas",)),
        "blur": BuiltinKind("Gaussian blur of images", ("radii",)),
        "brightness": BuiltinKind("inputs times a factor", ("factors",)),
    }

    kind: Any = Field("none", description=f"how groups differ: {_kinds(builtin)}")
    groups: int = Field(2, ge=1, description="number of true groups of a shift of your own (file.py:function)")
    angles: list[int | float] = Field(
        [0, 90, 180, 270],
        description="rotation of each group in degrees, counter-clockwise (rotated, rotated_labels); multiples of 90 "
        "are exact, others bilinear about the centre, with 0 where the image does not reach",
    )
    sigmas: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.1, 0.2, 0.4],
        description="standard deviation of the noise of each group, in units of the pixel range 0..1 (noise)",
    )
    radii: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.5, 1.0, 2.0], description="standard deviation of the blur of each group in pixels (blur)"
    )
    factors: list[Annotated[float, Field(ge=0)]] = Field(
        [1.0, 0.75, 0.5, 0.25], description="factor of each group; values stay in the pixel range (brightness)"
    )
    offsets: list[int] = Field(
        [0, 3, 6, 9], description="offset s of each group: label y becomes (y + s) mod C (shifted)"
    )
    label_sets: list[list[int]] = Field(
        [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group (pathological, rotated_labels)"
    )
    other: str = Field("fashion_mnist", description="second data set, that of the second group (hybrid)")

    @field_validator("angles")
    @classmethod
    def _as_whole(cls, angles: list[int | float]) -> list[int | float]:
        """Whole numbers as such: the hash of a config does not depend on how they are written."""
        return [int(angle) if angle == int(angle) else angle for angle in angles]


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

    kind: Any = Field("iid", description=_kinds(builtin))
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
        without = [] if self.groups else _without_effect(self, self.where, [of_groups], f"{self.where}.groups is null")
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


class TestDataConfig(ConfigSection):
    """The test data of each client: cluster view, label view or hold-out."""

    view: Literal["cluster", "label", "holdout"] | None = Field(
        None,
        description="cluster: the official test set, shifted like the client's group | label: its images of the "
        "client's labels | holdout: a share of the client's own samples | null: the view with the client's "
        "own distribution: label for partitions by classes or unequal sizes; holdout for dirichlet, writer and sources "
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
    label: str | list[str] = Field(
        "label",
        description="label column, integers from 0; csv: also words, numbered in sorted order, or the columns of the "
        "targets of another task, e.g. [height, weight]",
    )
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
        description="folder of the data set (arrays: the .npz file; csv, images: also one file); null: the "
        "folder of the config where train_files are there, the environment variable CFL_RAY_DATA, then ./data",
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
        description="glob below root of the training files (images, femnist, csv), file of the data set (medmnist), "
        "folder of LEAF's files (*_leaf), or subfolder of the training part (image_folder, hf_disk); null: the usual "
        "places",
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
    datasets_group: ClassVar[str] = "cfl_ray.datasets"
    _written: dict[str, str] = PrivateAttr(
        default_factory=dict
    )  # of a run's record: paths as written, by absolute ones
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
        shift = {key: ShiftConfig.model_fields[key].default for key in ("groups", "sigmas", "radii", "factors")}
        sections = {
            "columns": unused,
            "shift": (("options", {}), *shift.items()),
            "partition": (("options", {}),),
        }
        return kept | {
            name: {key: value for key, value in values[name].items() if (key, value) not in of_section}
            for name, of_section in sections.items()
        }

    @property
    def is_function(self) -> bool:
        """Whether the source is a function of the user or of an installed package."""
        return self.source not in SOURCES

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
        if self.test.pool or part.kind in ("dirichlet", "writer") or part.is_plugin or not has_tests:
            return "holdout"
        return "label" if part.kind == "classes" or part.sizes or part.cut else "cluster"

    def to_recipe(self, exclude: set[str]) -> dict[str, Any]:
        """Returns the values that decide the content of shards, with paths as they were written."""
        values: dict[str, Any] = with_replaced(self.model_dump(mode="json", exclude=exclude), self._written)
        return self.without_defaults(values)

    @property
    def warnings(self) -> list[str]:
        """Keys of this section that are valid and have no effect, or probably another one than was meant."""
        meant = [one for one in (self.view_warning, self.client_warning) if one is not None]
        return [*meant, *self._unused_keys, *self._unused_division, *self._unused_test]

    @property
    def _unused_keys(self) -> list[str]:
        """Warnings of keys that other sources use."""
        if self.is_function:
            return []
        known = {"options", *(key for source in SOURCES.values() for key in source.keys)} - {"root", "download"}
        return _without_effect(self, "data", known - set(SOURCES[self.source].keys), f"data.source is {self.source}")

    @property
    def _unused_division(self) -> list[str]:
        """Warnings of keys of the shift and the partition."""
        if self.source not in UNDIVIDED:
            return self.shift.warnings + self.partition.warnings
        reason = f"the samples of source {self.source} belong to clients already"
        division = PartitionConfig.model_fields.keys() - {"clients"}
        return [
            *_without_effect(self.shift, self.shift.where, ShiftConfig.model_fields, reason),
            *_without_effect(self.partition, self.partition.where, division, reason),
        ]

    @property
    def _unused_test(self) -> list[str]:
        """Warnings of keys that other views use."""
        key = {"cluster": "fraction", "label": "fraction", "holdout": "max_images"}.get(self.test.view or "", "")
        return _without_effect(self.test, "data.test", [key], f"data.test.view is {self.test.view}")

    @property
    def client_warning(self) -> str | None:
        """Why the column of clients does not decide the clients; None where it does, or none is named."""
        kind = reference_of(self.partition.kind)
        if self.columns.client is None or kind == "writer" or self.source in UNDIVIDED or self.is_function:
            return None
        return (
            f"data.columns.client {self.columns.client!r} does not decide the clients: partition.kind {kind} divides "
            "all samples anew; for one client of each value set data.partition: {kind: writer, clients: null}"
        )

    @property
    def view_warning(self) -> str | None:
        """Why the given view does not measure clients on their own distribution; None where it does."""
        part = self.partition
        skewed = (part.is_plugin or part.kind in ("dirichlet", "classes")) and self.source not in UNDIVIDED
        if self.test.view != "cluster" or not skewed:
            return None
        return (
            f"data.test.view cluster tests clients on all classes alike, but partition.kind {reference_of(part.kind)} "
            f"gives each client classes of its own; {self._own_view()} tests it on its own distribution"
        )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for name in (self.source, self.shift.other):
            _check_name(name, "data set", SOURCES, self.datasets_group)
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

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        _check_part(value, "model")
        return value


class LocalConfig(ConfigSection):
    """Local training of a client in one round: SGD, by default with a fresh momentum buffer, or another optimiser."""

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

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "sgd":
            return self
        for key, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay), ("persist", self.persist)):
            if value:
                other = "its moments are not kept" if key == "persist" else "set it in optimizer_options if it has one"
                raise ValueError(f"{key} is that of sgd, got {value} with optimizer {self.optimizer}; {other}")
        return self

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that others replace."""
        return [] if self.steps is None else _without_effect(self, "local", ["epochs"], f"local.steps is {self.steps}")


class AvailabilityConfig(PartConfig):
    """Which clients can be reached in a round. A number stands for {kind: bernoulli, chance: number}."""

    part = "availability"
    where = "cohort.availability"
    group = "cfl_ray.availability"
    builtin = {
        "always": BuiltinKind("every client in every round"),
        "bernoulli": BuiltinKind("the same chance in every round", ("chance",)),
        "diurnal": BuiltinKind("day and night", ("chance", "amplitude", "period", "zones")),
        "trace": BuiltinKind("recorded intervals", ("file", "unit")),
    }

    kind: Any = Field("always", description=_kinds(builtin))
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

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that others replace, or that the kind of availability does not use."""
        reason = f"cohort.clients is {self.clients}"
        replaced = [] if self.clients is None else _without_effect(self, "cohort", ["fraction"], reason)
        return replaced + self.availability.warnings

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
        description="number of training samples, the same random ones in all rounds, on which a client compares models "
        "to choose one for the evaluation (ifca, ifca_cam); null: as many as the method uses in training, where this "
        "limit has no effect",
    )
    tuned_epochs: int = Field(
        0, ge=0, description="F of P-tune(F): local epochs of fine-tuning before the test; 0: do not measure it"
    )
    target: float | None = Field(
        None,
        description="target of rounds_to_target and mbit_to_target (P-server, and _local for P-local): a value of the "
        "first metric of the task, for accuracy above 0 and at most 1; null: do not measure them",
    )
    metrics: list[Any] = Field(
        [],
        description="further metrics of each client: accuracy | macro_f1 | micro_f1 | subset_accuracy | mse | mae | "
        "r2 | token_accuracy | perplexity | path/to/file.py:function of the outputs (n, C) and the targets (n,) that "
        "returns a number",
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
        None,
        ge=1,
        description="most clients of one host; 1: one process per client; null: no limit. A number changes the last "
        "bits of sums, since clients are added up one by one",
    )
    gpus_per_host: float = Field(
        0.0, ge=0, le=16, description="share of a GPU that each host reserves, e.g. 0.25; 0: none"
    )
    cpus_per_host: float = Field(1.0, gt=0, description="CPUs that each host reserves; it computes with one thread")
    engine: Literal["auto", "sequential", "manual", "vectorised", "span"] = Field(
        "auto",
        description="how a host trains its clients: sequential (one by one) | manual (one by one, without autograd) | "
        "vectorised (together) | span (full-batch shortcut) | auto (the fastest in a short measurement, which is kept "
        "with the runs). Engines agree up to rounding; a resumed run keeps its own",
    )
    backend: Any = Field(
        "ray",
        description="what carries out the work of clients: ray (hosts of a cluster) | in_process (this process, for "
        "debugging) | path/to/file.py:Class, in this process, or one with its options {file.py:Class: {option: value}}",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="where hosts compute: cpu | cuda | auto (cuda on hosts that reserve a share of a GPU). "
        "Devices agree up to rounding",
    )
    cpu_capability: Literal["default", "avx2", "avx512"] | None = Field(
        None,
        description="instructions that server and hosts use on an x86 CPU: default | avx2 | avx512 | null (the newest "
        "of each CPU). One that all machines have makes their last bits equal. In one process, set the variable "
        "ATEN_CPU_CAPABILITY as well",
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
        description="restarts of one host before the run continues without it, and of the server before the run ends; "
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

    backends_group: ClassVar[str] = "cfl_ray.backends"

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, value: Any) -> Any:
        name = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
        _check_name(name, "backend", BACKENDS, cls.backends_group)
        return value

    @field_serializer("backend")
    def _backend_reference(self, value: Any) -> Any:
        return value if isinstance(value, dict) else reference_of(value)


class TrackingConfig(ConfigSection):
    """Where results are recorded."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, or an SQLite store below `output`"
    )
    experiment: str = Field("cfl_ray", description="name of the MLflow experiment")
    enabled: bool = Field(True, description="use the trackers; false: only write the files of the run directory")
    log_models: bool = Field(
        False,
        description="at the end of a method, log the model of each cluster (cluster-0, ...) to its MLflow run, with "
        "signature and input example; needs MLflow 3.11 or newer",
    )
    report: bool = Field(
        True,
        description="at the end of the run, write artifacts/report.html (2 MB), which is an artifact of the parent "
        "run in MLflow",
    )
    trackers: list[Any] = Field(
        ["mlflow"],
        description="where records go beside the files of the run directory: mlflow | csv | tensorboard | wandb | "
        "path/to/file.py:Class, or one with its options, e.g. {tensorboard: {folder: tb}}",
    )

    trackers_group: ClassVar[str] = "cfl_ray.trackers"

    @property
    def uses_mlflow(self) -> bool:
        """Whether records go to MLflow."""
        return self.enabled and "mlflow" in self.trackers

    @model_validator(mode="after")
    def _check_log_models(self) -> Self:
        if self.log_models and "mlflow" not in self.trackers:
            raise ValueError(f"log_models: true needs the tracker mlflow, got trackers {self.trackers}; add it to them")
        return self

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, entries: list[Any]) -> list[Any]:
        for entry in entries:
            if isinstance(entry, dict) and len(entry) != 1:
                raise ValueError(
                    f"an entry is one tracker with its options, e.g. {{csv: {{file: m.csv}}}}, got {entry}"
                )
            name, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
            if name == "mlflow" and options:
                raise ValueError("mlflow takes no options; its keys are tracking.uri, experiment and log_models")
            _check_name(name, "tracker", TRACKERS, cls.trackers_group)
        return entries
