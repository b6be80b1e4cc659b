#!/usr/bin/env bash
# Writes docs/quality.md and docs/quality.svg from nothing: builds the tool, makes
# every artifact of bench/quality/quality_settings.py, evaluates it, judges the claims.
# An interrupted run goes on where it was. A little over three hours on 2 cores.
#
#   bench/quality/quality.sh                    everything
#   bench/quality/quality.sh --only palu_bits   one table, printed; docs stay
#   bench/quality/quality.sh --engine-only --windows 10   the section about the engine
#   bench/quality/quality.sh --help             the options
set -euo pipefail
cd "$(dirname "$0")/../.."

case " $* " in *' --help '* | *' -h '* | *' --tool '*) ;; *)
  cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target kvasir-compress kvasir -- --quiet
  ;;
esac
PYTHONDONTWRITEBYTECODE=1 exec python3 bench/quality/quality.py "$@"
