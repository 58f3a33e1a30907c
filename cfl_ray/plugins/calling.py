"""Calling plugins: functions and classes with their options, and errors that name the line in the user's file."""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, get_origin
from weakref import WeakSet

from cfl_ray.errors import ConfigError, RunError, UserError, class_and_text, did_you_mean, notes_of

_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
_OF_FILES = re.compile(  # ends of the names of files, which no function has
    r"\.(py|np[yz]|[ct]sv|txt|parquet|feather|arrow|orc|jsonl?|h5|hdf5|mat|pth?|pkl|pickle|xlsx?|db|zip|gz|tar)$", re.I
)
_checked_types: WeakSet[type] = WeakSet()  # whose hooks were checked, since programs are made in every exchange


# ---- in messages


def place_of(part: Any) -> str:
    """The name of a function, method, class or object, for messages; with file and line if it is in a user's file."""
    source = source_of(part)
    name: str = getattr(source, "__qualname__", repr(source)).rpartition("<locals>.")[2]
    if not is_user_file(file_of(source)):  # without its line, for which the file would be parsed
        return name
    file, line = _definition(source)
    return f"{name} ({file}{f', line {line}' if line else ''})" if is_user_file(file) else name


def failure_of(part: Any, error: Exception, where: str = "") -> str:
    """The text "NAME failed: ERROR", with the line of the user's file that led to the error.

    where: text after the name that says what the part was called for.
    """
    return f"{place_of(part)}{where} failed: {explained(part, error)}"


def explained(part: Any, error: Exception) -> str:
    """The type and text of the error, with the line of the part's file that led to it.

    The file is named too, unless it is the user's, which `place_of` names.
    """
    place = raised_at(part, error)
    if place is None:
        return class_and_text(error)
    file, line = place
    return f"{class_and_text(error)} ({'' if is_user_file(file) else f'{file}, '}line {line})"


def raised_at(part: Any, error: BaseException) -> tuple[Path, int] | None:
    """The file that defines a part, and the file's last line in the error's traceback; None without such a line."""
    file = file_of(part)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if file and Path(frame.filename) == file]
    return (file, lines[-1] or 0) if file and lines else None


def users_place(error: BaseException) -> str:
    """Function, file and line of the user's code that led to an error, for messages; empty without any."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_user_file(file) and not frame.filename.startswith("<"):
            return f"{frame.name}, {frame.filename}, line {frame.lineno}"
    return ""


def with_place(error: BaseException, otherwise: str = "") -> str:
    """Class, text and notes of an error, with the line of the user's code that led to it unless a note names it.

    otherwise: the place if no line of the user's code led to it.
    """
    place, notes = users_place(error) or otherwise, notes_of(error)
    named = place.partition(", ")[2] or place
    return f"{class_and_text(error)}{f' ({place})' if place and named not in notes else ''}{notes}"


def described(value: Any) -> str:
    """Type and shape of a value, as text."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # an array or a tensor
        if not value.shape:
            return f"one number, {value}"
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80] if value is not None else "None"


def source_of(part: Any) -> Any:
    """The function or class that defines a part: without its bound options; for an object, its class."""
    source = part.func if isinstance(part, partial) else part
    return source if inspect.isroutine(source) or inspect.isclass(source) else type(source)


def file_of(part: Any) -> Path | None:
    """The file of `source_of(part)`; None if it is written in C."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(source_of(part)))
    except (TypeError, OSError):
        return None
    return Path(file) if file else None


def _definition(source: Any) -> tuple[Path | None, int]:
    """File and line of a function or class; (None, 0) if it is written in C or was typed into a console.

    The line is 0 if it cannot be told now.
    """
    file = file_of(source)
    try:
        return (file, inspect.getsourcelines(inspect.unwrap(source))[1]) if file else (None, 0)
    except (TypeError, OSError):
        return None, 0
    except SystemError:  # Python 3.11 parses in one thread at a time, and switches threads while it parses
        return file, 0


def is_user_file(file: Path | None) -> bool:
    """Whether a file is the user's: part neither of this package, nor of Python, nor of an installed package."""
    return file is not None and not (file.is_relative_to(_PACKAGE) or is_installed(file) or _is_of_python(file))


def _is_of_python(file: Path) -> bool:
    return file.is_relative_to(_STANDARD_LIBRARY)


def is_installed(file: Path) -> bool:
    """Whether a file is part of an installed package, in an environment or in a folder (`pip install --target`)."""
    if _INSTALLED & set(file.parts):
        return True
    return any(file.relative_to(folder).as_posix() in _installed_in(folder) for folder in file.parents)


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Relative paths of the files of packages that are installed into a folder, which may also have the user's."""
    records = (record.read_text(errors="replace") for record in folder.glob("*.dist-info/RECORD"))
    return frozenset(line.partition(",")[0] for record in records for line in record.splitlines())


def no_dataclass(cls: type) -> str:
    """Why the fields that a class declares are none: it is no dataclass. Empty if there is no such field."""
    if "__dataclass_fields__" in vars(cls):
        return ""
    declared = [name for name, kind in inspect.get_annotations(cls).items() if not _is_of_class(kind)]
    if not declared:
        return ""
    return f"{cls.__name__} declares {declared[0]}, but is no dataclass; write @dataclass(frozen=True) above"


def _is_of_class(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] == "ClassVar"
    return annotation is ClassVar or get_origin(annotation) is ClassVar


# ---- in configs


def reference_of(part: Any) -> Any:
    """How a config records a part: a name as it is, an object made in Python as "MODULE.NAME"."""
    if isinstance(part, str):
        return part
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def is_made_in_python(reference: str) -> bool:
    """Whether a name in a config is that of an object made in Python, as `reference_of` records it."""
    return re.fullmatch(r"([\w<>]+\.)+[\w<>]+", reference) is not None and not _OF_FILES.search(reference)


def without_name(reference: str) -> str:
    """Advice that ends the message about a Python file without `:NAME`; empty for other references."""
    lacks = reference.endswith(".py")
    return f": write {reference}:NAME, with the name of a function or class in that file" if lacks else ""


def parse_choice(key: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """The name (or object) and the options in a config value: a name, {name: {option: value}} or an object.

    key: the config key, for messages. Raises ConfigError for a mapping of another form.
    """
    if not isinstance(value, Mapping):
        return value, {}
    if len(value) != 1 or not isinstance(options := next(iter(value.values())) or {}, Mapping):
        raise ConfigError(
            f"{key} must be a name, or one name with its options, {{name: {{option: value}}}}, got {value}"
        )
    return next(iter(value)), {name: as_number(option) for name, option in options.items()}


def as_number(value: Any) -> Any:
    """The value; text such as "1e-3" becomes a number, because YAML 1.1 reads 1e-3 as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


def check_options(
    kind: str, part: Callable[..., Any], options: Mapping[str, Any], arguments: Sequence[str] = ()
) -> None:
    """Raises ConfigError unless a part can be called with these positional arguments and named options.

    kind: what the part is, or its config key, for messages. arguments: names of the arguments, for messages.
    """
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # a function written in C has no signature
        return
    parameters = signature.parameters.values()
    taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(arguments)]
    check_names(kind, part, signature, options, taken)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        called = [f"is called with {', '.join(arguments)}"] * bool(arguments)
        given = [f"has the options {dict(options)}"] * bool(options or not arguments)
        raise ConfigError(
            f"{kind} {place_of(part)} {', and '.join(called + given)}: {error}; it takes {_plain(signature)}".lstrip()
        ) from None


def check_hooks(part: Any, base: type, hooks: Iterable[str]) -> None:
    """Raises ConfigError if an object's own version of a method of its base class does not take the same arguments."""
    if type(part) in _checked_types:
        return
    for name in hooks:
        hook, arguments = getattr(part, name), list(inspect.signature(getattr(base, name)).parameters)[1:]
        if getattr(type(part), name) is not getattr(base, name):
            check_options("", hook, {}, arguments)
    _checked_types.add(type(part))


def _plain(signature: inspect.Signature) -> str:
    """The signature without annotations."""
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def check_names(
    kind: str,
    part: Callable[..., Any],
    signature: inspect.Signature,
    options: Iterable[str],
    taken: Collection[str] = (),
) -> None:
    """Raises ConfigError for an option that a part with this signature does not have; taken: names that are none."""
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in named if name not in taken]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in options:
        if name not in names:
            known = did_you_mean(name, names) if names else "; it has none"
            raise ConfigError(f"{kind} {place_of(part)} has no option {name!r}{known}")


# ---- ready for use


def with_options(part: Any, options: Mapping[str, Any], kind: str, arguments: Sequence[str] = ()) -> Any:
    """A part with its options bound: an instance of a class, a partial of a function, any other object as it is.

    arguments: names of the positional arguments that a function will be called with.
    Raises ConfigError if the part does not take these arguments or options.
    """
    if isinstance(part, type):
        check_options(kind, part, options)
        return call_plugin(kind, partial(part, **options), error=ConfigError)
    if not inspect.isroutine(part) and not isinstance(part, partial):
        if options:
            raise ConfigError(f"{kind} {place_of(part)} is an object, which takes no options; got {dict(options)}")
        return part
    check_options(kind, part, options, arguments)
    return partial(part, **options) if options else part


def call_plugin(
    kind: str, function: Callable[..., Any], *arguments: Any, error: type[UserError] = RunError, where: str = ""
) -> Any:
    """The result of a user's function. An exception in it becomes an `error` that names the function and the line.

    where: text after the function's name that says what it was called for.
    """
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as raised:
        raise error(f"{kind} {failure_of(function, raised, where)}") from raised
