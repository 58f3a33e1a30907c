"""Maps of the clients' signatures by t-SNE, a panel for each setting of a study and each of its methods.

    cfl-ray compare jobs/experiments/stocfl/signatures.yaml
    python -m jobs.tsne runs/stocfl-signatures               writes runs/stocfl-signatures/tsne.png

A signature is that of the diagnostic `signatures` (docs/metrics.md), its leading principal components; colours are the
true groups. Printed for each panel: the share of clients whose nearest neighbour in the map is of their true group. L.
van der Maaten, G. Hinton. Visualizing Data using t-SNE. Journal of Machine Learning Research 9, 2008; scikit-learn's
implementation.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

from cfl_ray import UserError, load_run
from cfl_ray.results.study_folder import run_folders

PERPLEXITY, COLUMNS = 30.0, 4  # most panels in a row


@dataclass(frozen=True)
class Map:
    """The map of one run."""

    title: str
    points_S2: np.ndarray
    group_S: np.ndarray  # true group of each client; -1: not known

    @property
    def purity(self) -> float:
        """Share of clients, 0..1, whose nearest neighbour is of their group."""
        nearest_S = NearestNeighbors(n_neighbors=1).fit(self.points_S2).kneighbors(return_distance=False)[:, 0]
        return float((self.group_S[nearest_S] == self.group_S).mean())


def maps(study: Path, perplexity: float = PERPLEXITY) -> list[Map]:
    """The map of the last recorded signatures of every run of a study that has any, in the order of the study.

    perplexity: at most a third of the clients less one is used. Raises UserError if no run has signatures.
    """
    found = []
    for setting, method, folder in run_folders(study):
        (result,) = load_run(folder).methods.values()
        by_round = result.diagnostics.get("signatures", {})
        if not by_round:
            continue
        last = by_round[max(by_round)]
        group_of = result.assignments().set_index("client")["group"]
        title = f"{setting}, {method}, {folder.name}"
        found.append(Map(title, plane(last.value, perplexity), group_of.loc[last.labels[0]].to_numpy()))
    if not found:
        raise UserError(f"no run in {study} has the diagnostic signatures; StoCFL, FedClust and AutoCFL report it")
    return found


def plane(signature_SQ: np.ndarray, perplexity: float) -> np.ndarray:
    """float32 (S, 2): the map of the signatures. Raises UserError for fewer than four."""
    if len(signature_SQ) < 4:
        raise UserError(f"t-SNE needs at least 4 clients with a signature, got {len(signature_SQ)}")
    most = (len(signature_SQ) - 1) / 3
    points_S2: np.ndarray = TSNE(perplexity=min(perplexity, most), random_state=0).fit_transform(signature_SQ)
    return points_S2


def draw(panels: list[Map], file: Path) -> None:
    """Writes the panels as a PNG."""
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.scatter(*panel.points_S2.T, c=panel.group_S, cmap="tab10", vmin=-1, vmax=9, s=8)
        axes.set_title(f"{panel.title}\nneighbours of one group: {panel.purity:.0%}", fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--out", type=Path, help="the PNG file; default: tsne.png in the folder")
    parser.add_argument("--perplexity", type=float, default=PERPLEXITY)
    given = parser.parse_args(arguments)
    panels = maps(given.study, given.perplexity)
    for panel in panels:
        print(f"{panel.title}: {len(panel.group_S)} clients, {panel.purity:.3f} with a neighbour of their group")
    file = given.out or given.study / "tsne.png"
    draw(panels, file)
    print(f"wrote {file}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
