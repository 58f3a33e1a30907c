#!/usr/bin/env bash
#SBATCH --job-name=cfl-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
# A Ray cluster of the nodes of a Slurm job, for one run; the head and the driver are on the first node.
#
#   sbatch cluster_configs/slurm.sh RUN mine.yaml rounds=200                          # CPUs
#   sbatch --gpus-per-node=2 cluster_configs/slurm.sh RUN mine.yaml runtime.gpus_per_host=0.25
#
# RUN is the folder of the run, on a file system that all nodes share. The same command continues a run that was interrupted: by
# scancel, the time limit, preemption or a lost node. After preemption or a lost node, Slurm requeues the job
# by itself. Three minutes before the time limit the run is ended, and with CFL_RAY_REQUEUE=1 the job is requeued, too. If Ray dies on a
# node other than the first, the run continues; with `sbatch --no-kill` also if such a node is lost (but then, if the first node is
# lost, the others stay allocated until the time limit).
#
# cfl_ray is found on the nodes by PATH: activate its virtual environment, on a shared file system, before sbatch, which passes
# the environment on. Further variables:
#   CFL_RAY_INTERFACE      network interface of the nodes, e.g. ib0; default: the first address of `hostname -I`
#   CFL_RAY_JOIN_SECONDS   limit for all nodes to join, in which a Ray that does not start is started again; default: 300
#   SLURM_TMPDIR           node-local folder for Ray's files, where the cluster sets one; default: /tmp
#
# `ray symmetric-run` is not used, because it ends all Ray processes of the user on a node, including those of other jobs.
#
# shellcheck disable=SC2317,SC2329  # functions that are called on the nodes and by traps
set -euo pipefail

usage="usage: sbatch slurm.sh RUN [EXPERIMENT.yaml] [SECTION.KEY=VALUE]..."
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job; $usage" >&2; exit 2; }
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
run=$1
shift

node_address() {
    if [ -n "${CFL_RAY_INTERFACE:-}" ]; then
        ip -4 -o address show dev "$CFL_RAY_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}'
    else
        hostname -I | cut -d " " -f 1
    fi
}

free_ports() { # from the system, so that jobs and users who share a node do not collide
    python -c '
import socket, sys
probes = [socket.socket() for _ in range(int(sys.argv[1]))]
for probe in probes:
    probe.bind(("", 0))
print(*(probe.getsockname()[1] for probe in probes))' "$1"
}

wait_for() { # returns the status of a process; `wait` alone ends with the first signal
    local status=0
    wait "$1" || status=$?
    while kill -0 "$1" 2> /dev/null; do
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}

listens() { (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null; }

ray_node() { # on every node, as its one task
    local folder=${SLURM_TMPDIR:-/tmp} deadline=$((SECONDS + ${CFL_RAY_JOIN_SECONDS:-300})) node status=0 asked="" memory=()
    [ ${#folder} -le 40 ] || folder=/tmp # paths of sockets have at most 107 bytes
    folder=$(mktemp -d "$folder/r.XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$folder'" EXIT
    trap 'exit 0' USR2
    # Ray would take 30 % of the machine's memory, whatever the job's share of it
    [ "${SLURM_MEM_PER_NODE:-0}" -eq 0 ] || memory=(--object-store-memory=$((SLURM_MEM_PER_NODE * 1024 * 1024 * 3 / 10)))
    if [ "$SLURM_NODEID" -eq 0 ]; then
        set -- --head "--port=$GCS_PORT" --dashboard-host=127.0.0.1 "--dashboard-port=$DASHBOARD_PORT" \
            "--ray-client-server-port=$CLIENT_PORT"
    else
        until listens "$HEAD" "$GCS_PORT"; do sleep 1; done
        set -- "--address=$HEAD:$GCS_PORT"
    fi
    trap '' USR2 # Slurm sends it to all processes of the step; Ray's ignore it and are ended by `node`
    while [ -z "$asked" ]; do # Ray gives up a node after half a minute, which is short on a busy machine or file system
        # Ray would wait half a minute for work to leave a node that ends; Slurm kills after about as long (KillWait)
        RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 ray start "$@" --block --disable-usage-stats "--temp-dir=$folder" "--node-ip-address=$(node_address)" \
            "--num-cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}" "${memory[@]}" \
            --min-worker-port=0 --max-worker-port=0 "--dashboard-agent-listen-port=$(free_ports 1)" &
        node=$!
        trap 'asked=1; kill -TERM "$node" 2> /dev/null || true' TERM INT USR2
        status=0
        wait_for "$node" || status=$?
        [ -z "$asked" ] || break # status 0: else the end of a successful job would look like a failure
        [ "$status" -ne 0 ] && [ "$SECONDS" -lt "$deadline" ] || return "$status"
        echo "slurm.sh: Ray has ended on $(node_address) (status $status) and is started again"
        sleep 1
    done
}

nodes_joined() {
    local count=0
    if listens "$HEAD" "$GCS_PORT"; then
        count=$(python -c '
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(sum(node["Alive"] for node in ray.nodes()))' "$RAY_ADDRESS" 2> /dev/null) || count=0
    fi
    echo "$count"
}

cluster="" driver="" early=""

stop_cluster() {
    [ -n "$cluster" ] || return 0
    # The tasks remove their folders; a signal to srun would kill them. The step is the first of the job. Of SIGTERM
    # Slurm would write that the step is cancelled.
    scancel --signal=USR2 "$SLURM_JOB_ID.0" 2> /dev/null || true
    for _ in {1..20}; do
        kill -0 "$cluster" 2> /dev/null || break
        sleep 1
    done
    kill -TERM "$cluster" 2> /dev/null || true
    wait_for "$cluster" || true
    cluster=""
}

end_early() { # $1: why. The driver ends the run as Ctrl-C does; the last checkpoint stays
    early=$1
    echo "slurm.sh: the run is ended: $1"
    if [ -n "$driver" ]; then
        kill -TERM "$driver" 2> /dev/null || true
    else
        stop_cluster
        requeue
        exit 130
    fi
}

requeue() { # after the time limit, if the user wants it
    if [ "$early" = "time limit" ] && [ "${CFL_RAY_REQUEUE:-0}" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
}

trap stop_cluster EXIT
trap 'end_early "signal"' TERM INT
trap 'end_early "time limit"' USR1

export RAY_AUTH_MODE=token
if [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
    (umask 077 && ray get-auth-token --generate > /dev/null 2>&1) # the user's token, with which `cfl-ray status` works, too
    chmod go= "$HOME/.ray/auth_token"                             # Ray alone would leave it readable for all
fi

HEAD=$(node_address)
read -r GCS_PORT DASHBOARD_PORT CLIENT_PORT <<< "$(free_ports 3)"
export HEAD GCS_PORT DASHBOARD_PORT CLIENT_PORT RAY_ADDRESS=$HEAD:$GCS_PORT
nodes=$SLURM_JOB_NUM_NODES
echo "slurm.sh: $nodes nodes: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' '); head $RAY_ADDRESS, dashboard $DASHBOARD_PORT"

# A Ray that dies ends neither the step nor the other nodes.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" \
    --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \
    bash -c "set -euo pipefail; $(declare -f node_address free_ports listens wait_for ray_node); ray_node" &
cluster=$!

deadline=$((SECONDS + ${CFL_RAY_JOIN_SECONDS:-300}))
until [ "$(nodes_joined)" -ge "$nodes" ]; do
    if [ $SECONDS -gt $deadline ] || ! kill -0 "$cluster" 2> /dev/null; then
        echo "slurm.sh: $(nodes_joined) of $nodes nodes joined within ${CFL_RAY_JOIN_SECONDS:-300} s; their messages are above;" \
            "raise CFL_RAY_JOIN_SECONDS, or name the network that they share with CFL_RAY_INTERFACE" >&2
        exit 1
    fi
    sleep 1
done
echo "slurm.sh: $nodes of $nodes nodes joined"

if [ -f "$run/config.yaml" ]; then
    cfl-ray resume "$run" &
else
    cfl-ray run --run-dir "$run" "$@" &
fi
driver=$!
status=0
wait_for "$driver" || status=$?
stop_cluster
[ "$status" -eq 0 ] || requeue
exit "$status"
