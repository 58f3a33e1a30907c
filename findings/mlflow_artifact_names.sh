#!/usr/bin/env bash
# Files that MLflow's server keeps lose what follows "?" or "#" in their names, so that files overwrite each other.
#
# Tried with mlflow 3.17.2, Python 3.11; artifacts proxied by the server (its default), kept in a folder.
# Guess: a file is kept under its name, or refused.
# Seen: `log_artifact` of "client?1.csv" and "client#2.csv" succeeds twice and leaves one file, "client", with the content
# of the second. With the same kind of store opened directly, without a server, both keep their names. Federated learning
# logs a file a client or a cluster, named by ids and settings that the user chooses ("site#2"): all but the last are lost
# in silence.
set -euo pipefail
folder=$(mktemp -d)
server=""
trap '[ -z "$server" ] || kill "$server"; wait; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlflow==3.17.2
for proxy in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do unset "$proxy"; done
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR=false
cat >"$folder/look.py" <<'PY'
import json
import sys
from pathlib import Path

from mlflow import MlflowClient

uri, folder = sys.argv[1], Path(sys.argv[2])
client = MlflowClient(uri)
run = client.create_run(client.create_experiment("names", sys.argv[3] or None)).info.run_id
folder.mkdir()
for name in ("client?1.csv", "client#2.csv"):
    (folder / name).write_text(name)
    client.log_artifact(run, str(folder / name))
kept = sorted(path for path in Path(sys.argv[4]).rglob("*") if path.is_file())
print(json.dumps({path.name: path.read_text() for path in kept}))
PY
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cd "$folder"
"$folder/venv/bin/mlflow" server --host 127.0.0.1 --port "$port" --workers 1 --backend-store-uri "sqlite:///$folder/served.db" \
    --artifacts-destination "$folder/kept" >"$folder/server.log" 2>&1 &
server=$!
for _ in {1..600}; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
    sleep 0.5
done
served=$("$folder/venv/bin/python" "$folder/look.py" "http://127.0.0.1:$port" "$folder/one" "" "$folder/kept" | tail -n 1)
direct=$("$folder/venv/bin/python" "$folder/look.py" "sqlite:///$folder/direct.db" "$folder/two" "file://$folder/direct" "$folder/direct" | tail -n 1)
echo "served: $served"
echo "direct: $direct"
[ "$served" = '{"client": "client#2.csv"}' ]
[ "$direct" = '{"client#2.csv": "client#2.csv", "client?1.csv": "client?1.csv"}' ]
