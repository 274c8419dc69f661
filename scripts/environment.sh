# Sourced by scripts/demo and scripts/test: makes .venv once, with this package and EXTRAS, and activates it.
#
#   PYTHON        interpreter to make it with (default: python3, 3.10 or newer)
#   EXTRAS        the package's extras, e.g. "plot"
#
# Where no NVIDIA GPU is found it takes PyTorch's CPU build, which saves gigabytes.

python=${PYTHON:-python3}
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "error: '$python' is not a Python 3.10 or newer with venv and pip." >&2
    echo "Install one (on Debian: apt install python3-venv) or name it: PYTHON=/path/to/python $0" >&2
    exit 1
fi

export PIP_CONSTRAINT="$PWD/scripts/constraints.txt" PIP_BUILD_CONSTRAINT="$PWD/scripts/constraints.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Whatever this depends on: when it changes, what is installed is brought up to date.
wanted=$(cat pyproject.toml scripts/constraints.txt scripts/environment.sh | cksum)

install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' scripts/constraints.txt)
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        pip install -q "torch==$version+cpu" 2>/dev/null && return
        pip install -q "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu && return
        echo "PyTorch's CPU build could not be found; installing the default one, which is large." >&2
    fi
    pip install -q "torch==$version"
}

[ -x .venv/bin/python ] || "$python" -m venv .venv
. .venv/bin/activate
for extra in ${EXTRAS//,/ }; do
    if [ "$(cat ".venv/installed-$extra" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing into .venv (once) ..."
        python -c 'import torch' 2>/dev/null || install_torch
        pip install -q -e ".[$extra]"
        echo "$wanted" >".venv/installed-$extra"
    fi
done
