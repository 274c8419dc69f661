# Sourced by scripts/demo, scripts/test and others: creates VENV once, with this package and EXTRA, and activates it.
#
#   VENV          folder to create (default: .venv)
#   PYTHON        interpreter to create it with (default: python3, 3.11 or newer)
#   WHEEL         wheel of this package, installed instead of the checkout
#   EXTRA         one of the package's extras, such as "plot"
#   VERSIONS      tested (default): the packages of constraints.txt
#                 oldest: the same, overridden by constraints-oldest.txt
#                 newest: the newest of everything, upgraded once a day
#   REQUIREMENTS  file with more packages (default: none)
#
# Without an NVIDIA GPU it takes PyTorch's CPU build, which saves gigabytes. PyPI's own PyTorch is a CUDA build, so
# "newest" has the PyTorch of constraints.txt.

python=${PYTHON:-python3}
venv=${VENV:-.venv}
package=(-e ".[$EXTRA]")
if [ -n "${WHEEL:-}" ]; then package=("$WHEEL[$EXTRA]"); fi
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: PYTHON must be a Python 3.11 or newer with venv and pip, got '$python'." >&2
    echo "Install one (on Debian: apt install python3-venv) or name it: PYTHON=/path/to/python $0" >&2
    exit 1
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
# When any of these files changes, the environment is updated.
depends_on=$(cat pyproject.toml scripts/constraints*.txt scripts/environment.sh ${REQUIREMENTS:-} | cksum)
version=$(sed -n 's/^torch==//p' scripts/constraints.txt)
triton=(-c scripts/constraints-triton.txt)
case ${VERSIONS:-tested} in
tested) constraints=$(cat scripts/constraints.txt) ;;
oldest)
    names=$(sed -nE 's/^([a-z-]+)[=<].*/\1/p' scripts/constraints-oldest.txt | paste -sd '|')
    constraints=$(cat scripts/constraints-oldest.txt && grep -vE "^($names)==" scripts/constraints.txt)
    ;;
newest)
    constraints=torch==$version triton=()
    package=(--upgrade --upgrade-strategy eager "${package[@]}")
    depends_on="$depends_on $(date +%F)"
    ;;
*)
    echo "error: VERSIONS must be tested, oldest or newest, got '$VERSIONS'." >&2
    exit 1
    ;;
esac

install() {
    "$venv/bin/python" -m pip install -q -c "$venv/constraints.txt" "$@"
}

install_torch() {
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        install "torch==$version+cpu" 2>/dev/null && return
        install "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu && return
        echo "PyTorch's CPU build was not found; installing the default build, which is large." >&2
    fi
    install "torch==$version"
}

# An environment whose creation was interrupted is created again.
if ! { [ -f "$venv/bin/activate" ] && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
fi
. "$venv/bin/activate"
installed="$venv/installed-$EXTRA"
if [ "$(cat "$installed" 2>/dev/null)" != "$depends_on" ]; then
    echo "Installing into $venv (once) ..."
    echo "$constraints" >"$venv/constraints.txt"
    install numpy hatchling editables
    python -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null || install_torch
    if python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        install "${triton[@]}" --no-build-isolation "${package[@]}"
    else # a CUDA build of PyTorch comes with its own Triton
        install --no-build-isolation "${package[@]}"
    fi
    if [ -n "${REQUIREMENTS:-}" ]; then
        install -r "$REQUIREMENTS"
    fi
    echo "$depends_on" >"$installed"
fi
