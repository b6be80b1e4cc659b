#!/usr/bin/env bash
# Loads servers with different caches and evictions, whose pools have room for four
# sequences of the 8-bit cache, and writes docs/kv-limited.md. Run models/fetch smollm2
# first. Takes about half an hour on two cores, divergences included.
#
#   bench/kv_limited/kv_limited.sh             measures, and writes the page
#   bench/kv_limited/kv_limited.sh --write     only the page, from the last results
#   bench/kv_limited/kv_limited.sh --help      the options
set -euo pipefail
cd "$(dirname "$0")/../.."
case " $* " in *' --help '* | *' -h '* | *' --kvasir '*) ;; *)
  cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target kvasir kvasir-compress -- --quiet
  ;;
esac
PYTHONDONTWRITEBYTECODE=1 exec python3 bench/kv_limited/kv_limited.py "$@"
