# Sourced by scripts/quickstart and scripts/test. `make_environment` creates or updates the virtual
# environment and prepends it to PATH; it returns immediately if nothing has changed. COAT_VLM_VENV
# overrides the folder (.venv). The working directory must be the repository root.

# The versions and extras that make_environment installs.
constraints=constraints.txt
extras=dev,trl,qlora

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    # Run it: a version manager's shim may exist for a Python that is not installed.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python 3.11 or newer with the venv module was found." >&2
  echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) and run this again." >&2
  return 1
}

has_gpu() {
  [[ "$(nvidia-smi --list-gpus 2>/dev/null)" == *GPU* ]]
}

# pinned_version NAME: prints the version of package NAME in $constraints.
pinned_version() {
  sed -n "s/^$1==\([^ #]*\).*/\1/p" "$constraints"
}

has_package() {
  python - "$1" "$2" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

name, wanted = sys.argv[1:]
try:
    sys.exit(version(name).split("+")[0] != wanted)
except PackageNotFoundError:
    sys.exit(1)
PY
}

# Installs the CPU build before coat-vlm; otherwise pip would install PyPI's CUDA build.
install_cpu_torch() {
  local torch torchvision
  torch=$(pinned_version torch)
  torchvision=$(pinned_version torchvision)
  if has_package torch "$torch"; then
    return
  fi
  # Use a wheel in the folders of PIP_FIND_LINKS or pip.conf, if there is one.
  if python -m pip install --quiet --no-index --no-deps "torch==$torch" >/dev/null 2>&1; then
    echo "torch $torch: installed from a local wheel"
    return
  fi
  echo "torch $torch: installing the CPU build from PyTorch's index"
  if python -m pip install --index-url https://download.pytorch.org/whl/cpu \
    "torch==$torch" "torchvision==$torchvision"; then
    return
  fi
  if [ "$constraints" = constraints.txt ]; then
    echo "The CPU build of torch could not be fetched. Check the network, or put its wheel into a" >&2
    echo "folder, set PIP_FIND_LINKS to that folder and run this again." >&2
    return 1
  fi
  echo "torch $torch: installing the CUDA build (5 GB), which also runs on a CPU"
  python -m pip install --quiet "torch==$torch" "torchvision==$torchvision"
}

refuse_cuda_torch() {
  if ! python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "This machine has no GPU but $VIRTUAL_ENV holds a CUDA build of torch (or one that does" >&2
    echo "not import). Remove that folder and run this again to install the CPU build." >&2
    return 1
  fi
}

make_environment() {
  export VIRTUAL_ENV="${COAT_VLM_VENV:-$PWD/.venv}"
  local stamp wanted device=cpu
  if has_gpu; then
    device=gpu
  fi
  # venv installs pip last: without pip the folder is new or incomplete.
  if [ ! -x "$VIRTUAL_ENV/bin/pip" ]; then
    local base
    base=$(find_python)
    echo "Creating the environment $VIRTUAL_ENV with $("$base" --version)"
    "$base" -m venv "$VIRTUAL_ENV"
  fi
  VIRTUAL_ENV=$(cd "$VIRTUAL_ENV" && pwd)
  stamp="$VIRTUAL_ENV/coat_vlm_installed"
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  unset PYTHONHOME
  hash -r
  wanted="$device $PWD $(cat pyproject.toml "$constraints" | cksum)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  echo "Installing coat-vlm and its tools for $device (a few minutes the first time)"
  if [ "$device" = cpu ]; then
    install_cpu_torch
  fi
  python -m pip install --quiet -c "$constraints" -e ".[$extras]"
  if [ "$device" = cpu ] && [ "$constraints" = constraints.txt ]; then
    refuse_cuda_torch
  fi
  echo "$wanted" >"$stamp"
}
