#!/usr/bin/env bash
# Measures what docs/performance.md shows, and writes the page. The sections on llama.cpp
# and on GPUs come from committed results. This takes half an hour on two quiet cores.
# Results are kept in build/performance, so an interrupted run continues where it
# stopped. Results of another binary, host or command line are measured again; --fresh
# repeats all.
#
#   bench/performance.sh                      all benchmarks, and the page
#   bench/performance.sh --only attention     one benchmark again, and the page
#   bench/performance.sh --help               the options
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *' --help '* | *' -h '* | *' --kvasir '*) ;; *)
  cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target kvasir kvasir-bench -- --quiet
  ;;
esac
PYTHONDONTWRITEBYTECODE=1 exec python3 bench/performance.py "$@"
