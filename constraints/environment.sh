#!/usr/bin/env bash
# Gives an engine the environment that its constraints file describes, beside ours, because engines pin their own torch:
#     constraints/environment.sh vllm       builds it once, and links .venv-vllm to it
# It lies in EAGLE3_ENVIRONMENTS, under a name that says file and Python version, so every checkout shares it, and a
# changed file gets another one. A marker written last says that it is complete; without it, it is built anew.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=${1:?usage: constraints/environment.sh ENGINE}
list=constraints/$engine.txt
python=${PYTHON:-python3}
[ -f "$list" ] || { echo "$engine: there is no $list" >&2; exit 1; }

version=$("$python" -c 'import platform; print(platform.python_version())')
key=$(printf '%s\n' "$version" | cat "$list" - | sha256sum | cut -c1-12)
folder=${EAGLE3_ENVIRONMENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/eagle3/environments}
environment=$(realpath -m "$folder")/$engine-$key

mkdir -p "$folder"
exec 9>"$environment.lock" # dies with its holder, however that ends
flock --nonblock 9 || { echo "$environment is being built by another process; waiting for it"; flock 9; }

if [ ! -f "$environment/.complete" ] || [ ! -x "$environment/bin/python" ]; then
    echo "building $environment for Python $version from $list: minutes, and gigabytes"
    trap 'rm -rf "$environment"; echo "$engine: not built; nothing of it is left" >&2' EXIT
    trap 'exit 130' INT TERM HUP
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$list"
    "$environment/bin/python" -c "import $engine" # what cannot be imported would fail at every start
    touch "$environment/.complete"
    trap - EXIT
fi
ln -sfnT "$environment" ".venv-$engine"
