// grouped_matmul on the CPU. The parts of all groups form one list of work, and
// each thread takes the next part when it has finished one. So one large group
// is divided among all threads, and many small groups keep all threads busy.
// The products are computed by RunMatmulPart, as in matmul.
#include <algorithm>
#include <atomic>

#include "kernels/device/stream.h"
#include "kernels/linear/grouped_matmul.h"
#include "kernels/linear/matmul_part.h"

namespace kvasir::kernels {
namespace {

// How the product of one group is divided.
struct GroupParts {
  int64_t panel_parts = 0;
  int64_t row_parts = 0;
};

GroupParts Divide(int64_t rows, int64_t panels, int64_t parts) {
  if (rows == 0) return {};
  GroupParts divided;
  divided.panel_parts = std::clamp<int64_t>(parts, 1, panels);
  divided.row_parts = std::clamp<int64_t>(
      parts / panels, 1, std::max<int64_t>(1, rows / (2 * kFewRows)));
  return divided;
}

// Returns the estimated time of a group's product, in units of the time of one
// row of a large group. A small group takes as long as reading its weight,
// which is estimated as the time of kMaxTileRows rows.
int64_t CostOf(int64_t rows) {
  return rows == 0 ? 0 : std::max(rows, kMaxTileRows);
}

}  // namespace

void GroupedMatmulSimd(const GroupedMatmulArgs& params, float* scratch,
                       int64_t* first_parts, CpuStream& stream) {
  const int64_t threads = stream.pool().num_threads();
  const int64_t panels = params.weight.num_panels();
  const auto rows_of = [&](int64_t group) -> int64_t {
    return params.first_rows[group + 1] - params.first_rows[group];
  };
  int64_t cost = 0;
  int64_t used = 0;
  for (int64_t group = 0; group < params.num_groups; ++group) {
    cost += CostOf(rows_of(group));
    if (rows_of(group) > 0) ++used;
  }
  const int64_t parts_per_thread = params.num_rows <= kFewRows * used
                                       ? kFewRowsPartsPerThread
                                       : kManyRowsPartsPerThread;
  const int64_t parts = threads == 1 ? 1 : parts_per_thread * threads;
  const auto divide = [&](int64_t group) {
    const int64_t rows = rows_of(group);
    const int64_t share = (parts * CostOf(rows) + cost - 1) / cost;
    return Divide(rows, panels, threads == 1 ? 1 : share);
  };
  first_parts[0] = 0;
  for (int64_t group = 0; group < params.num_groups; ++group) {
    const GroupParts divided = divide(group);
    first_parts[group + 1] =
        first_parts[group] + divided.panel_parts * divided.row_parts;
    stream.AddWeightBytesRead(params.weight.bytes() * divided.row_parts);
  }
  const int64_t* const firsts = first_parts;
  const auto run_part = [&](int64_t index, int thread) {
    const int64_t group =
        std::upper_bound(firsts, firsts + params.num_groups + 1, index) -
        firsts - 1;
    const GroupParts divided = divide(group);
    const int64_t p = (index - first_parts[group]) % divided.panel_parts;
    const int64_t r = (index - first_parts[group]) / divided.panel_parts;
    const int64_t rows = rows_of(group);
    RunMatmulPart(
        params.Group(group, params.first_rows[group],
                     params.first_rows[group + 1]),
        {panels * p / divided.panel_parts,
         panels * (p + 1) / divided.panel_parts, rows * r / divided.row_parts,
         rows * (r + 1) / divided.row_parts},
        thread, scratch);
  };
  std::atomic<int64_t> next{0};
  const auto run = [&](int thread) {
    int64_t index;
    while ((index = next.fetch_add(1, std::memory_order_relaxed)) <
           first_parts[params.num_groups]) {
      run_part(index, thread);
    }
  };
  if (params.num_rows * params.weight.k * params.weight.n < kWorthWaking) {
    run(0);
  } else {
    stream.pool().Run(run);
  }
}

}  // namespace kvasir::kernels
