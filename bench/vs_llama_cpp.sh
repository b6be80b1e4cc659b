#!/usr/bin/env bash
# Compares decode steps of kvasir and llama.cpp, in turn, with the same random
# weights, machine and number of threads. It builds llama.cpp for this machine from
# the source package of llama-cpp-python (PyPI), in build/venv-llama-cpp.
#
#   bench/vs_llama_cpp.sh                        1 and 8 sequences of 8192 and 32768 tokens
#   bench/vs_llama_cpp.sh --json FILE            also writes the rows to a file, and replaces its rows of the same kind
#   bench/vs_llama_cpp.sh --context 512 --pairs 2
#   bench/vs_llama_cpp.sh --help                 all options
#
# Needs PyPI once, about 18 GB of memory and 5 GB of disk under build/, and what
# `scripts/setup compress` installs. JOBS=1 builds on one core.
# bench/measured/llama_cpp_page.py writes the rows of bench/measured/llama_cpp.json to the pages.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *' --help '* | *' -h '*)
  sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//'
  PYTHONDONTWRITEBYTECODE=1 exec python3 bench/vs_llama_cpp.py --help ;;
esac

jobs=${JOBS:-$(nproc)}
# Kvasir is built first, because it takes less time and soon reports what is missing.
cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
cmake --build --preset release --parallel "$jobs" --target kvasir kvasir-compress -- --quiet || {
  echo "vs_llama_cpp.sh: cannot build kvasir and kvasir-compress, which needs libtorch (error" \
    "above); scripts/setup compress installs what they need" >&2
  exit 1
}

# These versions are fixed, because bench/llama_cpp_cache.py depends on the layout of a saved
# state.
packages=(llama-cpp-python==0.3.36 gguf==0.19.0)
venv=$PWD/build/venv-llama-cpp
if [ "$(cat "$venv/installed.txt" 2>/dev/null)" != "${packages[*]}" ]; then
  /usr/bin/python3 -m venv --clear "$venv" || {
    echo "vs_llama_cpp.sh: cannot make a Python environment; scripts/setup installs python3-venv" >&2
    exit 1
  }
  echo "building llama.cpp from ${packages[0]} (10 minutes and more on 2 cores)" >&2
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$jobs \
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
    --no-binary llama-cpp-python "${packages[@]}" || {
    echo "vs_llama_cpp.sh: pip could not download or build ${packages[*]} (error above)" >&2
    exit 1
  }
  echo "${packages[*]}" >"$venv/installed.txt"
fi
PYTHONDONTWRITEBYTECODE=1 exec "$venv/bin/python" bench/vs_llama_cpp.py "$@"
