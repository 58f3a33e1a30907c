"""A short run with processes that hang: each is named and ended, and the outcome is the same."""

import pytest
from chaos_runs import check_same_outcome


@pytest.mark.slow
def test_a_run_with_hangs_has_the_same_outcome(tmp_path):
    printed = "3 hangs", "1 host", "1 server", "1 data", "MLflow; every hang named and ended in time"
    check_same_outcome(tmp_path, ["--hang", "3", "--rounds", "12", "--limit", "10"], *printed)
