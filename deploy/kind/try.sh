#!/usr/bin/env bash
# Try the chart on this machine: a kind cluster with one node, CPU images, and a run of values-no-gpu.yaml that learns addition.
#
#   deploy/kind/try.sh          make the cluster, build and load the images, install the run, and wait for its first step
#   deploy/kind/try.sh down     remove the cluster
#
# Needs docker, kind, kubectl, helm, 4 CPUs and 12 GiB. environment: CLUSTER (penstock), RELEASE (try), DEADLINE_S (1800).
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=${CLUSTER:-penstock} release=${RELEASE:-try} deadline_s=${DEADLINE_S:-1800}
version=$(sed -n 's/^appVersion: *//p' helm/penstock/Chart.yaml)

for program in docker kind kubectl helm; do
  command -v "$program" >/dev/null || { echo "try.sh: error: $program is not installed" >&2; exit 2; }
done

if [ "${1:-}" = down ]; then
  exec kind delete cluster --name "$cluster"
fi

build() { docker build -q -f "deploy/docker/$1" -t "penstock/$2:$version" "${@:3}" .; }
build services.Dockerfile services
build rollout-vllm.Dockerfile rollout-cpu --target cpu
build learner.Dockerfile learner-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu

kind get clusters 2>/dev/null | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 180s
context=kind-$cluster
for image in services rollout-cpu learner-cpu; do kind load docker-image --name "$cluster" "penstock/$image:$version"; done

helm upgrade --install "$release" helm/penstock --kube-context "$context" -f helm/penstock/values-no-gpu.yaml \
  --set images.pullPolicy=Never --set images.redis.tag=7.2-alpine
gateway=deploy/$release-penstock-gateway
kubectl --context "$context" rollout status "$gateway" --timeout="${deadline_s}s"

status() {
  kubectl --context "$context" exec "$gateway" -- penstock status --url http://127.0.0.1:8080 \
    --api-key-file /etc/penstock/keys/api-key "$@"
}
until [ "$(status --json 2>/dev/null | sed -n 's/.*"step": *\([0-9]*\).*/\1/p' | head -n 1)" -ge 1 ] 2>/dev/null; do
  if [ "$SECONDS" -gt "$deadline_s" ]; then
    echo "try.sh: error: no step after $deadline_s s; see kubectl --context $context get pods" >&2
    exit 1
  fi
  sleep 5
done
status
echo "The run trains. Watch it: kubectl --context $context exec -it $gateway -- penstock top --url http://127.0.0.1:8080 --api-key-file /etc/penstock/keys/api-key"
