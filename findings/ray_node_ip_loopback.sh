#!/usr/bin/env bash
# A Ray cluster that is started with the address 127.0.0.1 listens on all network addresses of the machine (Linux).
#
# Tried with Ray 2.60.0 on Python 3.11; the machine needs a network address beside 127.0.0.1.
# Guess: `ray start --head --node-ip-address=127.0.0.1` keeps the cluster on loopback, as servers do that are given it.
# Seen: Ray replaces 127.0.0.1 by an address that other machines reach, and ports of the head and of the raylet are open
# on all addresses. Simulations of a federation often run on a machine of many users: who names the loopback address so
# that clients' data stay there has a cluster that the network can reach. RAY_AUTH_MODE=token, or a firewall, keeps
# others out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ray==2.60.0 psutil==7.2.1
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token" RAY_USAGE_STATS_ENABLED=0
"$folder/venv/bin/python" -c "import secrets; print(secrets.token_hex(32))" >"$folder/token"
"$folder/venv/bin/python" - "$folder" <<'PY'
import subprocess
import sys
import time

import psutil

folder, processes = sys.argv[1], []
options = ["--head", "--block", "--port=0", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
command = [f"{folder}/venv/bin/ray", "start", *options, "--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray"]
with open(f"{folder}/log", "w") as log:
    ray = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
try:
    for _ in range(120):
        time.sleep(1)
        if "Ray runtime started" in open(f"{folder}/log").read() or ray.poll() is not None:
            break
    processes = psutil.Process(ray.pid).children(recursive=True)
    found = {
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and process.name() in ("gcs_server", "raylet")
    }
finally:
    for process in [*processes, psutil.Process(ray.pid)]:
        if process.is_running():
            process.kill()
    ray.wait()
print(open(f"{folder}/log").read()[:400])
print(*sorted(found), sep="\n")
assert {name for name, address in found if address in ("::", "0.0.0.0")} == {"gcs_server", "raylet"}, found
PY
echo "as described"
