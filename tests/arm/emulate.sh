#!/bin/bash
# Whether the C++ operations compute the same bits on 64-bit Arm as here with AVX2; Arm is emulated.
#
#     tests/arm/emulate.sh FOLDER [SEED ...]
#
# Makes models of random shapes, has each computed in every dtype here and by Python for Arm under QEMU, with each of Arm's
# instruction sets, and compares digests. Needs Debian or Ubuntu, root, what `make test` installs, and 2 GB below FOLDER,
# which keeps what was downloaded. It takes a quarter of an hour on two cores.

set -euo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$tree/.venv/bin/python}
mkdir -p "$1" && folder=$(cd "$1" && pwd)
seeds=("${@:2}")
[ ${#seeds[@]} -gt 0 ] || seeds=(1 2 3 5 8 100 101 102)
root=$folder/root site=$folder/site models=$folder/models
# the newest torch whose wheel for Arm has no CUDA in it
torch=torch==2.10.0
packages="annotated-types filelock fsspec jinja2 markupsafe mpmath networkx numpy pydantic pydantic_core safetensors sympy tqdm
    typing-inspection typing_extensions xxhash"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if [ ! -e "$folder/ready" ]; then
    dpkg --add-architecture arm64
    apt-get update -q
    apt-get install -y -q qemu-user-static g++-aarch64-linux-gnu
    mkdir -p "$folder/packages" "$root"
    (cd "$folder/packages" && apt-get download "python$version:arm64" "python$version-minimal:arm64" \
        "libpython$version-stdlib:arm64" "libpython$version-minimal:arm64" libc6:arm64 libgcc-s1:arm64 \
        libstdc++6:arm64 libgomp1:arm64 zlib1g:arm64 libexpat1:arm64 libffi8:arm64 libssl3:arm64 libbz2-1.0:arm64 \
        liblzma5:arm64 libsqlite3-0:arm64 libuuid1:arm64)
    for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$root"; done
    platforms=(--platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
    versions=$("$python" -m pip freeze | grep -i -E "^($(echo $packages | tr ' ' '|'))==")
    "$python" -m pip download -q --no-deps -d "$folder/wheels" --only-binary=:all: --python-version "$version" \
        "${platforms[@]}" "$torch" $versions
    for wheel in "$folder"/wheels/*.whl; do unzip -q -o "$wheel" -d "$site"; done
    touch "$folder/ready"
fi

export PYTHONPATH=$tree:$tree/kernels:$tree/tests
here=$(BATCHINFER_CPU_FEATURES=avx2 "$python" "$tree/tests/support/random_shapes.py" "$models" "${seeds[@]}")
for name in neon-i8mm neon; do
    arm=$(PYTHONPATH=$PYTHONPATH:$site XDG_CACHE_HOME=$folder/cache CXX=aarch64-linux-gnu-g++ BATCHINFER_CPU_FEATURES=$name \
        qemu-aarch64-static -cpu max -L "$root" "$root/usr/bin/python$version" \
        "$tree/tests/support/random_shapes.py" "$models" "${seeds[@]}")
    if [ "$here" != "$arm" ]; then
        printf '%s: other bits\n%s\n%s\n' "$name" "$here" "$arm"
        exit 1
    fi
    echo "$name: the same bits"
done
