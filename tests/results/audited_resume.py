"""A process that resumes runs whose records name something outside, by one key of the config after another, and prints
what it touched there, as Python's audit hooks report it: `python audited_resume.py RUN OUTSIDE`.

RUN is the directory of a run of this user, in which OUTSIDE is not named. The cases come from the schema of the config.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import cfl_ray
from cfl_ray.config import Experiment, load
from cfl_ray.errors import UserError
from cfl_ray.run_directory import UntrustedError

EVENTS = {"open", "exec", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.fork"}
EVENTS |= {"os.exec", "os.posix_spawn", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.listdir", "os.scandir"}
EVENTS |= {"os.truncate", "os.link", "os.symlink", "os.chmod", "os.utime", "shutil.rmtree", "shutil.copyfile"}
ANYWHERE = {"socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
PAIRS = {"os.rename", "os.link", "os.symlink", "shutil.copyfile"}
Schema = dict[str, Any]


def places(schema: Schema, kinds: Schema, key: str = "") -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Every key that takes a text, and a function of the text that makes the value of the whole schema."""
    if "$ref" in schema:
        schema = kinds[schema["$ref"].rpartition("/")[2]]
    is_anything = not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}
    if is_anything or (schema.get("type") == "string" and not schema.keys() & {"enum", "const"}):
        yield key, lambda text: text
    if is_anything:
        yield key, lambda text: {text: {}}
        yield key, lambda text: [{"fedavg": {"option": text}}]
    for one in [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        yield from places(one, kinds, key)
    if schema.get("type") == "array":
        for inner, make in places(schema.get("items") or {}, kinds, key):
            yield inner, lambda text, make=make: [make(text)]
    if schema.get("additionalProperties"):
        yield key, lambda text: {"option": text}
        yield key, lambda text: {text: {}}
    properties = schema.get("properties", {})
    kind = {name: one["const"] for name, one in properties.items() if "const" in one}
    for name, value in properties.items():
        for inner, make in places(value, kinds, f"{key}.{name}".lstrip(".")):
            yield inner, lambda text, make=make, name=name: kind | {name: make(text)}


def cases(outside: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key and the changes of the config, for every key that takes a text and every kind of text."""
    schema = Experiment.model_json_schema()
    texts = [
        str(outside / "data"),
        "bare",
        f"{outside}/code.py:Name",
        "outside_module:Name",
        "s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http",
        "http://127.0.0.1:9",
        f"sqlite:///{outside}/data",
    ]
    known = set()  # the kinds of a union share keys
    for key, make in places(schema, schema.get("$defs", {})):
        for text in texts:
            if (name := f"{key}: {make(text)}") not in known:
                known.add(name)
                yield name, make(text)


def merged(values: Any, changes: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return values | {key: merged(values.get(key), value) for key, value in changes.items()}


def write(file: Path, head: list[str], values: dict[str, Any]) -> None:
    """Writes a record with the config hash of these values, so that it is not refused as an edited one."""
    text = "".join(head[1:]) + yaml.safe_dump(values)
    file.write_text(text)
    with suppress(UserError, AttributeError):
        file.write_text(f"# config hash {load(file).config_hash}\n{text}")


def main(run: Path, outside: Path) -> None:
    touched: list[str] = []
    watched = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watched or event not in EVENTS:
            return
        if "__editable__" in str(arguments[0]) or arguments[0] == "git":  # no folder; the commit of this package
            return
        named = [str(one) for one in arguments[: 2 if event in PAIRS else 1] if isinstance(one, str | bytes | Path)]
        if event in ANYWHERE or any(
            "outside" in name or os.path.abspath(name).startswith(str(outside)) for name in named
        ):
            touched.append(f"{event} {arguments[:2]}"[:200])

    kept = shutil.copytree(run, run.with_name("kept"))
    record = (run / "config.yaml").read_text()
    head = [line + "\n" for line in record.splitlines() if line.startswith("#")]
    sys.path.insert(0, str(outside))
    os.chdir(outside)
    cfl_ray.resume(run, on_ray=False)  # imports what is imported later
    sys.addaudithook(hook)
    values = yaml.safe_load(record)
    results: dict[str, list[str]] = {"refused": [], "invalid": [], "resumed": [], "failed": [], "touched": []}
    outcome = "resumed"
    for name, changes in cases(outside):
        if outcome != "refused":
            shutil.rmtree(run)
            shutil.copytree(kept, run)
        changed = merged(values, changes)
        tracking = changes.get("tracking", {}).keys()
        changed["tracking"]["enabled"] = bool(
            tracking - {"experiment"}
        )  # which leads to the store of the output folder
        write(run / "config.yaml", head, changed)
        touched.clear()
        watched = True
        try:
            cfl_ray.resume(run, on_ray=False)
            outcome = "resumed"
        except UntrustedError:
            outcome = "refused"
        except UserError:
            outcome = "invalid"
        except Exception as error:
            outcome, name = "failed", f"{name}: {error!r}"
        watched = False
        results[outcome].append(name)
        results["touched"] += [f"{name}: {what}" for what in touched]
    touched.clear()
    watched = True  # the hook sees what a trusted run does
    write(run / "config.yaml", head, values | {"task": f"{outside}/code.py:Name"})
    with suppress(UserError, AttributeError):
        cfl_ray.resume(run, on_ray=False, trust=True)
    print(json.dumps(results | {"trusted": list(touched)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
