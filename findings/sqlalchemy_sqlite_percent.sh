#!/usr/bin/env bash
# SQLAlchemy 2.1 decodes percent-encoded characters in the path of an SQLite URI; 2.0 does not.
#
# Tried with SQLAlchemy 2.0.44 and 2.1.0 on Python 3.11.
# Guess: an SQLite URI names the same file in both, as the URL of a file on disk is documented as a plain path.
# Seen: sqlite:////DIR/a%20b/x.db is the file "DIR/a%20b/x.db" with 2.0 and "DIR/a b/x.db" with 2.1; a question mark in a path
# can be expressed with 2.1 alone (%3F). MLflow accepts both versions (sqlalchemy<3) and builds such URIs from folder names
# as plain text, so that the same store of experiments is found or not found depending on the version beside it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/a%20b" "$folder/a b"
cat > "$folder/open.py" <<'PY'
import sys
import sqlalchemy
from sqlalchemy import create_engine, text

with create_engine(f"sqlite:///{sys.argv[1]}/a%20b/x{sqlalchemy.__version__}.db").connect() as connection:
    connection.execute(text("create table t (x)"))
PY
for version in 2.0.44 2.1.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "sqlalchemy==$version"
    "$folder/$version/bin/python" "$folder/open.py" "$folder"
done
(cd "$folder" && find . -name 'x*.db' | sort | tee files)
diff <(printf '%s\n' './a b/x2.1.0.db' './a%20b/x2.0.44.db') "$folder/files" && echo "as described"
