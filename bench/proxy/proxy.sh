#!/usr/bin/env bash
# Measures what the router costs (`kvasir bench proxy`) and writes
# docs/router-performance.md. Ten to fifteen minutes on two quiet cores.
#
#   bench/proxy/proxy.sh                       builds the release, measures, writes
#   bench/proxy/proxy.sh --kvasir FILE         measures this binary
#   bench/proxy/proxy.sh --out FILE -- FLAGS   writes another page; flags of the bench
set -euo pipefail
cd "$(dirname "$0")/../.."
case " $* " in *' --help '* | *' -h '* | *' --kvasir '*) ;; *)
  cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target kvasir -- --quiet
  ;;
esac
PYTHONDONTWRITEBYTECODE=1 exec python3 bench/proxy/proxy.py "$@"
