#!/bin/sh
# Print the base images of bake.json with their present digests, as NAME=image@sha256:…, one on a line. Needs docker buildx
# and the registries. Use it for images that can be built again:
#   export $(deploy/docker/pinned-bases.sh) && make images
set -eu
cd "$(dirname "$0")/../.."
for name in PYTHON VLLM SGLANG; do
  image=$(sed -n "s/^ *\"$name\": {\"default\": \"\(.*\)\"},*$/\1/p" deploy/docker/bake.json)
  digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
  echo "$name=$image@$digest"
done
