#!/bin/bash
# Compares the base of the image (ARG BASE in the Dockerfile, or $1) with what its tag is in the registry now.
#
#   cluster_configs/check_base.sh
#   docker build --build-arg BASE="$(cluster_configs/check_base.sh | tail -1)" ...
#
# The last line is the base with the tag's digest, to be written into the Dockerfile. Exit status 0: the base is named by
# this digest; 3: by another one, or by none; 1: the registry does not answer. Needs docker with buildx, and the network.
set -euo pipefail

base=${1:-$(sed -n 's/^ARG BASE=//p' "$(dirname "$0")/../Dockerfile")}
tag=${base%%@*}
digest=$(docker buildx imagetools inspect "$tag" --format '{{.Manifest.Digest}}') || {
    echo "no digest of $tag: docker buildx or the registry does not answer" >&2
    exit 1
}
if [ "$base" = "$tag@$digest" ]; then
    echo "the base is named by the digest that $tag has now"
    echo "$base"
    exit 0
fi
echo "the base is $base; $tag has the digest $digest now"
echo "$tag@$digest"
exit 3
