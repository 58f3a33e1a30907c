"""The section `data`, with the sources of samples."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from cfl_ray.config.part import BuiltinKind, check_name
from cfl_ray.config.partition import PartitionConfig
from cfl_ray.config.paths import with_replaced
from cfl_ray.config.section import ConfigSection, without_effect
from cfl_ray.config.shift import ShiftConfig
from cfl_ray.plugins.calling import reference_of

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
        return without_effect(self, "data", known - set(SOURCES[self.source].keys), f"data.source is {self.source}")

    @property
    def _unused_division(self) -> list[str]:
        """Warnings of keys of the shift and the partition."""
        if self.source not in UNDIVIDED:
            return self.shift.warnings + self.partition.warnings
        reason = f"the samples of source {self.source} belong to clients already"
        division = PartitionConfig.model_fields.keys() - {"clients"}
        return [
            *without_effect(self.shift, self.shift.where, ShiftConfig.model_fields, reason),
            *without_effect(self.partition, self.partition.where, division, reason),
        ]

    @property
    def _unused_test(self) -> list[str]:
        """Warnings of keys that other views use."""
        key = {"cluster": "fraction", "label": "fraction", "holdout": "max_images"}.get(self.test.view or "", "")
        return without_effect(self.test, "data.test", [key], f"data.test.view is {self.test.view}")

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
            check_name(name, "data set", SOURCES, self.datasets_group)
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
