# syntax=docker/dockerfile:1
# The image of cluster nodes and of single runs: cfl_ray and its pinned dependencies on Python 3.12, Linux x86-64, not root.
#
#   docker build -t registry.example.com/cfl-ray:0.1.0-cuda .
#   docker build -t registry.example.com/cfl-ray:0.1.0-cpu --build-arg DEVICE=cpu .
#   docker run --rm -v "$PWD/runs:/home/ray/runs" --shm-size=2g registry.example.com/cfl-ray:0.1.0-cpu cfl-ray run
#
# The CUDA libraries come with the wheels of PyTorch: the base has none, and the node only needs NVIDIA's driver and container
# toolkit. Layers from the most stable to the most changing: system, PyTorch, other dependencies, cfl_ray (1 MB).
# No HEALTHCHECK: the same image is a head, a worker and a single run; KubeRay and the cluster launcher have checks of their own.
#
# A tag moves with its updates, and this file names no digest: it was written without access to the registry. A build that
# is the same next year has the digest here; cluster_configs/check_base.sh prints the line, and says when the tag has moved.
ARG BASE=python:3.12-slim-trixie
FROM ${BASE}

# rsync and openssh-client: the cluster launcher copies files into the container, and its head logs in to the workers.
# wget: probes of KubeRay. tini: reaps processes that Ray leaves behind.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client rsync tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash ray

WORKDIR /opt/cfl_ray
ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

# cuda | cpu. The CPU build of PyTorch has an index of its own; the constraint torch==X holds for X+cpu, too.
ARG DEVICE=cuda
COPY cluster_configs/constraints.txt cluster_configs/
RUN --mount=type=cache,target=/root/.cache/pip case "$DEVICE" in \
        cuda) pip install -c cluster_configs/constraints.txt torch torchvision ;; \
        cpu) pip install -c cluster_configs/constraints.txt --no-deps --index-url https://download.pytorch.org/whl/cpu torch torchvision ;; \
        *) echo "DEVICE must be cuda or cpu, got $DEVICE" >&2; exit 1 ;; \
    esac

# Without the package, this installs its dependencies alone.
ARG EXTRAS=aws,gcp,tensorboard
COPY pyproject.toml README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip pip install -c cluster_configs/constraints.txt ".[$EXTRAS]"

COPY cfl_ray cfl_ray
RUN --mount=type=cache,target=/root/.cache/pip pip install -c cluster_configs/constraints.txt --no-deps --force-reinstall .
COPY --chmod=755 cluster_configs/run_or_resume.sh /usr/local/bin/run-or-resume

# A number, since Kubernetes cannot tell whether a name is root (runAsNonRoot). HOME is read by the cluster launcher.
USER 1000:1000
ENV HOME=/home/ray RAY_AUTH_MODE=token
WORKDIR /home/ray
ENTRYPOINT ["tini", "--"]
CMD ["cfl-ray", "--help"]
