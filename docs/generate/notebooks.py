"""Notebooks with their stored outputs as pages."""

from pathlib import Path

from nbconvert import MarkdownExporter


def pages(folder: Path) -> dict[str, str | bytes]:
    """Returns a page for each notebook of the folder, and the pictures in its outputs."""
    made: dict[str, str | bytes] = {}
    for file in sorted(folder.glob("*.ipynb")):
        exporter = MarkdownExporter()
        text, resources = exporter.from_filename(str(file), resources={"unique_key": file.stem})
        note = f"\n!!! note\n    This is the notebook `examples/{file.name}`; its outputs are those of a real run.\n"
        title, _, rest = text.lstrip().partition("\n")
        made[f"notebooks/{file.stem}.md"] = f"{title}\n{note}{rest}"
        made |= {f"notebooks/{Path(name).name}": data for name, data in resources["outputs"].items()}
    return made
