"""The pictures of the concepts: `python docs/generate/pictures.py` writes them to docs/images."""

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "images"
_STYLE = """<style>
.pic-text { fill: #1f2328; font: 14px system-ui, sans-serif; }
.pic-small { font-size: 12px; } .pic-strong { font-weight: 600; }
.pic-box { fill: #f0f3f8; stroke: #57606a; } .pic-a { fill: #cfe3fb; stroke: #2563a8; }
.pic-b { fill: #fde3c3; stroke: #a85b13; } .pic-c { fill: #d3efd8; stroke: #1f7a3a; }
.pic-line { fill: none; stroke: #57606a; stroke-width: 1.5; } .pic-tip { fill: #57606a; }
.pic-dashed { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
.pic-text { fill: #e6edf3; } .pic-line { stroke: #9ba5b0; } .pic-tip { fill: #9ba5b0; }
.pic-box { fill: #262c36; stroke: #9ba5b0; } .pic-a { fill: #173a5f; stroke: #6cb0f5; }
.pic-b { fill: #55360f; stroke: #f0b26b; } .pic-c { fill: #174a26; stroke: #6fce8a; }
}
</style>"""


class Picture:
    """An SVG picture made of boxes, arrows and texts; lengths in pixels."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.title, self.width, self.height = name, title, width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """A line of text, centred at (x, y) or starting there (`start`)."""
        classes = " ".join(["pic-text", *(f"pic-{one}" for one in kind.split())])
        self.parts.append(f'<text class="{classes}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box", small: bool = True
    ) -> None:
        """A box with lines of text in its middle; the first one is strong where there are several."""
        self.parts.append(f'<rect class="pic-{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        lines = text.split("\n") if text else []
        top = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            strong = "strong" if number == 0 and len(lines) > 1 else "small" if small and len(lines) > 1 else ""
            self.text(x + width / 2, top + 18 * number, line, strong)

    def arrow(self, *points: tuple[float, float], label: str = "", at: tuple[float, float] = (0, 0)) -> None:
        """A line through points that ends in a tip; `label` is centred at `at`."""
        path = " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="pic-line" d="M{path}" marker-end="url(#{self.name}-tip)"/>')
        if label:
            self.text(*at, label, "small")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame."""
        self.parts.append(
            f'<rect class="pic-line pic-dashed" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
        )

    def svg(self) -> str:
        """Returns the picture as a file."""
        tip = (
            f'<defs><marker id="{self.name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path class="pic-tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{self.name}-title">'
        )
        title = f'<title id="{self.name}-title">{escape(self.title)}</title>'
        return "\n".join([head, title, _STYLE, tip, *self.parts, "</svg>"]) + "\n"


def clusters() -> Picture:
    """True groups, the cohort of a round, and the clusters that a method finds."""
    drawn = Picture("clusters", "Clients of three true groups, a cohort of them, and the clusters found", 760, 300)
    drawn.text(130, 24, "federation: N clients", "strong")
    drawn.text(390, 24, "cohort of round t: M clients", "strong")
    drawn.text(640, 24, "clusters: K models", "strong")
    kinds = ["a", "b", "c", "b", "a", "c", "a", "c", "b", "c", "a", "b"]
    chosen = {1, 2, 4, 6, 8, 9}
    for client, kind in enumerate(kinds):
        x, y = 40 + 62 * (client % 3), 44 + 48 * (client // 3)
        drawn.box(x, y, 52, 36, str(client), kind)
    drawn.arrow((232, 130), (304, 130), label="drawn", at=(268, 120))
    for place, client in enumerate(sorted(chosen)):
        drawn.box(318 + 76 * (place % 2), 62 + 56 * (place // 2), 64, 40, str(client), kinds[client])
    drawn.arrow((468, 130), (542, 130), label="method", at=(505, 120))
    for row, (kind, members) in enumerate([("a", "4, 6"), ("b", "1, 8"), ("c", "2, 9")]):
        drawn.box(556, 50 + 62 * row, 170, 50, f"cluster {row}: theta_{row}\nclients {members}", kind)
    drawn.text(380, 262, "Colours are true groups: the method does not see them.", "small")
    drawn.text(380, 282, "ARI, NMI, purity and correct_clients compare them with the clusters.", "small")
    return drawn


def system() -> Picture:
    """Processes of a run and what moves between them in a round."""
    drawn = Picture("system", "Processes of a run and what moves between them", 760, 400)
    drawn.box(20, 40, 170, 76, "driver\ncfl-ray run, a job\nrecords results")
    drawn.box(275, 40, 220, 76, "server actor\nmethod: (state, clients) → state\ncohort, clusters, evaluation", "a")
    drawn.box(575, 40, 165, 76, "checkpoints\nsafetensors, JSON\nin the run directory")
    drawn.arrow((190, 66), (273, 66), label="round t?", at=(232, 58))
    drawn.arrow((275, 96), (192, 96), label="metrics", at=(232, 112))
    drawn.arrow((495, 78), (573, 78), label="state", at=(534, 70))
    drawn.box(20, 300, 170, 76, "results\nmetrics.jsonl, MLflow")
    drawn.arrow((105, 116), (105, 298))
    drawn.frame(225, 176, 515, 210)
    drawn.text(480, 196, "each node of the Ray cluster", "small", "start")
    drawn.box(245, 210, 200, 50, "object store\nK models; sums of hosts", "c")
    for host in range(2):
        drawn.box(
            500, 206 + 86 * host, 220, 70, f"host {host}\ntrains clients of a chunk\nand adds up their changes", "b"
        )
    drawn.box(245, 310, 200, 56, "shards\nArrow files, memory-mapped", "c")
    drawn.arrow((350, 116), (350, 208), label="models down", at=(298, 150))
    drawn.arrow((420, 208), (420, 118), label="K float32 rows up", at=(484, 150))
    drawn.arrow((445, 228), (498, 228))
    drawn.arrow((498, 250), (447, 250))
    drawn.arrow((445, 332), (498, 332))
    return drawn


def round_flow() -> Picture:
    """One round of a method that averages per cluster."""
    drawn = Picture("round", "One round: send, train, average, evaluate", 760, 250)
    steps = [
        ("1 cohort", "draw M clients\nthat are online", "box"),
        ("2 send", "a model to\neach client", "a"),
        ("3 train", "local SGD on\nits own data", "b"),
        ("4 average", "changes, added\nup on the hosts", "b"),
        ("5 state", "new models and\nassignments", "a"),
        ("6 evaluate", "test all clients;\ncheckpoint", "box"),
    ]
    for number, (name, text, kind) in enumerate(steps):
        x = 12 + 125 * number
        drawn.box(x, 40, 112, 96, f"{name}\n{text}", kind)
        if number:
            drawn.arrow((x - 13, 88), (x - 1, 88))
    drawn.text(193, 160, "mbit_down +", "small")
    drawn.text(443, 160, "mbit_up +", "small")
    drawn.arrow((693, 136), (693, 200), (68, 200), (68, 138), label="next round", at=(380, 192))
    drawn.text(380, 232, "Steps 2 to 4 are one exchange; a method may have several in a round.", "small")
    return drawn


def views() -> Picture:
    """The test data of a client in the views cluster, label and holdout."""
    drawn = Picture("views", "Test data of a client in the views cluster, label and holdout", 760, 330)
    columns = [
        ("cluster", "all of the group's\ntest set", "0 1 2 3 4 5 6 7 8 9", "0 1 2 3 4 5 6 7 8 9"),
        ("label", "test images of the\nclient's own labels", "only 2 and 7", "2 2 2 7 7 7"),
        ("holdout", "20 % of the client's\nown samples", "its own mixture", "its own mixture"),
    ]
    for number, (name, meaning, train, test) in enumerate(columns):
        x = 20 + 250 * number
        drawn.frame(x, 34, 220, 280)
        drawn.text(x + 110, 24, name, "strong")
        if name == "holdout":
            drawn.box(x + 20, 60, 144, 80, f"training: 80 %\n{train}", "a")
            drawn.box(x + 164, 60, 36, 80, "20 %", "b")
            drawn.arrow((x + 182, 140), (x + 182, 198))
        else:
            drawn.box(x + 20, 60, 180, 80, f"client's training data\n{train}", "a")
            drawn.text(x + 110, 176, "official test set, shifted", "small")
            drawn.text(x + 110, 192, "as the client's group", "small")
        drawn.box(x + 20, 200, 180, 50, f"test data\n{test}", "b")
        for line, words in enumerate(meaning.split("\n")):
            drawn.text(x + 110, 274 + 18 * line, words, "small")
    return drawn


def protocols() -> Picture:
    """Where each evaluation protocol measures."""
    drawn = Picture("protocols", "Where P-server, P-local and P-tune measure", 760, 260)
    drawn.box(20, 30, 170, 60, "server, after t\na model per client", "a")
    drawn.box(300, 30, 170, 60, "client i\nreceives the model")
    drawn.box(570, 30, 170, 60, "client i\nF more local epochs")
    drawn.arrow((190, 60), (298, 60), label="serve", at=(244, 52))
    drawn.arrow((470, 60), (568, 60), label="tune", at=(519, 52))
    drawn.box(300, 130, 170, 50, "accuracy\nP-server", "c")
    drawn.box(570, 130, 170, 50, "accuracy_tuned\nP-tune(F)", "c")
    drawn.arrow((385, 90), (385, 128))
    drawn.arrow((655, 90), (655, 128))
    drawn.box(20, 130, 170, 60, "client i, trained\nlast in round s ≤ t", "b")
    drawn.box(20, 205, 170, 45, "accuracy_local\nP-local", "c")
    drawn.arrow((105, 190), (105, 203))
    drawn.text(
        480, 220, "All three: the client's own test data, then the mean over clients. They are never mixed.", "small"
    )
    return drawn


def ledger() -> Picture:
    """Numbers that a client sends and receives in a round of three methods."""
    drawn = Picture("ledger", "Numbers sent and received by a client in one round", 760, 300)
    drawn.text(20, 26, "one client, one round, a model of P numbers; 32 bits a number", "strong", "start")
    rows = [
        ("FedAvg", [("P", "a")], [("P", "b")]),
        ("IFCA, K = 4", [("P", "a")] * 4, [("P", "b"), ("1", "c")]),
        ("FedPer", [("base", "a")], [("base", "b")]),
        ("StoCFL, round 1", [("P", "a")] * 2, [("P", "b")] * 2 + [("P", "c")]),
    ]
    drawn.text(290, 56, "down", "small")
    drawn.text(590, 56, "up", "small")
    for number, (name, down, up) in enumerate(rows):
        y = 68 + 54 * number
        drawn.text(20, y + 27, name, "", "start")
        for side, entries in ((170, down), (480, up)):
            x = float(side)
            for text, kind in entries:
                width = {"P": 60, "base": 46, "1": 20}[text]
                drawn.box(x, y, width, 42, text, kind)
                x += width + 6
    drawn.text(
        20,
        292,
        "Blue: models down. Orange: models up. Green: a choice, or a signature (once per client).",
        "small",
        "start",
    )
    return drawn


PICTURES = (clusters, system, round_flow, views, protocols, ledger)


def write(folder: Path = IMAGES) -> None:
    """Writes all pictures."""
    folder.mkdir(exist_ok=True)
    for make in PICTURES:
        drawn = make()
        (folder / f"{drawn.name}.svg").write_text(drawn.svg())


if __name__ == "__main__":
    write()
