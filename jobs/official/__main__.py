"""The page docs/official.md: methods beside the code of their authors, on the same data and from the same weights.

    git clone https://github.com/felisat/clustered-federated-learning CHECKOUT
    python -m jobs.official cfl CHECKOUT        writes the section of CFL
    git clone https://github.com/jichan3751/ifca CHECKOUT
    python -m jobs.official ifca CHECKOUT
    git clone https://github.com/dunzeng/StoCFL CHECKOUT
    pip install --no-deps --target CHECKOUT fedlab==1.2.1
    python -m jobs.official stocfl CHECKOUT
    git clone https://github.com/MMorafah/PACFL CHECKOUT
    python -m jobs.official pacfl CHECKOUT
    git clone https://github.com/omarfoq/FedEM CHECKOUT
    python -m jobs.official fedem CHECKOUT
    git clone https://github.com/CharlieDinh/pFedMe CHECKOUT
    python -m jobs.official pfedme CHECKOUT
    git clone https://github.com/Heasung-Kim/clustered-federated-learning-via-gradient-based-partitioning CHECKOUT
    python -m jobs.official cflgp CHECKOUT
    git clone https://github.com/Chen-Junbao/FedCCFA CHECKOUT
    python -m jobs.official fedccfa CHECKOUT
    git clone https://github.com/lgcollins/FedRep CHECKOUT
    python -m jobs.official fedrep CHECKOUT
    python -m jobs.official apfl CHECKOUT
    git clone https://github.com/TsingZ0/PFLlib CHECKOUT
    python -m jobs.official fedcac CHECKOUT
    python -m jobs.official fedas CHECKOUT
    python -m jobs.official pfllib CHECKOUT     writes the section of its other methods
    git clone https://github.com/LINs-lab/FedRC CHECKOUT
    python -m jobs.official fedrc CHECKOUT
    git clone https://github.com/davedleo/FedGWC CHECKOUT
    python -m jobs.official fedgwc CHECKOUT
    git clone https://github.com/microsoft/FedDrift CHECKOUT
    python -m jobs.official feddrift CHECKOUT
    git clone https://github.com/MediaBrain-SJTU/pFedGraph CHECKOUT
    pip install --target CHECKOUT/deps cvxpy
    python -m jobs.official pfedgraph CHECKOUT
    git clone https://github.com/ycruan/FedSoft CHECKOUT
    python -m jobs.official fedsoft CHECKOUT
    git clone https://github.com/jhoon-oh/FedBABU CHECKOUT
    python -m jobs.official fedbabu CHECKOUT
    git clone https://github.com/QinbinLi/MOON CHECKOUT
    python -m jobs.official moon CHECKOUT
    git clone https://github.com/yuetan031/FedProto CHECKOUT
    python -m jobs.official fedproto CHECKOUT
    git clone https://github.com/JianXu95/FedPAC CHECKOUT
    pip install --target CHECKOUT/deps cvxpy
    python -m jobs.official fedpac CHECKOUT
    git clone https://github.com/med-air/FedBN CHECKOUT
    python -m jobs.official fedbn CHECKOUT
    git clone https://github.com/dariofenoglio98/FLUX CHECKOUT
    pip install --no-deps --target CHECKOUT/deps kneed
    python -m jobs.official flux CHECKOUT
    git clone https://github.com/dariofenoglio98/FEROMA CHECKOUT
    python -m jobs.official feroma CHECKOUT
    git clone https://github.com/Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning CHECKOUT
    python -m jobs.official clove CHECKOUT

The checkouts are no part of this project and stay as they are; what their age needs is replaced in memory.
"""

import argparse
import subprocess
from importlib import import_module
from pathlib import Path

from jobs.official.page import PAGE, with_section

METHODS = (  # modules of this package, in the order of the sections
    *("cfl", "ifca", "stocfl", "pacfl", "fedem", "pfedme", "cflgp", "fedccfa", "fedrep", "apfl", "fedcac", "fedas"),
    *("pfllib", "fedrc", "fedgwc", "feddrift", "pfedgraph", "fedsoft", "fedbabu", "moon"),
    *("fedproto", "fedpac", "fedbn", "flux", "feroma", "clove"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("checkout", type=Path, help="folder of its authors' repository")
    args = parser.parse_args()
    git = ["git", "-C", args.checkout, "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.check_output(git, text=True).strip()
    section = import_module(f"jobs.official.{args.method}").section(args.checkout.absolute(), commit)
    PAGE.write_text(with_section(PAGE.read_text(), section))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
