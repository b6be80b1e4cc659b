#!/usr/bin/env bash
# Builds the programs, evaluates every row of the settings, judges the claims, and writes
# docs/quality.md with its charts. Rows that were measured before are not measured again,
# so an interrupted run continues where it stopped.
#
#   bench/quality/quality.sh                    all of it
#   bench/quality/quality.sh smollm2            the first part of the page, from
#                                               frontier_settings.py: up to three hours
#                                               on 2 cores (models/fetch smollm2 first)
#   bench/quality/quality.sh smollm2 --budget quick       fewer rows, about 40 minutes
#   bench/quality/quality.sh eviction           the part about eviction on SmolLM2, from
#                                               eviction_settings.py: some hours
#   bench/quality/quality.sh eviction --budget quick      fewer rows, about 30 minutes
#   bench/quality/quality.sh tiny               the built-in model, from
#                                               quality_settings.py: about two hours
#   bench/quality/quality.sh tiny --only palu_bits        one table, printed; docs stay
#   bench/quality/quality.sh tiny --engine-only --windows 10   the section about the engine
#   bench/quality/quality.sh smollm2 --help     the options
set -euo pipefail
cd "$(dirname "$0")/../.."

case ${1:-} in
  smollm2 | eviction | tiny) parts=("$1"); shift ;;
  '') parts=(smollm2 eviction tiny) ;;
  *) echo "usage: bench/quality/quality.sh [smollm2|eviction|tiny [options]]" >&2
     exit 2 ;;
esac
case " $* " in *' --help '* | *' -h '* | *' --tool '*) ;; *)
  cmake --preset release -DKVASIR_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target kvasir-compress kvasir -- --quiet
  ;;
esac
export PYTHONDONTWRITEBYTECODE=1
for part in "${parts[@]}"; do
  case $part in
    smollm2) python3 bench/quality/frontier.py "$@" ;;
    eviction) python3 bench/quality/eviction.py "$@" ;;
    tiny) python3 bench/quality/quality.py "$@" ;;
  esac
done
