"""The section `data`: a class for the keys of each family of sources."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from cfl_ray.config.part import BuiltinKind, Kinds, check_name
from cfl_ray.config.partition import PARTITION_KINDS, ClassesConfig, IidConfig, PartitionConfig
from cfl_ray.config.paths import with_replaced
from cfl_ray.config.section import FILE, ConfigSection, former
from cfl_ray.config.shift import SHIFT_KINDS, HybridConfig, ShiftConfig
from cfl_ray.plugins.calling import reference_of


class TestDataConfig(ConfigSection):
    """The test data of each client: cluster view, label view, all images or hold-out."""

    view: Literal["cluster", "label", "all", "holdout"] | None = Field(
        None,
        description="cluster: the official test set, shifted like the client's group | label: its images of the "
        "client's labels | all: the whole of it, also if the client's group has some labels only, shifted like the "
        "group | holdout: a share of the client's own samples | null: the view with the client's own distribution: "
        "label for partitions by classes or unequal sizes; holdout for dirichlet, writer and sources without test "
        "data; cluster otherwise",
    )
    fraction: float = Field(0.2, gt=0, lt=1, description="share of a client's samples held out for testing (holdout)")
    order: Literal["random", "last"] = Field(
        "random",
        description="which samples are held out: random | last: a client's last ones, in the order of "
        "data.columns.time or else of the data (holdout)",
    )
    pool: bool = Field(
        False,
        description="true: divide the official training and test images together; false: the official test images go "
        "unused (holdout)",
    )
    max_samples: int | None = Field(
        None,
        ge=1,
        description="most samples of a shared test set; null: all of them",
        **former("max_samples", "max_images"),
    )

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.pool and self.view not in ("holdout", None):
            raise ValueError(
                f"pool divides the test images among the clients, so view must be holdout, not {self.view}"
            )
        return self


class ValidationConfig(ConfigSection):
    """The validation data of each client, which are measured beside its test data and never trained on."""

    fraction: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of each client's training samples; clients whose rounded share is 0 have none",
    )
    order: Literal["random", "last"] = Field(
        "random",
        description="random: drawn for each class alike, where a client has enough samples of it | last: the last "
        "samples, in the order of data.columns.time or else of the data",
    )


class ColumnsConfig(ConfigSection):
    """Names of the columns of image parquet files, tables and saved Hugging Face data sets."""

    image: str = Field(
        "image",
        description="input column: a struct of `bytes` (PNG, JPEG) and `path`, or plain bytes; hf_disk: also lists of "
        "numbers of equal length, or of token ids",
    )
    features: list[str] | None = Field(
        None,
        description="columns of numbers that make up the input (csv); null: all but label, client, group and an index "
        "of the rows, with a warning that names them",
    )
    label: str | list[str] = Field(
        "label",
        description="label column, integers from 0; csv: also words, numbered in sorted order, or the columns of the "
        "targets of another task, e.g. [height, weight]",
    )
    client: str | None = Field(
        None,
        description="column with the client of each sample, integers or strings; without a partition.kind, its values "
        "are the clients (kind writer). null: no clients",
    )
    group: str | None = Field(
        None, description="column with the true group of each sample's client; null: no true groups are known"
    )
    time: str | None = Field(
        None,
        description="column of numbers, dates or times by which each client's training samples are ordered, oldest "
        "first, for order last (csv, images, femnist, hf_disk); it is no input. null: the order of the files",
    )


NOT_IN_RECIPE = ("root", "download", "shards")  # keys for the location of the samples
# keys that recipes of earlier versions do not have; in a recipe only if they are set
_LATER = ("labels", "transparency", "image_size", "image_fit", "delimiter", "encoding", "decimal", "validation_files")


_USERS = {  # sources that have the client of each sample, which `partition.kind` may use -> what these are
    "femnist": "writers",
    "femnist_leaf": "users",
    "shakespeare_leaf": "users",
    "sent140_leaf": "users",
    "mnist_by_writer": "writers",
}


class DataConfig(ConfigSection):
    """The federation: its samples, and how they are divided among clients."""

    has_tests: ClassVar[bool] = False  # True: the source always has a test part
    has_clients: ClassVar[bool] = False  # True: its samples belong to clients already
    has_targets: ClassVar[bool] = False  # True: its targets may be of any kind, not classes alone
    has_validation_part: ClassVar[bool] = False  # True: of the source, which is read if `validation` is set

    source: Any = Field("digits", description="data set")
    root: Annotated[str | None, FILE] = Field(
        None,
        description="folder of the data set (arrays: the .npz file; csv, images: also a file); null: the "
        "folder of the config if train_files are there, the environment variable CFL_RAY_DATA, then ./data",
    )
    download: bool = Field(False, description="let torchvision download the data set if it is missing")
    normalize: list[list[float]] | None = Field(
        None,
        description="[means, standard deviations] per channel or feature; images are first scaled to 0..1; null: none",
    )
    shift: Annotated[ShiftConfig, SHIFT_KINDS] = ShiftConfig()
    partition: Annotated[PartitionConfig, PARTITION_KINDS] = IidConfig()
    test: TestDataConfig = TestDataConfig()
    validation: ValidationConfig | None = Field(
        None,
        description="validation data of each client: those of the source if it has a validation part, otherwise a "
        "share of the client's training samples; null: none, unless the source names some",
    )
    shards: str | None = Field(
        None,
        description="folder in which shards are written and reused, or the folder of a prepared federation: a path "
        "or any URI that pyarrow knows; null: below `output`",
    )
    federation: Any = Field(None, exclude=True, description="a Federation made in Python, instead of a source")
    # as in `Experiment`
    _written: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _choose_view(self) -> Self:
        """Replaces a null view by the view of the source, so that records have it; that of arrays is decided later."""
        if self.test.view is None and not isinstance(self, ArraysConfig | PluginDataConfig):
            object.__setattr__(self, "test", self.test.model_copy(update={"view": self._own_view()}))
        return self

    def with_view(self, has_tests: bool) -> "DataConfig":
        """This section with a null view replaced. has_tests: whether the data have a test part."""
        if self.test.view is not None:
            return self
        return self.model_copy(update={"test": self.test.model_copy(update={"view": self._own_view(has_tests)})})

    def _own_view(self, has_tests: bool | None = None) -> str:
        """The view whose test data have each client's own distribution. has_tests: None: as the source declares."""
        part = self.partition
        if isinstance(self, GeneratedConfig):
            return "cluster"
        if has_tests is None:
            has_tests = self.has_tests or getattr(self, "test_files", None) is not None
        if self.test.pool or not isinstance(part, IidConfig | ClassesConfig) or not has_tests:
            return "holdout"
        if isinstance(part, ClassesConfig):
            return "label"
        return "label" if part.has_unequal_sizes or part.cut else "cluster"

    def of_source(self, name: str) -> "DataConfig":
        """The section of another source, with the keys that both have."""
        if self.source == name:
            return self
        keys = SOURCE_KINDS.builtin[name].section.model_fields.keys() & type(self).model_fields.keys()
        values = {key: getattr(self, key) for key in keys - {"federation", "shift", "partition", "test"}}
        return SOURCE_KINDS.of(**values | {"source": name})

    @field_validator("federation")
    @classmethod
    def _check_federation(cls, value: Any) -> Any:
        if value is not None and not hasattr(value, "recipe"):
            raise ValueError(f"a Federation made in Python, got {value!r}; in a file, name the data by data.source")
        return value

    @property
    def later_defaults(self) -> set[str]:
        """Keys with their defaults that recipes of earlier versions do not have."""
        fields = type(self).model_fields
        return {key for key in _LATER if key in fields and getattr(self, key) == fields[key].default}

    def to_recipe(self, exclude_defaults: bool = False) -> dict[str, Any]:
        """The values that decide the content of shards, with paths as they were written."""
        excluded = {*NOT_IN_RECIPE, *self.later_defaults, "validation"}  # a share is drawn from shards as they are
        values = self.model_dump(mode="json", exclude=excluded, exclude_defaults=exclude_defaults, by_alias=True)
        later = (
            ("test", "order", TestDataConfig),
            ("columns", "time", ColumnsConfig),
            ("partition", "share_alpha", IidConfig),
        )  # as `_LATER`, of sections
        for section, key, kind in later:
            has_key = section in values and isinstance(getattr(self, section), kind)
            if has_key and values[section].get(key) == kind.model_fields[key].default:
                values[section].pop(key, None)
        recipe: dict[str, Any] = with_replaced(values, self._written)
        return recipe | ({"validation": "own"} if self.validation and self.has_validation_part else {})

    @property
    def known_clients(self) -> int | None:
        """The number of clients; None if only the samples tell it, which may belong to clients already."""
        of_samples = self.federation is not None or isinstance(self, ArraysConfig | PluginDataConfig)
        return None if of_samples else self.partition.clients

    @property
    def names_validation_part(self) -> bool:
        """Whether validation data are those of the source, as far as the keys tell."""
        return self.has_validation_part or getattr(self, "validation_files", None) is not None

    @property
    def warnings(self) -> list[str]:
        """Warnings of a view or a column of clients whose effect is probably not intended."""
        warnings, kind = [], reference_of(self.partition.kind)
        if self.test.view == "cluster" and kind not in ("iid", "writer") and not self.has_clients:
            warnings.append(
                f"data.test.view cluster tests clients on all classes alike, but partition.kind {kind} may give "
                f"each client classes of its own; {self._own_view()} tests it on its own distribution"
            )
        if isinstance(self, ColumnsDataConfig) and self.columns.client is not None and kind != "writer":
            warnings.append(
                f"data.columns.client {self.columns.client!r} does not decide the clients: partition.kind {kind} "
                "divides all samples anew; for one client of each value leave out data.partition.kind"
            )
        elif (users := _USERS.get(self.source)) and kind != "writer":
            warnings.append(
                f"the {users} of source {self.source} are not the clients: partition.kind {kind} divides all samples "
                f"anew; for a client of each of the {users} set data.partition: {{kind: writer, clients: null}}"
            )
        if self.source == "image_folder" and self.root is not None and kind != "writer":
            file = Path(self.root, getattr(self, "train_files", None) or "", "clients.csv").expanduser()
            if file.is_file():
                warnings.append(
                    f"{file} does not decide the clients: partition.kind {kind} divides all samples anew; for one "
                    "client of each of its clients set data.partition: {kind: writer, clients: null}"
                )
        return warnings

    @model_validator(mode="after")
    def _check_division(self) -> Self:
        part, pool = self.partition, self.test.pool
        given = {
            "shift.kind": self.shift.kind != "none",
            "partition": part != IidConfig(),
            "normalize": self.normalize is not None,
        }
        if self.federation is not None and any(given.values()):
            keys = " and ".join(key for key, is_given in given.items() if is_given)
            raise ValueError(f"{keys} would have no effect: a Federation made in Python is used as it is; leave it out")
        if isinstance(self.shift, HybridConfig):
            check_name(self.shift.other, SOURCE_KINDS.kind, SOURCE_KINDS.builtin, SOURCE_KINDS.group)
        if part.true_groups is not None and self.shift.kind != "none":
            raise ValueError(
                f"partition.groups ({part.true_groups}) and shift.kind ({self.shift.kind}) both make true groups; "
                "set one of them"
            )
        if pool and part.kind == "writer":
            raise ValueError(
                "test.pool: the writers of the test images are not known, so partition.kind cannot be writer; "
                "set pool: false"
            )
        if self.has_clients:
            division = {
                "partition.groups": part.true_groups,
                "partition.sizes": part.sizes if isinstance(part, IidConfig) else None,
                "partition.share_alpha": part.share_alpha if isinstance(part, IidConfig) else None,
                "partition.cut": part.cut,
                "test.pool": pool,
            }
            if key := next((key for key, value in division.items() if value), None):
                raise ValueError(f"{key} has no meaning for source {self.source}, which is not divided; leave it out")
        return self


# --- families of sources ------------------------------------------------------------------------


class OfficialDataConfig(DataConfig):
    """A data set with an official test part."""

    has_tests = True


class LabelledDataConfig(DataConfig):
    """Samples whose labels may be any integers."""

    labels: Literal["given", "dense"] = Field(
        "given",
        description="given: label k is output k of the model, which has outputs up to the largest label | dense: the "
        "labels of the training samples are numbered 0, 1, ... in ascending order; result.class_names has them",
    )


class FilesDataConfig(LabelledDataConfig):
    """Files below `root`."""

    train_files: str | None = Field(
        None,
        description="glob below root of the training files (images, femnist, csv), file of the data set (medmnist), "
        "folder of LEAF's files (*_leaf), or subfolder of the training part (image_folder, hf_disk); null: the usual "
        "places",
    )


class MedMnistConfig(FilesDataConfig):
    """A file of MedMNIST."""

    has_tests = True
    has_validation_part = True


class PartsDataConfig(FilesDataConfig):
    """Files of a training part and of a test part."""

    test_files: str | None = Field(
        None,
        description="glob below root of the test files (images, femnist, csv), or subfolder of the test part "
        "(image_folder, hf_disk); null: there are none, and test.view must be holdout",
    )
    validation_files: str | None = Field(
        None,
        description="the same of the validation part; null: there is none, and data.validation holds samples out",
    )


class ImagesDataConfig(PartsDataConfig):
    """Files of images."""

    transparency: Literal["white", "keep", "drop"] = Field(
        "white",
        description="white: images are drawn on white | keep: a further channel, if the first "
        "image has it | drop: ignored, as by torchvision's ImageFolder",
    )
    image_size: Annotated[list[Annotated[int, Field(ge=1, le=8192)]], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[height, width] to which all images are resized; null: they must be of one size"
    )
    image_fit: Literal["stretch", "crop"] = Field(
        "stretch",
        description="with image_size, stretch: whole images, as torchvision's Resize([height, width]) | crop: the "
        "largest part around the centre that has the ratio of image_size",
    )

    @model_validator(mode="after")
    def _check_image_fit(self) -> Self:
        if self.image_fit != "stretch" and self.image_size is None:
            raise ValueError(f"image_fit: {self.image_fit} has no image_size; set image_size: [HEIGHT, WIDTH]")
        return self


class ColumnsDataConfig(PartsDataConfig):
    """Tables, whose columns have names."""

    columns: ColumnsConfig = ColumnsConfig()

    @model_validator(mode="before")
    @classmethod
    def _divide_by_client(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A column of clients decides the clients, unless another partition is named."""
        columns, partition = (values.get(key, {}) for key in ("columns", "partition"))
        named = isinstance(columns, dict) and columns.get("client") is not None
        if named and isinstance(partition, dict) and partition.get("kind", "writer") == "writer":
            return {**values, "partition": {"kind": "writer", "clients": None, **partition}}
        return values


class CsvConfig(ColumnsDataConfig):
    """Tables of numbers."""

    has_targets = True
    delimiter: Literal[",", ";", "\t", "|", " "] = Field(
        ",", description='what separates the columns of CSV files: , | ; | a tab, "\\t" | "|" | a space'
    )
    encoding: str = Field(
        "utf-8", description="encoding of CSV files, as Python names it: utf-8 | cp1252 (Excel) | latin-1 | utf-16"
    )
    decimal: Literal[".", ","] = Field(".", description="decimal point of CSV files")

    @model_validator(mode="after")
    def _check_decimal(self) -> Self:
        if self.decimal == self.delimiter:
            raise ValueError(f"decimal and delimiter must differ, got {self.decimal!r} for both; set delimiter: ';'")
        return self


class ImageTablesConfig(ImagesDataConfig, ColumnsDataConfig):
    """Tables with a column of images."""


class HfDiskConfig(ImageTablesConfig):
    """Tables whose inputs are images, numbers or token ids."""

    has_targets = True
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="number of token ids, for inputs that are token ids 0 .. vocabulary - 1 (hf_disk) or words "
        "(sent140_leaf); null: the inputs are not tokens (hf_disk), 10000 (sent140_leaf)",
    )


class Sent140LeafConfig(FilesDataConfig):
    """Files of texts."""

    vocabulary: int | None = Field(None, ge=1, description="number of words that are told apart; null: 10000")


class GeneratedConfig(DataConfig):
    """Generated points; the rule for their labels is the concept of the client."""

    has_clients = True
    synthetic_samples: int = Field(500, ge=1, description="training samples per client; 50 for source synthetic")


class SyntheticConfig(GeneratedConfig):
    """Generated samples."""

    synthetic_shape: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 28, 28], description="shape of an input, channels first"
    )
    synthetic_samples: int = Field(50, ge=1, description="training samples per client; 500 for points with a rule")
    synthetic_groups: int = Field(4, ge=1, le=1_000_000, description="number of true groups")
    synthetic_classes: int = Field(10, ge=2, description="C, number of classes")


class ArraysConfig(LabelledDataConfig):
    """An .npz file with x, y and clients."""

    has_clients = True


class PluginDataConfig(LabelledDataConfig):
    """A function that returns arrays or a Federation."""

    source: str
    options: dict[str, Any] = Field({}, description="keyword arguments of the function")


SOURCE_KINDS = Kinds[DataConfig](
    "data set",
    {
        "digits": BuiltinKind(
            "1,797 images of digits, 8x8, which come with scikit-learn", OfficialDataConfig, "data.sources:digits"
        ),
        "mnist": BuiltinKind("MNIST of torchvision", OfficialDataConfig, "data.sources:mnist"),
        "fashion_mnist": BuiltinKind("Fashion-MNIST of torchvision", OfficialDataConfig, "data.sources:fashion_mnist"),
        "cifar10": BuiltinKind("CIFAR-10 of torchvision or Hugging Face", OfficialDataConfig, "data.sources:cifar10"),
        "cifar100": BuiltinKind(
            "CIFAR-100 of torchvision or Hugging Face", OfficialDataConfig, "data.sources:cifar100"
        ),
        "svhn": BuiltinKind(
            "SVHN's cropped digits of torchvision or Hugging Face", OfficialDataConfig, "data.sources:svhn"
        ),
        "medmnist": BuiltinKind(
            "a 2-D data set of MedMNIST, e.g. pathmnist.npz", MedMnistConfig, "data.sources:medmnist"
        ),
        "images": BuiltinKind("images in parquet files", ImageTablesConfig, "data.sources:images"),
        "image_folder": BuiltinKind("images in a folder per class", ImagesDataConfig, "data.sources:image_folder"),
        "csv": BuiltinKind("tables of numbers, in CSV or Parquet files", CsvConfig, "data.sources:csv"),
        "hf_disk": BuiltinKind("a Hugging Face data set after save_to_disk", HfDiskConfig, "data.sources:hf_disk"),
        "femnist": BuiltinKind("FEMNIST with its writers, as parquet files", ImageTablesConfig, "data.sources:femnist"),
        "femnist_leaf": BuiltinKind(
            "FEMNIST with its writers, as LEAF's JSON files", FilesDataConfig, "data.sources:femnist_leaf"
        ),
        "shakespeare_leaf": BuiltinKind(
            "LEAF's Shakespeare: the next of 80 characters", FilesDataConfig, "data.sources:shakespeare_leaf"
        ),
        "sent140_leaf": BuiltinKind("LEAF's Sentiment140: tweets", Sent140LeafConfig, "data.sources:sent140_leaf"),
        "mnist_by_writer": BuiltinKind("MNIST with its writers", OfficialDataConfig, "data.sources:mnist_by_writer"),
        "synthetic": BuiltinKind("generated samples", SyntheticConfig, "data.synthetic:SyntheticFederation"),
        "sine": BuiltinKind(
            "points below and above a sine, in two opposite concepts", GeneratedConfig, "data.synthetic:SINE"
        ),
        "circle": BuiltinKind(
            "points inside and outside of a circle, in two concepts", GeneratedConfig, "data.synthetic:CIRCLE"
        ),
        "sea": BuiltinKind(
            "points with a small or a large sum and 10 % noise, in four concepts", GeneratedConfig, "data.synthetic:SEA"
        ),
        "arrays": BuiltinKind("an .npz file with x, y and clients", ArraysConfig, "data.own_data:of_arrays"),
    },
    "cfl_ray.datasets",
    PluginDataConfig,
    "data.own_data:load_function",
    key="source",
)
