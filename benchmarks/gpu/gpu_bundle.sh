#!/bin/sh
# Fetches what `make gpu` needs and a bare GPU machine (PyTorch, transformers, accelerate; no network) may lack, into .gpu-bundle/cp312: carry
# that folder there beside the sources. `make gpu` takes from it only what the machine's Python does not have; DeepSpeed runs as a peer.
#
#   benchmarks/gpu/gpu_bundle.sh                  # for Python 3.12 on x86-64
#   PYTHON_VERSION=3.11 benchmarks/gpu/gpu_bundle.sh
#   PEER= benchmarks/gpu/gpu_bundle.sh            # without DeepSpeed
set -eu

PYTHON=${PYTHON:-python3}
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
PEER=${PEER-deepspeed}
MOST_KIB=40960

cd "$(dirname "$0")/../.."
version=cp$(echo "$PYTHON_VERSION" | tr -d .)
bundle=.gpu-bundle/$version
fresh=$bundle.fresh
rm -rf "$fresh"
mkdir -p "$fresh"
pip="$PYTHON -m pip --disable-pip-version-check install --quiet --no-compile"
platforms=""
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do platforms="$platforms --platform ${name}_x86_64"; done

# One folder for each wish, so that one that the machine fulfils stays out of its path.
fetch() {
    folder=$1
    shift
    # shellcheck disable=SC2086
    $pip --target "$fresh/$folder" --python-version "$PYTHON_VERSION" --implementation cp --only-binary=:all: $platforms "$@"
}

fetch pydantic pydantic
fetch hypothesis hypothesis
fetch pytest-timeout --no-deps pytest-timeout
fetch pytest-xdist --no-deps pytest-xdist execnet
# Both import what is there of CUDA and Triton.
fetch torchao --no-deps torchao
rm -f "$fresh"/torchao/torchao/_C_*.so # float8 training takes PyTorch's own kernels
fetch liger --no-deps liger-kernel
if [ -n "$PEER" ]; then
    # Comes as sources only; what it compiles, it compiles where it runs.
    wheels=$fresh/wheels
    if DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $PYTHON -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" "$PEER"; then
        $pip --target "$fresh/peer" --no-deps "$wheels"/*.whl
        fetch more --no-deps hjson py-cpuinfo msgpack einops
        cp -r "$fresh"/more/* "$fresh/peer/"
    else
        echo "gpu_bundle: without $PEER, which could not be built here (it needs setuptools, packaging, psutil and py-cpuinfo)" >&2
    fi
    rm -rf "$wheels" "$fresh/more"
fi

size=$(du -sk "$fresh" | cut -f1)
if [ "$size" -gt "$MOST_KIB" ]; then
    echo "gpu_bundle: $fresh has $size KiB, more than the $MOST_KIB that can be carried" >&2
    exit 1
fi
rm -rf "$bundle"
mv "$fresh" "$bundle"
echo "$bundle: $(ls "$bundle" | tr '\n' ' '), $size KiB"
