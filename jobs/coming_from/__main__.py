"""The measured sections of docs/coming_from.md and docs/coming_from_flower.md, each from a checkout of the library.

    git clone https://github.com/TsingZ0/PFLlib CHECKOUT
    pip install --target CHECKOUT/deps cvxpy
    python -m jobs.coming_from pfllib CHECKOUT
    git clone https://github.com/KarhouTam/FL-bench CHECKOUT
    pip install --target CHECKOUT/deps omegaconf cvxpy
    python -m jobs.coming_from fl_bench CHECKOUT
    python -m jobs.coming_from scaffold CHECKOUT
    python -m jobs.coming_from rules            needs no checkout
    pip install --target FOLDER flwr==1.42.0
    python -m jobs.coming_from flower FOLDER

The checkouts are no part of this project and stay as they are; what is not needed is replaced in memory.
"""

import argparse
from importlib import import_module
from pathlib import Path

from jobs.official.page import with_section

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {  # by module
    "rules": "coming_from.md",
    "pfllib": "coming_from.md",
    "fl_bench": "coming_from.md",
    "scaffold": "coming_from.md",
    "flower": "coming_from_flower.md",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=PAGES)
    parser.add_argument("checkout", type=Path, nargs="?", help="folder of the library's repository")
    args = parser.parse_args()
    if args.checkout is None and args.section != "rules":
        parser.error(f"{args.section} needs the folder of its repository")
    given = [args.checkout.absolute()] if args.checkout else []
    section = import_module(f"jobs.coming_from.{args.section}").section(*given)
    page = DOCS / PAGES[args.section]
    page.write_text(with_section(page.read_text(), section))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
